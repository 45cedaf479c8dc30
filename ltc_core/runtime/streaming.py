"""Streaming: a step that the script waits for is handed over in parts, so that it runs while it is recorded.

Where each step is waited for, as by `loss.item()`, recording and running take turns. A part is cut like a step: what is
alive becomes inputs of the next part. Parts cost more cuts, and each plans its memory by itself; which way is quicker
is measured in steps of the script. Only a step that repeats is cut into parts, and only while its ops are called one
by one in C++: a step that is compiled is one program.

Python gives the interpreter to another thread after 5 ms, and the worker needs it at both ends of a part. So it is
given after 0.1 ms while parts are recorded. A ViT with one thread on two cores: 30 ms a step whole, 18 ms in three
parts; with a load of three, 29 ms in parts without the shorter interval and 27 ms with it.

Told of cuts and reads by `device_context`, which asks it whether a part is due.
"""

from __future__ import annotations

import os
import statistics
import sys
import time
from collections.abc import Sequence
from typing import Any

from ltc_core.program.program import Tier
from ltc_core.record.trace import Trace
from ltc_core.runtime.program_cache import CompiledGraph
from ltc_core.settings import settings
from ltc_core.thread_state import in_own_state

__all__ = ["Streaming"]

_REPEATED = 3  # times in a row that a step must have come
_MEASURED = 5  # steps in each way
_UNSETTLED = 3  # steps after the first in parts that are not measured: the parts are recorded for the first time
_LASTS = 2000  # steps until it is measured again
_MISSES = (
    5  # steps in a row that ended otherwise than the one before, after which steps are whole again
)
_GAIN = 0.97  # factor by which steps in parts must be quicker
_LEAST_NS = 1_500_000  # of recording, and of running
_PART_NS = 2_000_000  # of recording
_MOST_PARTS = 4
_SWITCH_S = 0.0001


