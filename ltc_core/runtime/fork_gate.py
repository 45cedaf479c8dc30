"""A fork goes first: while one waits for idle devices, the cuts of other threads wait for it.

Locks are not fair. Threads that record and cut without a pause would keep a fork from every device for minutes. Called
by `devices`, and by `device_context` before each cut.
"""

from __future__ import annotations

import threading

from ltc_core.runtime.worker import is_worker

__all__ = ["close", "open", "pass_through", "renew_lock"]

# A thread may cut while it holds the lock of another device, for which the fork waits.
_PATIENCE_S = 1.0

_gate = threading.Lock()
_forking: int | None = None  # the thread that has closed the gate


def close() -> None:
    """Make cuts of other threads wait, until this thread calls `open`. The first of several threads that fork does."""
    global _forking
    if _gate.acquire(timeout=_PATIENCE_S):
        _forking = threading.get_ident()


def open() -> None:
    global _forking
    if _forking == threading.get_ident():
        _forking = None
        _gate.release()


def pass_through() -> None:
    """Wait until the gate is open, a second at most. Cost: 0.05 us while no thread forks.

    A worker does not wait: its job has to end before the fork.
    """
    if not _gate.locked() or is_worker() or _forking == threading.get_ident():
        return
    if _gate.acquire(timeout=_PATIENCE_S):
        _gate.release()


def renew_lock() -> None:
    """Make a new lock in a forked child: the thread that held it may not be there."""
    global _gate, _forking
    _gate, _forking = threading.Lock(), None
