"""What each thread does now, while a live view watches this process.

`slices` makes a `Mark` where a slice begins, in each thread, and the mark ends with the slice.
Marks of one thread nest. `live.sampler` reads them from another thread a few times a second. While
nobody watches, `on` is None and no mark is made.
"""

from __future__ import annotations

import contextlib
import threading
import time
from typing import Any, NamedTuple

__all__ = ["Awaited", "Mark", "Marks"]


class Awaited(NamedTuple):
    """A meeting of processes. Two processes that wait at one meeting have equal values.

    Attributes:
        line: name of the connection or of the rendezvous.
        number: of the meeting on it.
        members: ranks that come to it.
    """

    line: str
    number: int
    members: tuple[int, ...]


class Marks:
    """The marks of all threads.

    Attributes:
        now: identifier of a thread -> what it does; None if it records or computes by itself.
        spent_ns: name, identifier of a thread -> time of all marks that have ended. A thread adds to its own entries
            only, so that no lock is needed.
    """

    def __init__(self) -> None:
        self.now: dict[int, Mark | None] = {}
        self.spent_ns: dict[tuple[str, int], int] = {}


class Mark:
    """What a thread does: a context manager around it.

    Args:
        inner: the slice of a timeline, or a context that yields None; the block gets what it yields.

    Attributes:
        name: of the slice. lane: of the slice; empty for the lane of its thread.
        since_ns: on the monotonic clock of the host.
        awaited: the meeting that the thread waits at, if it waits for other processes.

    Cost: 1.5 us, beside 0.5 us of a slice that nobody watches (2 busy cores, Python 3.11; `timeit` of an empty block).
    """

    __slots__ = ("_before", "_inner", "_marks", "_thread", "awaited", "lane", "name", "since_ns")

    def __init__(
        self,
        marks: Marks,
        name: str,
        lane: str,
        awaited: Awaited | None,
        inner: contextlib.AbstractContextManager[Any],
    ) -> None:
        self._marks = marks
        self._inner = inner
        self.name = name
        self.lane = lane
        self.awaited = awaited

    def __enter__(self) -> Any:
        self._thread = thread = threading.get_ident()
        now = self._marks.now
        self._before = now.get(thread)
        self.since_ns = time.perf_counter_ns()
        now[thread] = self
        return self._inner.__enter__()

    def __exit__(self, *error: Any) -> None:
        try:
            self._inner.__exit__(*error)
        finally:
            marks, key = self._marks, (self.name, self._thread)
            marks.now[self._thread] = self._before
            took_ns = time.perf_counter_ns() - self.since_ns
            marks.spent_ns[key] = marks.spent_ns.get(key, 0) + took_ns


on: Marks | None = None  # while this process is watched
