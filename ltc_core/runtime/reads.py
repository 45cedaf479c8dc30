"""What a script does between two reads of values: which programs it cuts, how long that takes, and whether it waits.

One for each device, told of cuts and reads by `device_context`. `early_run` and `streaming` go by what it has seen,
`run_policy` by the rhythm.
"""

from __future__ import annotations

import threading
import time
from typing import NamedTuple

from ltc_core.record.trace import Trace
from ltc_core.runtime.program_cache import CompiledGraph

__all__ = ["MOST_CUTS", "Reads", "Seen"]

MOST_CUTS = 5  # that are remembered: a script that reads nothing cuts for ever
_CHANGED = 3  # steps in a row that are otherwise


class Seen(NamedTuple):
    """What was done between two reads of one thread.

    Attributes:
        cuts: the programs, in order, `MOST_CUTS` at most.
        took_ns: from read to read.
        recorded_ns, num_values: of the first cut: how long it was recorded, and its values.
        is_new: whether another thread read before: the time does not count.
        is_in_parts: see `Reads`.
        now_ns: the time.
    """

    cuts: list[CompiledGraph]
    took_ns: int
    recorded_ns: int
    num_values: int
    is_new: bool
    is_in_parts: bool
    now_ns: int


class _Steady:
    """What a script does, or not: true or false until a few steps in a row say otherwise."""

    __slots__ = ("_num_others", "is_so")

    def __init__(self) -> None:
        self.is_so = False
        self._num_others = 0  # in a row

    def note(self, is_so: bool) -> None:
        self._num_others = 0 if is_so == self.is_so else self._num_others + 1
        if self._num_others == _CHANGED:
            self.is_so, self._num_others = is_so, 0

    def confirm(self) -> None:
        """A step was as the ones before."""
        self._num_others = 0


class Reads:
    """The reads of one device.

    Args:
        trace: that of the device.

    Attributes:
        is_waited: whether the script reads a value after each cut, and so waits for each step, or goes on without. A
            few cuts in a row change it: a script that reads every tenth loss does not wait.
        is_in_parts: whether steps, from mark to mark, are cut by reads before they end, as those of a mixture of
            experts that asks which rows go where. A few steps in a row change it.
    """

    def __init__(self, trace: Trace) -> None:
        self._trace = trace
        self._reader = 0  # the thread that reads the values of steps; others may read at any time
        self._resumed_ns = 0  # when it went on after a read
        self._cuts: list[CompiledGraph] = []  # since then
        self._recorded_ns = self._num_values = 0
        self._was_read = False  # since the last cut
        self._waited = _Steady()
        self._was_cut = False  # by a read, since the last mark
        self._in_parts = _Steady()

    @property
    def is_waited(self) -> bool:
        return self._waited.is_so

    @property
    def is_in_parts(self) -> bool:
        return self._in_parts.is_so

    @property
    def is_of_reader(self) -> bool:
        """Whether this thread is the one that reads the values of steps."""
        return threading.get_ident() == self._reader

    @property
    def may_be_of_reader(self) -> bool:
        """Whether no other thread is known to be the one that reads the values of steps."""
        return self._reader in (0, threading.get_ident())

    def before_cut(self) -> None:
        if not self._cuts:
            self._recorded_ns = time.perf_counter_ns() - self._resumed_ns
            self._num_values = self._trace.count

    def after_cut(self, compiled: CompiledGraph, is_awaited: bool) -> None:
        self._was_cut |= is_awaited
        if len(self._cuts) < MOST_CUTS:
            self._cuts.append(compiled)

    def end_step(self, is_marked: bool) -> None:
        """What was cut ends a step, or is one: the rhythm may be another now."""
        if is_marked:
            self._in_parts.note(self._was_cut)
            self._was_cut = False
        self._waited.note(self._was_read)
        self._was_read = False

    def skip(self, now_ns: int) -> None:
        """C++ has cut and read meanwhile (`known_reads`), until now."""
        self._was_read = self._was_cut = True
        self._waited.confirm()
        self._resumed_ns = now_ns
        self._cuts = []

    def after_read(self, is_held: bool) -> Seen | None:
        """The script goes on with a value that it has read. Cost: 0.5 us.

        Args:
            is_held: whether no other thread becomes the one that reads.

        Returns:
            What was done since the read before; None if nothing was cut.
        """
        self._was_read = True
        thread = threading.get_ident()
        is_new = thread != self._reader
        if is_new:
            if is_held or not self._cuts:
                return None
            self._reader = thread
        now = time.perf_counter_ns()
        took_ns, self._resumed_ns = now - self._resumed_ns, now
        if not self._cuts:
            return None
        cuts, self._cuts = self._cuts, []
        return Seen(
            cuts, took_ns, self._recorded_ns, self._num_values, is_new, self.is_in_parts, now
        )