class Streaming:
    """The steps of one device, between two reads of the script.

    Args:
        trace: that of the device.
        is_possible: whether its programs are run op by op.
    """

    def __init__(self, trace: Trace, is_possible: bool) -> None:
        self._trace = trace
        self._is_possible = is_possible
        self._step: CompiledGraph | None = None  # the program of the step that repeats
        self._scalars: Sequence[Any] = ()  # of its last run
        self._times = 0  # that it has come in a row
        self._resumed_ns = 0  # when the script went on after a read
        self._cuts = 0  # since then
        self._last: CompiledGraph | None = None  # program of the last cut that was no part
        self._recorded_ns = self._num_values = 0  # of the first cut since then
        self._samples: list[int] = []
        self._whole_ns = 0.0  # a step that is handed over whole
        self._num_parts = 0  # 0: steps are whole
        self._parts = 0  # that the step which is recorded has handed over
        self._handed = 0  # that the last step handed over before its end
        self._end: CompiledGraph | None = None  # the program that ended the last step
        self._misses = 0
        self._wait = 0  # steps until one is measured
        self._switch_s = 0.0  # the interval that is set again; 0: it was not changed

    # -- cuts ----------------------------------------------------------------------------------

    @property
    def is_part_due(self) -> bool:
        """Whether the next op begins another part."""
        more = self._parts + 1 < self._num_parts
        return more and self._trace.count >= self._size and self._num_parts > 0

    @property
    def is_in_parts(self) -> bool:
        """Whether what is recorded is a part of a step."""
        return self._parts > 0

    @property
    def _size(self) -> int:
        """Values of a part."""
        return -(-self._num_values // max(self._num_parts, 1))

    def before_cut(self) -> None:
        if not self._cuts and not self._num_parts:
            self._recorded_ns = time.perf_counter_ns() - self._resumed_ns
            self._num_values = self._trace.count

    def after_cut(self, compiled: CompiledGraph, scalars: Sequence[Any], goes_on: bool) -> None:
        """A program was handed over. With `goes_on` the step goes on: it was a part, and not the last one."""
        self._cuts += 1
        if goes_on:
            self._parts += 1
            if not self._switch_s:
                self._switch_s = sys.getswitchinterval()
                sys.setswitchinterval(_SWITCH_S)
            self._limit_part()
            return
        self._last = compiled
        if not self._num_parts:
            self._scalars = scalars
        self._end_parts()

    def _end_parts(self) -> None:
        self._handed, self._parts = self._parts, 0
        if self._switch_s:
            sys.setswitchinterval(self._switch_s)
            self._switch_s = 0.0

    def _limit_part(self) -> None:
        if self._parts + 1 < self._num_parts:
            self._trace.limit = min(self._trace.limit, self._size)

    # -- reads ---------------------------------------------------------------------------------

    def after_read(self) -> None:
        """The script goes on with a value that it has read. Cost: 0.4 us where there is nothing to gain."""
        now = time.perf_counter_ns()
        took_ns, self._resumed_ns = now - self._resumed_ns, now
        cuts, self._cuts = self._cuts, 0
        if not cuts:
            return
        if self._parts:  # nothing was recorded after the last one
            self._end_parts()
        if self._num_parts:
            self._after_step_in_parts(took_ns)
            self._limit_part()
        elif cuts == 1 and self._last is self._step:
            self._after_step(took_ns)
        else:
            self._step, self._times = self._last if cuts == 1 else None, 0
            self._samples = []

    def _after_step(self, took_ns: int) -> None:
        self._times += 1
        step = self._step
        if step is None or self._times < _REPEATED or not self._may_gain(step):
            return
        if step.streams is not None:
            step.streams_for -= 1
            if step.streams and step.streams_for > 0:
                self._begin_parts()
            elif step.streams_for <= 0:
                step.streams = None
            return
        self._samples.append(took_ns)
        if len(self._samples) == _MEASURED:
            self._whole_ns = statistics.median(self._samples)
            self._begin_parts()

    def _may_gain(self, step: CompiledGraph) -> bool:
        is_long = min(self._recorded_ns, step.placement.cost_ns) >= _LEAST_NS
        return is_long and step.program.tier is Tier.REPLAY and self._may_stream(step)

    def _begin_parts(self) -> None:
        self._num_parts = max(2, min(_MOST_PARTS, self._recorded_ns // _PART_NS))
        self._samples, self._wait = [], _UNSETTLED
        self._end, self._misses = None, 0
        self._limit_part()

    def _after_step_in_parts(self, took_ns: int) -> None:
        step, end = self._step, self._last
        assert step is not None
        in_own_state(step.program.note_other_run)(self._scalars)
        if step.program.tier is not Tier.REPLAY or not self._may_stream(step):
            return self._begin_whole()
        if self._handed + 1 != self._num_parts or end is not self._end:
            self._end = end
            self._misses += 1
            if self._misses > _MISSES:  # the script does something else now
                self._begin_whole()
            return None
        self._misses = 0
        if step.streams:
            step.streams_for -= 1
            if step.streams_for <= 0:
                step.streams = None
                self._begin_whole()
        elif self._wait:
            self._wait -= 1
        else:
            self._samples.append(took_ns)
            if len(self._samples) == _MEASURED:
                step.streams = statistics.median(self._samples) < _GAIN * self._whole_ns
                step.streams_for = _LASTS
                if not step.streams:
                    self._begin_whole()
        return None

    def _begin_whole(self) -> None:
        self._num_parts, self._times, self._samples = 0, 0, []
        self._trace.limit = self._trace.first_limit

    def _may_stream(self, step: CompiledGraph) -> bool:
        """Whether programs of parts may be in the place of that of a step. Collectives keep to one program."""
        is_wanted = self._is_possible and settings.streaming == "auto"
        return is_wanted and not step.lines and _num_cores() > 1


def _num_cores() -> int:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
