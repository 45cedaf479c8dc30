"""A fork goes first: while one waits for idle devices, the cuts of other threads wait for it.

It waits itself for the imports of other threads: a module that one of them is importing stays locked in the child for
ever, and the first step on a device imports hundreds.

Locks are not fair. Threads that record and cut without a pause would keep a fork from every device for minutes. Called
by `devices`, and by `device_context` before each cut.
"""

from __future__ import annotations

import importlib
import threading
import time

from ltc_core.runtime.worker import is_worker

__all__ = ["await_imports", "close", "open", "pass_through", "renew_lock"]

# A thread may cut while it holds the lock of another device, for which the fork waits.
_PATIENCE_S = 1.0
_LOOK_S = 0.005  # between two looks at the imports

_gate = threading.Lock()
_forking: int | None = None  # the thread that has closed the gate


def close() -> None:
    """Make cuts of other threads wait, until this thread calls `open`. The first of several threads that fork does."""
    global _forking
    if _gate.acquire(timeout=_PATIENCE_S):
        _forking = threading.get_ident()


def await_imports(deadline: float) -> None:
    """Wait until no other thread imports a module.

    Args:
        deadline: of `time.monotonic`.
    """
    while _imports_elsewhere() and time.monotonic() < deadline:
        time.sleep(_LOOK_S)


def _imports_elsewhere() -> bool:
    locks = getattr(importlib._bootstrap, "_module_locks", {})
    owners = {getattr(lock(), "owner", None) for lock in list(locks.values())}
    return bool(owners - {None, threading.get_ident()})


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
