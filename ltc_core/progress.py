"""One line that moves while something takes long: in a terminal and in a notebook, never in a file or a pipe.

Whoever waits for a compiler or a large file calls `shown`; what comes in many short pieces, as the uploads of a model's
parameters do, is a `Series`. What takes less than a second shows nothing.
"""

from __future__ import annotations

import contextlib
import sys
import threading
import time
from collections.abc import Callable, Iterator

__all__ = ["Series", "shown"]

_AFTER_S = 1.0
_DRAW_S = 0.5
_IDLE_S = 1.0  # a series whose next piece does not come within this time has ended
_ERASE = "\r\x1b[K"


@contextlib.contextmanager
def shown(what: str, rest: Callable[[], str] = lambda: "") -> Iterator[None]:
    """Show what takes long, and for how long, while a `with` block runs.

    Args:
        what: in words: 'compiling a graph of 45 ops'.
        rest: asked twice a second for what is told behind it, such as '3 of 10 MiB'.

    Cost: nothing without a terminal; else a thread for the time of the block.
    """
    if not _is_seen():
        yield
        return
    is_over = threading.Event()
    thread = threading.Thread(
        target=_draw, args=(what, rest, is_over), name="ltc-progress", daemon=True
    )
    thread.start()
    try:
        yield
    finally:
        is_over.set()
        thread.join()


class Series:
    """Many short pieces of one long work: one line for all of them, until `end`, or until none came for a second.

    Args:
        what: in words: 'uploading'.
        at_least: bytes of the pieces together that are worth a line.
    """

    def __init__(self, what: str, at_least: int) -> None:
        self._what = what
        self._at_least = at_least
        self._num_bytes = 0
        self._began = self._last = 0.0
        self._is_over = threading.Event()
        self._is_over.set()  # nothing is drawn

    def note(self, num_bytes: int) -> None:
        """Count a piece. Cost: 0.2 us."""
        now = time.monotonic()
        if now - self._last > _IDLE_S:
            self._began, self._num_bytes = now, 0
        self._last = now
        self._num_bytes += num_bytes
        is_long = self._num_bytes >= self._at_least and now - self._began >= _AFTER_S
        if is_long and self._is_over.is_set() and _is_seen():
            self._is_over = threading.Event()
            arguments = self._what, self._told, self._is_over, self._began
            threading.Thread(target=_draw, args=arguments, name="ltc-progress", daemon=True).start()

    def end(self) -> None:
        """What follows is another work. Cost: 0.1 us."""
        self._last = 0.0
        if not self._is_over.is_set():
            self._is_over.set()

    def _told(self) -> str:
        if time.monotonic() - self._last > _IDLE_S:
            self._is_over.set()
        return f"{self._num_bytes / (1 << 30):.1f} GiB"


def _is_seen() -> bool:
    """Whether somebody looks at stderr: it is a terminal, or that of a notebook's process."""
    stream = sys.stderr
    return stream is not None and (stream.isatty() or "ipykernel" in sys.modules)


def _draw(
    what: str, rest: Callable[[], str], is_over: threading.Event, began: float | None = None
) -> None:
    if began is None:
        began = time.monotonic()
        if is_over.wait(_AFTER_S):
            return
    stream = sys.stderr
    while True:
        told = rest()
        stream.write(
            f"{_ERASE}[ltc] {what}: {time.monotonic() - began:.0f} s{', ' if told else ''}{told}"
        )
        stream.flush()
        if is_over.wait(_DRAW_S):
            break
    stream.write(_ERASE)
    stream.flush()
