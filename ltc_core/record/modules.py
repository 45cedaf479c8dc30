"""The module that called an op: the path of its module, such as 'GPT.blocks.3.attention'.

In: the stack of the calling thread, on which each call of a module has a frame. Out: text. `record` asks for it on new
branches of the trace only, and gets '' unless a report is recorded (`is_on`). Backward calls no modules: `report` finds
theirs by the values that they read.
"""

from __future__ import annotations

import sys
import weakref
from types import FrameType

from torch import nn

__all__ = ["is_on", "module_path"]

is_on = False  # set by `report` while it records

_CALL = nn.Module._call_impl.__code__
# Module -> id of each module below it -> its name there.
_names: weakref.WeakKeyDictionary[nn.Module, dict[int, str]] = weakref.WeakKeyDictionary()


def module_path() -> str:
    """The path of the innermost module under way, from the outermost one's class on; '' if none is, or nobody asks.

    Cost: 0.1 us while nobody asks, else some microseconds, more at the first call of a module.
    """
    if not is_on:
        return ""
    frame: FrameType | None = sys._getframe(1)
    called: list[nn.Module] = []
    while frame is not None:
        if frame.f_code is _CALL:
            called.append(frame.f_locals["self"])
        frame = frame.f_back
    if not called:
        return ""
    called.reverse()
    path = type(called[0]).__name__
    for outer, inner in zip(called, called[1:], strict=False):
        path += f".{_name(outer, inner)}"
    return path


def _name(outer: nn.Module, inner: nn.Module) -> str:
    """The name of a module within the one that calls it; its class if it is no part of that one."""
    names = _names.get(outer)
    if names is None or id(inner) not in names:
        names = _names[outer] = {id(found): name for name, found in outer.named_modules() if name}
    return names.get(id(inner), type(inner).__name__)
