"""The user's line: the place in the user's program that called the op that is being recorded.

In: the stack of the calling thread. Out: text such as 'train.py:41 in loss_fn'. `record` asks for it only on new
branches of the trace; errors and `debug` use it, too. An op that backward records has the line that called backward.
"""

from __future__ import annotations

import contextlib
import os
import sys
import sysconfig
import threading
from types import CodeType, FrameType
from typing import Any

import torch
import typing_extensions
from torch.autograd.graph import _engine_run_backward

__all__ = [
    "called_module",
    "is_in_module",
    "known_places",
    "line_of_script",
    "skip_frames_of",
    "user_frames",
    "user_line",
    "user_place",
]

_libraries = [
    os.path.dirname(os.path.abspath(path)) + os.sep for path in (__file__, torch.__file__)
]
_libraries += (threading.__file__, contextlib.__file__)
_libraries.append(typing_extensions.__file__)  # wraps functions that PyTorch calls deprecated
_INSTALLED = tuple(sysconfig.get_paths()[k] + os.sep for k in ("stdlib", "purelib", "platlib"))
# Both by the id of a code object, which stays alive here: its hash, of all its constants, is computed anew each time.
_is_user: dict[int, tuple[bool, CodeType]] = {}
_described: dict[tuple[int, int], tuple[str, CodeType]] = {}
_RUN_BACKWARD = _engine_run_backward.__code__
IN_BACKWARD = ", in backward"
_CALL_MODULE = torch.nn.Module._call_impl.__code__


def skip_frames_of(directory: str) -> None:
    """Treat the files in a directory as a library: no line in them is the user's."""
    _libraries.append(os.path.abspath(directory) + os.sep)
    _is_user.clear()


def _of_user(code: CodeType) -> bool:
    known = _is_user.get(id(code))
    if known is None:
        is_user = not code.co_filename.startswith((*_libraries, "<frozen"))
        known = _is_user[id(code)] = is_user, code
    return known[0]


def _describe(frame: FrameType) -> str:
    code, line = frame.f_code, frame.f_lineno
    known = _described.get((id(code), line))
    if known is None:
        path = code.co_filename
        if path.startswith(os.getcwd() + os.sep):
            path = os.path.relpath(path)
        where = "" if code.co_name == "<module>" else f" in {code.co_name}"
        known = _described[id(code), line] = f"{path}:{line}{where}", code
    return known[0]


def is_within(package: str) -> bool:
    """Whether a module of a package, 'torch.export', is among the callers. Cost: 0.1 us a frame."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        name = frame.f_globals.get("__name__", "")
        if name == package or name.startswith(f"{package}."):
            return True
        frame = frame.f_back
    return False


def outer_line() -> str:
    """The user's outermost line in this thread: a line of their script."""
    frame: FrameType | None = sys._getframe(1)
    last = None
    while frame is not None:
        if _of_user(frame.f_code) and not frame.f_code.co_filename.startswith(_INSTALLED):
            last = frame
        frame = frame.f_back
    return _describe(last) if last is not None else user_line()


def line_of_script() -> str:
    """The user's innermost line; '' if that is in an installed library, which is not the user's to change."""
    frame, _ = _innermost()
    is_script = frame is not None and not frame.f_code.co_filename.startswith(_INSTALLED)
    return _describe(frame) if frame is not None and is_script else ""


def user_place() -> tuple[CodeType, int] | None:
    """The place in the user's innermost frame, finer than its line; None if there is no such frame. Cost: 1 us."""
    frame, _ = _innermost()
    return (frame.f_code, frame.f_lasti) if frame is not None else None


def known_places() -> tuple[Any, ...]:
    """What `user_line` has found out so far, and where it looks for backward. Read by `record/csrc/copied_step.h`."""
    return _is_user, _described, _RUN_BACKWARD, IN_BACKWARD


def user_line() -> str:
    """The line of the user's innermost frame, such as 'train.py:41 in loss_fn'; '' if there is none."""
    frame, called = _innermost()
    return _describe(frame) + called if frame is not None else ""


def _innermost() -> tuple[FrameType | None, str]:
    """The user's innermost frame, and words that say whether it has called backward."""
    frame: FrameType | None = sys._getframe(2)
    called = ""
    while frame is not None and not _of_user(frame.f_code):
        if frame.f_code is _RUN_BACKWARD:
            called = IN_BACKWARD
        frame = frame.f_back
    return frame, called


def is_in_module() -> bool:
    """Whether this thread is within a call of an `nn.Module`. Cost: 2 us, more in deep code."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code is not _CALL_MODULE:
        frame = frame.f_back
    return frame is not None


def user_frames(most: int) -> list[str]:
    """The user's frames of this thread, such as 'train_step (train.py:41)', innermost first, at most `most`."""
    frame: FrameType | None = sys._getframe(1)
    found: list[str] = []
    while frame is not None and len(found) < most:
        if _of_user(frame.f_code):
            place, _, _ = _describe(frame).partition(" in ")
            found.append(f"{frame.f_code.co_name} ({place})")
        frame = frame.f_back
    return found


def called_module() -> str:
    """The module of the function that the user's innermost frame called; '' if there is no such frame."""
    frame: FrameType | None = sys._getframe(1)
    name = ""
    while frame is not None and not _of_user(frame.f_code):
        if frame.f_code.co_filename != contextlib.__file__:
            name = frame.f_globals.get("__name__", "")
        frame = frame.f_back
    return name if frame is not None else ""
