"""What the runtime learns from the steps of a script: which program follows which, and whether steps should run early.

Each program has a `Habit`; `early_run` fills it and goes by it.
"""

from __future__ import annotations

import statistics
import weakref
from collections import deque
from collections.abc import Sequence
from typing import Any, NamedTuple

from ltc_core.graph.ir import Node
from ltc_core.record.step import Step
from ltc_core.runtime.lasting import Lasting
from ltc_core.runtime.placement import Placement

__all__ = ["Choice", "Context", "Habit"]

_SURE = 2  # times that a program must have followed another one, more often than not
_MOST_SURE = 8
_MOST_CONTEXTS = 64
_MOST_IN_A_ROW = 32
_GAIN = 0.97  # factor by which steps must be quicker with it
_BLOCK = 5  # steps that are measured one way, the first of which does not count
_NUM_TURNS = 2  # of whole steps and each way of running early
_CLEAR = 1.1  # factor by which steps one way were quicker than each of
_CLEAR_STEPS = 3  # steps in a row the other way: then the rest need not be measured


class Choice:
    """Which way steps that end in one program are quicker: measured in blocks of steps that take turns.

    Whole steps cost what eager's do, or little more, on any machine. So steps run early only if they were quicker in
    each turn: one burst of other work does not decide. With a thread on each core there may be two ways to run early,
    with one thread less and with all while the script waits (see `placement`).

    Measured again, what was quicker stays if the first whole steps are much slower than the last early ones.

    Attributes:
        early: where the next one is to run early; None: it is to run whole.
        is_known: whether it has been measured.
    """

    def __init__(self) -> None:
        self._lasting = Lasting()
        self._ended_ns = 0  # the last step; none before the first one, which does not count
        self.early: Placement | None = None
        self._recent: deque[int] = deque(maxlen=_BLOCK)  # early steps, since it is known
        self._begin()

    def _begin(self) -> None:
        is_full = len(self._recent) == _BLOCK
        # What was quicker, and how long its last steps took; None once whole ones have been measured beside it.
        self._before = self.early if is_full else None
        self._before_ns = statistics.median(self._recent) if is_full else 0.0
        self._recent.clear()
        self.early = None
        self.is_known = False
        self._count = 0  # steps of this block, or since it is known
        self._samples: list[int] = []  # of this block
        self._num_turns = 0
        self._whole_ns = 0.0  # of this turn
        # Way that may be quicker -> the sum of its turns' medians.
        self._medians: dict[Placement, float] = {}
        self._left: list[Placement] = []  # ways of this turn that are left to be measured

    @property
    def is_early(self) -> bool:
        """Whether the next step is to run early."""
        return self.early is not None

    def rest(self) -> None:
        """Steps are whole for a while: what runs early is of no use."""
        self.early, self.is_known = None, True
        self._count = 0
        self._lasting.rest()

    def put_off(self) -> None:
        """A step tells nothing about later ones: what is being measured begins anew."""
        if not self.is_known:
            self._begin()

    def note(self, now_ns: int, ways: Sequence[Placement]) -> None:
        """A step has ended in a read.

        It began where the last one of these ended: what runs early takes the cores from what comes before it, too.

        Args:
            now_ns: the time.
            ways: where it may run early.
        """
        took_ns, self._ended_ns = now_ns - self._ended_ns, now_ns
        self._count += 1
        if self.is_known:
            if self.early is not None:
                self._recent.append(took_ns)
            if self._count == self._lasting.steps:
                self._begin()
            return
        if self._count > 1:
            self._samples.append(took_ns)
        if self.early is None and self._before is not None and self._are_slower(self._before_ns):
            self._end(self._before)
        elif self.early is not None and self._are_slower(self._whole_ns):
            del self._medians[self.early]
            self._next()
        elif self._count == _BLOCK:
            self._end_block(ways)

    def _end_block(self, ways: Sequence[Placement]) -> None:
        median_ns = statistics.median(self._samples)
        if self.early is None:
            self._before = None
            self._whole_ns = median_ns
            if not self._num_turns:
                self._medians = dict.fromkeys(ways, 0.0)
            self._left = list(self._medians)
        elif median_ns < _GAIN * self._whole_ns:
            self._medians[self.early] += median_ns
        else:
            del self._medians[self.early]
        self._next()

    def _next(self) -> None:
        """Begin the next block, or end."""
        self._count = 0
        self._samples.clear()
        if self._left:
            self.early = self._left.pop(0)
            return
        self._num_turns += 1
        if self._medians and self._num_turns < _NUM_TURNS:
            self.early = None
        else:
            self._end(min(self._medians, key=self._medians.__getitem__, default=None))

    def _end(self, early: Placement | None) -> None:
        """It has been measured which way is quicker."""
        self.early, self.is_known = early, True
        self._count = 0
        self._samples.clear()
        self._lasting.note(early)

    def _are_slower(self, other_ns: float) -> bool:
        """Whether the last steps were much slower than those of the other way."""
        last = self._samples[-_CLEAR_STEPS:]
        return len(last) == _CLEAR_STEPS and min(last) > _CLEAR * other_ns


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
        misses: how often in a row another program was cut.
        path: the steps of the trie that lead to it.
        ends: of its nodes: the count of values after each.
    """

    __slots__ = (
        "_followers",
        "ends",
        "misses",
        "num_values",
        "path",
        "recorded_ns",
    )

    def __init__(self) -> None:
        self.recorded_ns = self.num_values = self.misses = 0
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
