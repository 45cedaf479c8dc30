"""Hands recorded collectives over when the script goes on without recording: other processes may wait for them.

`dist.all_gather` is done when it returns; a collective that is recorded in its place runs when its graph is cut. A
process that then waits for others by a file, or computes elsewhere, would hold them up. A thread looks every 0.2 s
whether collectives are recorded, and hands them over if nothing was recorded since the look before. It sleeps while
there are none. Called where torch.distributed's collectives are recorded; calls `collective_tokens`.
"""

from __future__ import annotations

import contextlib
import queue
import threading
import time
from typing import Any

from ltc_core.runtime import collective_tokens, execution_gate
from ltc_core.runtime.devices import contexts

__all__ = ["after_fork_in_child", "watch"]

_LOOK_S = 0.2


class _Watch:
    """The thread, started by the first collective; `is_awake`: it looks."""

    def __init__(self) -> None:
        self.is_awake = False
        # A signal handler may record a collective while its thread is in `put`: a simple queue allows that.
        self._wake: queue.SimpleQueue[None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def wake(self) -> None:
        self.is_awake = True
        if self._thread is None:
            self._thread = threading.Thread(
                target=self._run, name="ltc-idle-collectives", daemon=True
            )
            self._thread.start()
        self._wake.put(None)

    def _run(self) -> None:
        while True:
            self._wake.get()
            before: Any = None
            while collective_tokens.are_recorded():
                now = [(ctx.trace.epoch, ctx.trace.count) for ctx in contexts()]
                if now == before:
                    _hand_over()
                before = now
                time.sleep(_LOOK_S)
            self.is_awake = False
            if collective_tokens.are_recorded():  # since the last look
                self.wake()


def _hand_over() -> None:
    if execution_gate.is_closed:  # the script says that no graph may end here
        return
    # The values of the graph carry an error, and raise it where they are read.
    with contextlib.suppress(Exception):
        collective_tokens.hand_over()


_watch = _Watch()


def watch() -> None:
    """Hand the collective that was recorded just now over soon, whatever the script does next. Cost: 0.1 us."""
    if not _watch.is_awake:
        _watch.wake()


def after_fork_in_child() -> None:
    """Forget the thread, which the forked child does not have."""
    global _watch
    _watch = _Watch()
