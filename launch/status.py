"""One line at the bottom of the terminal: the progress of the job. What processes print scrolls above it.

One line for all, because bars of several processes would overwrite each other. Without a terminal (output into a file
or a pipe) there is none. `agent` shows it; the steps come from `heartbeat`.
"""

from __future__ import annotations

import contextlib
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import TextIO

__all__ = ["is_worth_it", "shown"]

_DRAW_S = 0.5
_ERASE = "\r\x1b[K"


def is_worth_it() -> bool:
    """Whether stdout and stderr are terminals."""
    return sys.stdout.isatty() and sys.stderr.isatty()


@contextlib.contextmanager
def shown(steps: Callable[[], int]) -> Iterator[None]:
    """Show the line inside a `with` block; `steps` returns the number of steps so far."""
    line = _Line(sys.stderr, steps)
    kept = sys.stdout, sys.stderr
    sys.stdout, sys.stderr = _Above(kept[0], line), _Above(kept[1], line)
    try:
        yield
    finally:
        sys.stdout, sys.stderr = kept
        line.end()


class _Line:
    """The line; a thread redraws it twice a second."""

    def __init__(self, stream: TextIO, steps: Callable[[], int]) -> None:
        self._stream = stream
        self._steps = steps
        self._text = ""
        self._before = time.monotonic(), 0
        self._is_over = threading.Event()
        self.lock = threading.RLock()
        self._thread = threading.Thread(target=self._run, name="ltc-status", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while not self._is_over.wait(_DRAW_S):
            now, steps = time.monotonic(), self._steps()
            then, steps_then = self._before
            rate = max(0, steps - steps_then) / (now - then)
            self._before = now, steps
            with self.lock:
                self._text = f"step {steps}, {rate:.1f} steps/s" if steps else ""
                self.draw()

    def draw(self) -> None:
        self._stream.write(_ERASE + self._text)
        self._stream.flush()

    def erase(self) -> None:
        self._stream.write(_ERASE)
        self._stream.flush()

    def end(self) -> None:
        self._is_over.set()
        self._thread.join()
        with self.lock:
            self.erase()


class _Above:
    """A stream whose lines go above the line at the bottom."""

    def __init__(self, stream: TextIO, line: _Line) -> None:
        self._stream = stream
        self._line = line

    def write(self, text: str) -> int:
        with self._line.lock:
            self._line.erase()
            written = self._stream.write(text)
            if text.endswith("\n"):
                self._stream.flush()
                self._line.draw()
        return written

    def __getattr__(self, name: str) -> object:
        return getattr(self._stream, name)
