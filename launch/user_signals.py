"""SIGUSR1 and SIGUSR2 go from the launcher to the processes it starts, as a scheduler's warning before the end does.

Without that either signal would end the launcher. One that comes before the processes run is kept for them. A process
is started with both blocked, and opens itself to them (`accept`) when it can handle them. Used by `cli`, `agent` and
`shim`.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Callable, Iterable, Iterator
from types import FrameType

__all__ = ["accept", "forward_to", "hold", "starting"]

_SIGNALS = {signal.SIGUSR1, signal.SIGUSR2}

_early: list[int] = []  # those that came while no process ran
_pids: Callable[[], Iterable[int]] | None = None


def hold() -> None:
    """Keep the signals that come from now on for the processes."""
    if threading.current_thread() is threading.main_thread():
        for number in _SIGNALS:
            signal.signal(number, _forward)
        accept()


def accept() -> None:
    """Let the signals through to this process."""
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _SIGNALS)


def forward_to(pids: Callable[[], Iterable[int]]) -> None:
    """Forward the signals to the processes whose ids `pids` returns; those that were kept first."""
    global _pids
    _pids = pids
    kept = _early[:]
    del _early[: len(kept)]
    for number in kept:
        _forward(number, None)


@contextlib.contextmanager
def starting() -> Iterator[None]:
    """Start processes in this block: their signals wait for `accept`. Those of this process wait for its end."""
    signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)
    try:
        yield
    finally:
        accept()


def _forward(number: int, frame: FrameType | None) -> None:
    pids = list(_pids()) if _pids is not None else []
    if not pids:
        _early.append(number)
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)
