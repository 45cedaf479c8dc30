"""Text at the bottom of a terminal, redrawn twice a second. What is printed meanwhile scrolls above it.

`Screen` draws, `above` is a stream that prints above it. The launcher's status line and the live
view are such texts; `top` and the launcher use it. Plain escape sequences: up, and erase to the end
of the line.
"""

from __future__ import annotations

import contextlib
import os
import threading
import unicodedata
from collections.abc import Callable
from typing import TextIO

__all__ = ["Screen", "above", "fitted", "printable"]

_DRAW_S = 0.5
_ERASE = "\r\x1b[K"
_UP_AND_ERASE = "\x1b[1A\x1b[K"
_SIZE = os.terminal_size((80, 24))  # of a terminal that does not tell


def printable(text: str) -> str:
    """A text of somebody else with its control characters escaped, so that a terminal shows and does not obey them."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def fitted(line: str, columns: int) -> str:
    """The beginning of a line that fits into so many columns; '...' at its end says that there was more."""
    used = num_kept = 0
    for k, character in enumerate(line):
        used += _columns(character)
        if used <= columns - 3:
            num_kept = k + 1
        if used > columns:
            return line[:num_kept] + "..."[:columns]
    return line


def _columns(character: str) -> int:
    if unicodedata.combining(character):
        return 0
    return 2 if unicodedata.east_asian_width(character) in "WF" else 1


class Screen:
    """The text; a thread redraws it.

    Args:
        stream: the terminal.
        text: returns the lines for a width and a height, in characters; called in the thread.
    """

    def __init__(self, stream: TextIO, text: Callable[[os.terminal_size], list[str]]) -> None:
        self._stream = stream
        self._text = text
        self._lines: list[str] = []
        self._num_drawn = 1
        self._is_over = threading.Event()
        self.lock = threading.RLock()
        self._thread = threading.Thread(target=self._run, name="ltc-status", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while not self._is_over.wait(_DRAW_S):
            self.refresh()

    def refresh(self) -> None:
        """Ask for the text and draw it."""
        size = self._size()
        lines = [fitted(line, size.columns - 1) for line in self._text(size)[: size.lines - 1]]
        with self.lock:
            self._lines = lines
            self.draw()

    def _size(self) -> os.terminal_size:
        try:
            found = os.get_terminal_size(self._stream.fileno())
        except (OSError, ValueError):
            return _SIZE
        return found if found.columns > 1 and found.lines > 1 else _SIZE

    def draw(self) -> None:
        self._write(self._erasing() + "\n".join(self._lines))
        self._num_drawn = max(len(self._lines), 1)

    def erase(self) -> None:
        self._write(self._erasing())
        self._num_drawn = 1

    def _erasing(self) -> str:
        return _ERASE + _UP_AND_ERASE * (self._num_drawn - 1)

    def _write(self, text: str) -> None:
        with contextlib.suppress(OSError):  # the terminal is gone, the job goes on
            try:
                self._stream.write(text)
            except UnicodeEncodeError:
                encoding = self._stream.encoding
                self._stream.write(text.encode(encoding, "backslashreplace").decode(encoding))
            self._stream.flush()

    def end(self) -> None:
        """End the thread and leave the terminal as it was."""
        self._is_over.set()
        self._thread.join()
        with self.lock:
            self.erase()


class _Above:
    def __init__(self, stream: TextIO, screen: Screen) -> None:
        self._stream = stream
        self._screen = screen

    def write(self, text: str) -> int:
        with self._screen.lock:
            self._screen.erase()
            written = self._stream.write(text)
            if text.endswith("\n"):
                self._stream.flush()
                self._screen.draw()
        return written

    def __getattr__(self, name: str) -> object:
        return getattr(self._stream, name)


def above(stream: TextIO, screen: Screen) -> TextIO:
    """A stream whose lines go above the text."""
    found: object = _Above(stream, screen)
    return found  # type: ignore[return-value]  # it has all that a stream has
