"""SIGTERM ends a job at a step boundary: all processes stop after the same step, whichever got the signal.

Each step's graph reduces one number, whether a process got the signal. The result is read as many steps later as may be
recorded ahead, when it is there without a wait. Used by `checkpointer`.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from types import FrameType
from typing import Any

import torch

import ltc_core as ltc
from ltc_core.settings import settings
from ltc_dist.collectives.ops import all_reduce
from ltc_dist.data import workers
from ltc_dist.job.ranks import ranks

__all__ = ["Stopped", "Stopping"]

_LABEL = "whether to stop"
_AGAIN_S = (
    30.0  # in which SIGTERM is taken for the same one, sent again, by a process that has stopped
)


class Stopped(SystemExit):
    """The job was told to stop, and has saved its state. Ends the process with exit code 143, as SIGTERM does."""

    def __init__(self) -> None:
        super().__init__(128 + signal.SIGTERM)


class Stopping:
    """Notes SIGTERM, if made in the main thread; a second SIGTERM changes nothing.

    A second one is common: a scheduler signals all processes of a job, and so does the launcher. SIGKILL, from the
    sender of the first signal, ends a process that takes too long. Loader processes ignore SIGTERM, too.
    """

    def __init__(self) -> None:
        self._is_told = False
        self._has_stopped = False
        self._is_closed = False
        self._previous: Any = None
        self._flags: tuple[torch.Tensor, torch.Tensor] | None = None
        self._pending: deque[torch.Tensor] = deque()
        self._keep_no_more: Callable[[], None] | None = None
        if threading.current_thread() is threading.main_thread():
            self._previous = signal.signal(signal.SIGTERM, self._note)
            self._keep_no_more = workers.keep_all()

    def _note(self, number: int, frame: FrameType | None) -> None:
        is_first, self._is_told = not self._is_told, True
        previous = self._before()
        if is_first and callable(previous):
            previous(number, frame)

    def _before(self) -> Any:
        """Return the handler that was there before, past those of our own that are closed."""
        found = self._previous
        owner = getattr(found, "__self__", None)
        if isinstance(owner, Stopping) and owner._is_closed:
            return owner._before()
        return signal.SIG_DFL if found is None or isinstance(found, _SentAgain) else found

    def is_agreed(self) -> bool:
        """Whether all processes stop here; call it once at the end of each step.

        Cost: with one process, nothing. With several, one op a step, and what it takes to reduce one number.
        """
        self._has_stopped = self._is_told if ranks().world_size == 1 else self._is_agreed_by_all()
        return self._has_stopped

    def _is_agreed_by_all(self) -> bool:
        if self._flags is None:
            device = ltc.lazy_device()
            self._flags = torch.zeros(1).to(device), torch.ones(1).to(device)
        flag = self._flags[self._is_told]
        self._pending.append(all_reduce("max", flag, label=_LABEL))
        if len(self._pending) <= settings.max_pending_steps:
            return False
        return bool(self._pending.popleft().item())

    def close(self) -> None:
        """Restore the previous handler of SIGTERM. The last checkpoint is whole by then, in all processes.

        A process that has stopped ignores SIGTERM for half a minute more: the same one, sent again while the process
        ends, would leave its temporary directories behind.
        """
        self._is_closed = True
        if self._keep_no_more is not None:
            self._keep_no_more()
            self._keep_no_more = None
        self._pending.clear()
        in_main_thread = threading.current_thread() is threading.main_thread()
        if in_main_thread and signal.getsignal(signal.SIGTERM) == self._note:
            previous = self._before()
            is_plain = self._has_stopped and previous == signal.SIG_DFL
            signal.signal(signal.SIGTERM, _SentAgain(time.monotonic()) if is_plain else previous)


@dataclass(frozen=True)
class _SentAgain:
    """Handler of a process that has stopped: SIGTERM ends it only if it is sent much later."""

    stopped_s: float

    def __call__(self, number: int, frame: FrameType | None) -> None:
        if time.monotonic() - self.stopped_s > _AGAIN_S:
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
