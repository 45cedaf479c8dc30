"""SIGTERM to the parent of `spawn` reaches its processes, which may save their work, before it ends the parent."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from types import FrameType

from ltc_dist.processes.started import Started

__all__ = ["SigtermHandedOn"]


class SigtermHandedOn:
    """Context manager: forwards SIGTERM to the processes, and at the end to this one, unless it has its own handler.

    Attributes:
        came_s: when it came first, on the monotonic clock.
    """

    def __init__(self, started: list[Started]) -> None:
        self._started = started
        self._is_ours = False
        self._told: set[int] = set()
        self.came_s: float | None = None

    @property
    def has_come(self) -> bool:
        return self.came_s is not None

    def __enter__(self) -> SigtermHandedOn:
        in_main_thread = threading.current_thread() is threading.main_thread()
        self._is_ours = in_main_thread and signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
        if self._is_ours:
            signal.signal(signal.SIGTERM, self._hand_on)
        return self

    def _hand_on(self, number: int, frame: FrameType | None) -> None:
        if self.came_s is None:
            self.came_s = time.monotonic()
        self._told.clear()  # each time it comes
        self.hand_on()

    def hand_on(self) -> None:
        """If it has come, send it to those that have started since."""
        if self.has_come:
            for started in self._started:
                if started.rank not in self._told:
                    self._told.add(started.rank)
                    started.send(signal.SIGTERM)

    def __exit__(self, *error: object) -> None:
        if self._is_ours:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            if self.has_come:
                sys.stdout.flush()
                os.kill(os.getpid(), signal.SIGTERM)
