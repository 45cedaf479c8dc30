"""Changes of a trace that no other code may come between: neither a finalizer nor a signal handler.

To record an op changes several fields of a trace and of cells, and between a cut and the handing over of its job there
are values that no job computes. A finalizer or a handler that records ops, or reads a value, would do so in the middle
of that. `uninterrupted` wraps such functions: no garbage is collected, and handlers wait. In the C++ part
(`record/csrc/ltc_record.cpp`) only garbage collection can run Python code.

Python drops what a finalizer raises, and a Ctrl-C that comes in one of the runtime's, or in one that `weakref` keeps,
would be lost. `keep_interrupts` has it come again.
"""

from __future__ import annotations

# `signal` itself makes enum members of what it returns, which takes ten times as long.
import _signal  # type: ignore[import-not-found]
import _thread
import functools
import gc
import signal
import sys
import threading
import time
from collections.abc import Callable
from types import FrameType, FunctionType
from typing import Any, ParamSpec, TypeVar

__all__ = ["after_fork_in_child", "calls", "keep_interrupts", "paused", "uninterrupted"]

P = ParamSpec("P")
R = TypeVar("R")

# The signals for which programs set handlers.
_NAMES = ("INT", "TERM", "HUP", "USR1", "USR2", "ALRM", "VTALRM", "PROF", "CHLD", "QUIT", "XCPU")
_SIGNALS = tuple(getattr(signal, f"SIG{name}") for name in _NAMES)
# Modules of the finalizers in which an interrupt is not to be lost; `weakref` has the runtime's own and PyTorch's.
_FINALIZERS = ("ltc_core.", "ltc_dist.", "weakref")
_AGAIN_S = 0.001


def uninterrupted(function: Callable[P, R]) -> Callable[P, R]:
    """Wrap `function`: garbage is not collected, and signal handlers of the main thread run after it.

    Cost: 0.4 us in another thread; in the main one 2.4 us, where Ctrl-C has a handler, and 0.8 us for each other one.
    """

    @functools.wraps(function)
    def run(*args: P.args, **kwargs: P.kwargs) -> R:
        handlers = _Handlers()
        calls.append(None)
        try:
            if gc.isenabled():
                paused.append(None)
                gc.disable()
            handlers.defer()
            return function(*args, **kwargs)
        finally:
            calls.pop()
            if not calls and paused:
                paused.clear()
                gc.enable()
                if calls:  # another thread has begun one meanwhile
                    paused.append(None)
                    gc.disable()
            handlers.deliver()

    return run


# One item for each call under way in any thread, also those in C++ (`Locked`); and whether one of them has turned
# collection off. The last one to end turns it on again: others may be in the middle when the first one ends.
calls: list[None] = []
paused: list[None] = []


def after_fork_in_child() -> None:
    """Undo what a function in another thread of the parent had begun: that thread is not in this process."""
    calls.clear()
    if paused:
        paused.clear()
        gc.enable()
    if _Handlers.active is not None:
        _Handlers.active.restore()


def keep_interrupts() -> None:
    """Have a KeyboardInterrupt that one of `_FINALIZERS` drops raised again, once that has ended."""
    before = sys.unraisablehook

    def hook(dropped: Any) -> None:
        module = getattr(dropped.object, "__module__", None) or ""
        if dropped.exc_type is KeyboardInterrupt and module.startswith(_FINALIZERS):
            threading.Thread(target=_interrupt_after, args=(hook,), name="ltc-interrupt").start()
        else:
            before(dropped)

    sys.unraisablehook = hook


def _interrupt_after(hook: FunctionType) -> None:
    """Interrupt the main thread once it has left the hook: what is raised in there is lost as well."""
    main = threading.main_thread().ident
    while True:
        frame = sys._current_frames().get(main or 0)
        while frame is not None and frame.f_code is not hook.__code__:
            frame = frame.f_back
        if frame is None:
            return _thread.interrupt_main()
        time.sleep(_AGAIN_S)


class _Handlers:
    """The main thread's signal handlers, which are replaced for a while: what they miss, they get at the end."""

    __slots__ = ("_noted", "_replaced")

    active: _Handlers | None = None  # only the outermost call replaces them

    def __init__(self) -> None:
        self._replaced: list[tuple[int, Any]] = []
        self._noted: list[tuple[int, FrameType | None]] = []

    def defer(self) -> None:
        if (
            _Handlers.active is not None
            or threading.current_thread() is not threading.main_thread()
        ):
            return
        for number in _SIGNALS:
            handler = _signal.getsignal(number)
            if callable(handler):
                self._replaced.append((number, handler))
                _Handlers.active = self
                _signal.signal(number, self._note)

    def _note(self, number: int, frame: FrameType | None) -> None:
        self._noted.append((number, frame))

    def deliver(self) -> None:
        """Set the handlers again, and call those that have missed a signal.

        Raises:
            BaseException: what a handler raises, such as KeyboardInterrupt.
        """
        if self._replaced:
            handlers = dict(self._replaced)
            try:
                self.restore()
            finally:
                for number, frame in self._noted:
                    handlers[number](number, frame)

    def restore(self) -> None:
        """Set the handlers again: all of them, also if one that is set again runs and raises."""
        _Handlers.active = None
        try:
            while self._replaced:
                _signal.signal(*self._replaced[-1])
                self._replaced.pop()
        finally:
            if self._replaced:
                self.restore()
