"""What the runtime learns from the steps of a script: which program follows which, and whether steps should run early.

Each program has a `Habit`; `early_run` fills it and goes by it.
"""

from __future__ import annotations

import statistics
import weakref
from collections.abc import Sequence
from typing import Any, NamedTuple

from ltc_core.graph.ir import Node
from ltc_core.record.step import Step
from ltc_core.runtime.lasting import Lasting

__all__ = ["Choice", "Context", "Habit"]

_SURE = 2  # times that a program must have followed another one, more often than not
_MOST_SURE = 8
_MOST_CONTEXTS = 64
_MOST_IN_A_ROW = 32
_GAIN = 0.97  # factor by which steps must be quicker with it
_BLOCK = 5  # steps that are measured one way, the first of which does not count
_NUM_BLOCKS = 4  # early, whole, early, whole
_CLEAR = 1.1  # factor by which the other way was quicker than each of
_CLEAR_STEPS = 3  # steps in a row: then the rest need not be measured


class Choice:
    """Which way steps that end in one program are quicker: measured in blocks of steps.

    Attributes:
        is_early: whether the next one is to run early.
        is_known: whether it has been measured.
    """

    def __init__(self) -> None:
        self._lasting = Lasting()
        self._begin()

    def _begin(self) -> None:
        self.is_early, self.is_known = True, False
        self._count = 0
        self._samples: dict[bool, list[int]] = {True: [], False: []}

    def rest(self) -> None:
        """Steps are whole for a while: what runs early is of no use."""
        self.is_early, self.is_known = False, True
        self._count = _BLOCK * _NUM_BLOCKS
        self._lasting.rest()

    def put_off(self) -> None:
        """A step tells nothing about later ones: what is being measured begins anew."""
        if not self.is_known:
            self._begin()

    def note(self, took_ns: int) -> None:
        """A step took so long, from read to read."""
        self._count += 1
        measured = _BLOCK * _NUM_BLOCKS
        if self._count > measured:
            if self._count == measured + self._lasting.steps:
                self._begin()
            return None
        if self._count % _BLOCK != 1:
            self._samples[self.is_early].append(took_ns)
        if self._is_clear():
            self._count = measured
            return self._end(not self.is_early)
        if self._count % _BLOCK == 0:
            self.is_early = not self.is_early
        if self._count == measured:
            early, whole = (statistics.median(self._samples[way]) for way in (True, False))
            self._end(early < _GAIN * whole)
        return None

    def _end(self, is_early: bool) -> None:
        """It has been measured which way is quicker."""
        self.is_early, self.is_known = is_early, True
        self._lasting.note(is_early)

    def _is_clear(self) -> bool:
        """Whether the way that is measured is much slower than the other one."""
        other, last = self._samples[not self.is_early], self._samples[self.is_early]
        if not other or len(last) < _CLEAR_STEPS:
            return False
        return min(last[-_CLEAR_STEPS:]) > _CLEAR * statistics.median(other)


class Context(NamedTuple):
    """What came before the next program, besides the last one.

    Attributes:
        other: of the program that was cut last before this one came; 0 if there is none.
        in_a_row: how often this one has come since then, up to a limit.
    """

    other: int = 0
    in_a_row: int = 0

    def again(self) -> Context:
        """That of the same program, once more."""
        return self._replace(in_a_row=min(self.in_a_row + 1, _MOST_IN_A_ROW))


_ANY = Context()


class _Foreseen(NamedTuple):
    program: weakref.ref[Any]
    sureness: int


class Habit:
    """What is known of the steps that end in one program.

    Which program comes next may depend on what came before: a mixture of experts reads the rows of one expert after the
    other by one program, and another one follows the last of them.

    Attributes:
        choice: which way they are quicker; None before one has run early.
        misses: how often in a row another program was cut.
        path: the steps of the trie that lead to it.
        ends: of its nodes: the count of values after each.
    """

    __slots__ = (
        "_followers",
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
        self._followers: dict[Context, _Foreseen] = {}

    def note_next(self, compiled: Any, context: Context) -> None:
        """Another read has come, and this program was cut before it."""
        for each in {context, _ANY}:
            self._note(compiled, each)

    def _note(self, compiled: Any, context: Context) -> None:
        known = self._followers.get(context)
        if known is not None and known.program() is compiled:
            self._followers[context] = known._replace(sureness=min(known.sureness + 1, _MOST_SURE))
        elif known is not None and known.sureness > 1:
            self._followers[context] = known._replace(sureness=known.sureness - 2)
        else:
            if len(self._followers) >= _MOST_CONTEXTS:
                self._followers.clear()
            self._followers[context] = _Foreseen(weakref.ref(compiled), 0)

    def followers(self) -> list[Any]:
        """The programs that have followed."""
        found = {
            id(program): program
            for known in self._followers.values()
            if (program := known.program())
        }
        return list(found.values())

    def next(self, context: Context) -> Any | None:
        """The program that is expected before the next read; None if there is no telling."""
        for known in map(self._followers.get, (context, _ANY)):
            if known is not None and known.sureness >= _SURE:
                return known.program()
        return None

    def know_path(self, path: Sequence[Step], nodes: Sequence[Node]) -> None:
        self.path = set(path)
        self.ends = [node.first + len(node.outs) for node in nodes]
