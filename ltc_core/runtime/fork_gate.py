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
_IMPORTS_S = 5.0  # those of the first step take a second or two
_LOOK_S = 0.005  # between two looks at the imports

_gate = threading.Lock()
_forking: int | None = None  # the thread that has closed the gate
_endless: set[str] = set()  # modules whose import has outlasted a wait


def close() -> None:
    """Make cuts of other threads wait, until this thread calls `open`. The first of several threads that fork does."""
    global _forking
    if _gate.acquire(timeout=_PATIENCE_S):
        _forking = threading.get_ident()


def await_imports(patience_s: float = _IMPORTS_S) -> None:
    """Wait until no other thread imports a module.

    A script whose module trains while it is imported is waited for once.
    """
    deadline = time.monotonic() + patience_s
    while imported := _imported_elsewhere() - _endless:
        if time.monotonic() > deadline:
            _endless.update(imported)
            return
        time.sleep(_LOOK_S)


def _imported_elsewhere() -> set[str]:
    """The modules that other threads are importing."""
    locks = getattr(importlib._bootstrap, "_module_locks", {})
    own = None, threading.get_ident()
    found = [(name, lock()) for name, lock in locks.copy().items()]
    return {name for name, lock in found if getattr(lock, "owner", None) not in own}


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
