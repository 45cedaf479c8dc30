"""Ctrl-C is deferred while it would leave the runtime in an inconsistent state.

Between a cut and the handing over of its job, an interrupt would leave values that no job computes.
"""

from __future__ import annotations

import signal
import threading
from types import FrameType, TracebackType
from typing import Any

__all__ = ["DeferredInterrupts"]


class DeferredInterrupts:
    """Context manager: SIGINT in the main thread is noted, and delivered to its handler at the end. Cost: 2 us."""

    __slots__ = ("_noted", "_previous")

    def __enter__(self) -> None:
        self._previous: Any = None
        self._noted: tuple[int, FrameType | None] | None = None
        if threading.current_thread() is threading.main_thread():
            previous = signal.getsignal(signal.SIGINT)
            if callable(previous):
                self._previous = previous
                signal.signal(signal.SIGINT, self._note)

    def _note(self, number: int, frame: FrameType | None) -> None:
        self._noted = (number, frame)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._previous is not None:
            signal.signal(signal.SIGINT, self._previous)
            if self._noted is not None:
                self._previous(*self._noted)
