"""What the runtime learns from the steps of a script: which program follows which, and whether steps should run early.

Each program has a `Habit`; `early_run` fills it and goes by it.
"""

from __future__ import annotations

import statistics
import weakref
from collections.abc import Sequence
from typing import Any

from ltc_core.graph.ir import Node
from ltc_core.record.step import Step

__all__ = ["Choice", "Habit"]

_SURE = 2  # times that a program must have followed another one, more often than not
_MOST_SURE = 8
_GAIN = 0.97  # factor by which steps must be quicker with it
_BLOCK = 5  # steps that are measured one way, the first of which does not count
_NUM_BLOCKS = 4  # early, whole, early, whole
_CLEAR = 1.1  # factor by which the other way was quicker than each of
_CLEAR_STEPS = 3  # steps in a row: then the rest need not be measured
_LASTS = 2000  # steps until it is measured again


class Choice:
    """Which way steps that end in one program are quicker: measured in blocks of steps.

    Attributes:
        is_early: whether the next one is to run early.
        is_known: whether it has been measured.
    """

    def __init__(self) -> None:
        self._begin()

    def _begin(self) -> None:
        self.is_early, self.is_known = True, False
        self._count = 0
        self._samples: dict[bool, list[int]] = {True: [], False: []}

    def rest(self) -> None:
        """Steps are whole for a while: what runs early is of no use."""
        self.is_early, self.is_known = False, True
        self._count = _BLOCK * _NUM_BLOCKS

    def note(self, took_ns: int) -> None:
        """A step took so long, from read to read."""
        self._count += 1
        measured = _BLOCK * _NUM_BLOCKS
        if self._count > measured:
            if self._count == measured + _LASTS:
                self._begin()
            return
        if self._count % _BLOCK != 1:
            self._samples[self.is_early].append(took_ns)
        if self._is_clear():
            self._count = measured
            self.is_early, self.is_known = not self.is_early, True
            return
        if self._count % _BLOCK == 0:
            self.is_early = not self.is_early
        if self._count == measured:
            early, whole = (statistics.median(self._samples[way]) for way in (True, False))
            self.is_early, self.is_known = early < _GAIN * whole, True

    def _is_clear(self) -> bool:
        """Whether the way that is measured is much slower than the other one."""
        other, last = self._samples[not self.is_early], self._samples[self.is_early]
        if not other or len(last) < _CLEAR_STEPS:
            return False
        return min(last[-_CLEAR_STEPS:]) > _CLEAR * statistics.median(other)


class Habit:
    """What is known of the steps that end in one program.

    Attributes:
        choice: which way they are quicker; None before one has run early.
        misses: how often in a row another program was cut.
        path: the steps of the trie that lead to it.
        ends: of its nodes: the count of values after each.
    """

    __slots__ = (
        "_next",
        "_sureness",
        "choice",
        "ends",
        "misses",
        "num_values",
        "path",
        "recorded_ns",
    )

    def __init__(self) -> None:
        self.recorded_ns = self.num_values = self.misses = 0
        self.choice: Choice | None = None
        self.path: set[Step] = set()
        self.ends: list[int] = []
        self._next: weakref.ref[Any] | None = None
        self._sureness = 0

    def note_next(self, compiled: Any) -> None:
        """Another read has come, and this program was cut before it."""
        if self._next is not None and self._next() is compiled:
            self._sureness = min(self._sureness + 1, _MOST_SURE)
        elif self._sureness > 1:
            self._sureness -= 2
        else:
            self._next, self._sureness = weakref.ref(compiled), 0

    @property
    def follower(self) -> Any | None:
        """A program that has followed; None if there was none that could be expected."""
        return self._next() if self._next is not None else None

    def next(self) -> Any | None:
        """The program that is expected before the next read; None if there is no telling."""
        return self.follower if self._sureness >= _SURE else None

    def know_path(self, path: Sequence[Step], nodes: Sequence[Node]) -> None:
        self.path = set(path)
        self.ends = [node.first + len(node.outs) for node in nodes]
