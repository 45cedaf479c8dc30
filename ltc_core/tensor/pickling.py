"""Refuse to save a tensor and a view of it: they would be loaded as two tensors that do not share memory.

`check_handles` checks all tensors of a structure, for `api.verbs`. `check_pickled` checks the tensors that one pickler
writes, one after the other, for `lazy_tensor`; the first one says how to load the file.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Iterable
from typing import Any

from ltc_core import errors, source
from ltc_core.settings import settings
from ltc_core.tensor.handles import Cell, Handle, base_of

__all__ = ["check_handles", "check_pickled"]


class _Seen:
    """The memory of one structure's tensors: id of the cell -> (position and handle of the first tensor there)."""

    def __init__(self) -> None:
        self._first: dict[int, tuple[int, Handle]] = {}
        self._count = 0

    def add(self, handle: Handle) -> None:
        self._count += 1
        number, first = self._first.setdefault(id(base_of(handle)), (self._count, handle))
        if first is not handle and (type(handle) is not Cell or type(first) is not Cell):
            raise errors.CheckpointError(
                f"Tensor ID {self._count} is sharing a view with tensor ID {number}",
                got="a tensor and a view of it, which would be saved as two and come back as two",
                where=source.user_line(),
                next="save CPU copies: ltc_core.save(...), or t.cpu() first",
            )


def check_handles(handles: Iterable[Handle]) -> None:
    """Raise if the structure has a tensor and a view of it.

    Raises:
        CheckpointError: "Tensor ID 2 is sharing a view with tensor ID 1".
    """
    seen = _Seen()
    for handle in handles:
        seen.add(handle)


_picklers: weakref.WeakKeyDictionary[Any, _Seen] = weakref.WeakKeyDictionary()


def check_pickled(handle: Handle) -> bool:
    """Check one more tensor that the calling `torch.save` writes; other picklers are not checked.

    Returns:
        whether it writes its older format, in which the bytes of all tensors come last.
    """
    frame = _calling_save()
    if frame is None:
        return False
    _picklers.setdefault(frame.f_locals["pickler"], _Seen()).add(handle)
    _tell_how_to_load()
    return bool(frame.f_code.co_name == _OLDER)


_has_told = False


def _tell_how_to_load() -> None:
    """Say once how to load the file without ltc, if the script calls `torch.save` itself."""
    global _has_told
    where = "" if _has_told else source.line_of_script()
    if where:
        _has_told = True
        name = settings.device_name
        print(
            f"[ltc] torch.save writes tensors of the device {name} ({where}): a program without ltc_core has to load "
            "them with map_location='cpu'. ltc_core.save writes CPU tensors.",
            file=sys.stderr,
            flush=True,
        )


_OLDER = "_legacy_save"


def _calling_save() -> Any:
    """The frame of the innermost `torch.save` on the stack; PyTorch does not pass its pickler to `__reduce_ex__`."""
    frame = sys._getframe(2)
    while frame is not None:
        if (
            frame.f_code.co_name in ("_save", _OLDER)
            and frame.f_globals.get("__name__") == "torch.serialization"
        ):
            return frame
        frame = frame.f_back  # type: ignore[assignment]
    return None
