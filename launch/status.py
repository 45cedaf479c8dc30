"""What is shown at the bottom of the terminal: the progress of the job, or with --watch the live view of its ranks.

What processes print scrolls above it. One text for all, because bars of several processes would
overwrite each other. Without a terminal (output into a file or a pipe) there is none. `agent` shows
it; the steps come from `heartbeat`, the live view is that of `ltc_core.live`.
"""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from ltc_core.live import table
from ltc_core.live.board import read_states
from ltc_core.live.screen import Screen, above

__all__ = ["is_worth_it", "line_of_steps", "live_view", "shown"]

Text = Callable[[os.terminal_size], list[str]]


def is_worth_it() -> bool:
    """Whether stdout and stderr are terminals."""
    return sys.stdout.isatty() and sys.stderr.isatty()


@contextlib.contextmanager
def shown(text: Text) -> Iterator[None]:
    """Show a text inside a `with` block."""
    screen = Screen(sys.stderr, text)
    kept = sys.stdout, sys.stderr
    sys.stdout, sys.stderr = above(kept[0], screen), above(kept[1], screen)
    try:
        yield
    finally:
        sys.stdout, sys.stderr = kept
        screen.end()


def line_of_steps(steps: Callable[[], int], awaited: Callable[[], str]) -> Text:
    """One line.

    Args:
        steps: returns the number of steps so far.
        awaited: returns what the launcher waits for; '' if it does not wait.
    """
    then, before = time.monotonic(), 0

    def text(size: os.terminal_size) -> list[str]:
        nonlocal then, before
        now, made = time.monotonic(), steps()
        rate = max(0, made - before) / (now - then)
        then, before = now, made
        if waits := awaited():
            return [waits]
        return [f"step {made}, {rate:.1f} steps/s"] if made else []

    return text


def live_view(directory: str, awaited: Callable[[], str]) -> Text:
    """The ranks that publish their states in a directory, and what the launcher waits for."""

    def text(size: os.terminal_size) -> list[str]:
        waits = awaited()
        return [*table.lines(read_states(Path(directory)), size), *([waits] if waits else [])]

    return text
