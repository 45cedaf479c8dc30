"""One line that moves while something takes long: in a terminal and in a notebook, never in a file or a pipe.

Whoever waits for a compiler or a large file calls `shown`. What takes less than a second shows nothing.
"""

from __future__ import annotations

import contextlib
import sys
import threading
import time
from collections.abc import Callable, Iterator

__all__ = ["shown"]

_AFTER_S = 1.0
_DRAW_S = 0.5
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


def _is_seen() -> bool:
    """Whether somebody looks at stderr: it is a terminal, or that of a notebook's process."""
    stream = sys.stderr
    return stream is not None and (stream.isatty() or "ipykernel" in sys.modules)


def _draw(what: str, rest: Callable[[], str], is_over: threading.Event) -> None:
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
