"""Streaming: a step of compiled code that the script waits for is handed over in parts, so that it runs early.

Where each step is waited for, as by `loss.item()`, recording and running take turns. A part is cut like a step: what is
alive becomes inputs of the next part; it is compiled like one. Parts cost more cuts, and each plans its memory by
itself; which way is quicker is measured in steps of the script. Only a step that repeats is cut into parts. A step
whose ops C++ calls one by one needs no parts (`early_run`).

Told of cuts and reads by `device_context`, which asks it whether a part is due.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

from ltc_core.executors.processor import num_cores
from ltc_core.program.program import Tier
from ltc_core.record.trace import Trace
from ltc_core.runtime.program_cache import CompiledGraph
from ltc_core.runtime.reads import MOST_CUTS, Seen
from ltc_core.runtime.switch_interval import shorten
from ltc_core.settings import settings

__all__ = ["Streaming"]

_REPEATED = 3  # times in a row that a step must have come
_MEASURED = 9  # steps in each way
# Steps after a change that are not measured: parts are recorded anew, and find where they run best.
_UNSETTLED = 20
_LASTS = 2000  # steps that are whole until parts are tried again
_CHANGES = 200  # the same, where the script did something else meanwhile
_TRIAL_NS = 1_000_000  # a value, for which a step must have repeated: five times what its parts cost at first
_MISSES = 5  # steps in a row that ended otherwise than the one before: then steps are whole again
_GAIN = 0.93  # factor by which another way must be quicker
_LEAST_NS = 1_500_000  # of recording, and of running
_PART_NS = 2_000_000  # of recording
_MOST_PARTS = MOST_CUTS - 1
_TIERS = frozenset({Tier.COMPILED})  # what C++ replays runs early (`early_run`)


class Streaming:
    """The steps of one device, between two reads of the script.

    Args:
        trace: that of the device.
        is_possible: whether its programs are run op by op.
        is_disturbed: whether something uses the cores for a while, so that nothing is measured.
    """

    def __init__(
        self, trace: Trace, is_possible: bool, is_disturbed: Callable[[], bool] = lambda: False
    ) -> None:
        self._trace = trace
        self._is_disturbed = is_disturbed
        self._is_possible = is_possible
        self._step: CompiledGraph | None = None  # the program of the step that repeats
        self._times = 0  # that it has come in a row
        self._since_ns = 0
        self._recorded_ns = self._num_values = 0  # of a step that is whole
        self._samples: list[int] = []
        self._whole_ns = 0.0  # a step that is handed over whole
        self._replay_ns = 0.0  # a step in parts whose ops are called one by one
        self._num_parts = 0  # 0: steps are whole
        self._parts = 0  # that the step which is recorded has handed over
        self._before: list[CompiledGraph] = []  # the programs of the step before
        self._num_compiled = 0  # of its programs, when steps were measured
        self._misses = 0
        self._wait = 0  # steps until one is measured
        self._is_hurried = False  # Python switches threads sooner for it

    # -- cuts ----------------------------------------------------------------------------------

    @property
    def is_part_due(self) -> bool:
        """Whether the next op begins another part."""
        return self._has_more and self._trace.count >= self._size

    @property
    def is_whole(self) -> bool:
        """Whether steps are handed over whole."""
        return not self._num_parts

    @property
    def is_in_parts(self) -> bool:
        """Whether what is recorded is a part of a step."""
        return self._parts > 0

    @property
    def _has_more(self) -> bool:
        """Whether another part follows the one that is recorded."""
        return self._parts + 1 < self._num_parts

    @property
    def _size(self) -> int:
        """Values of a part, where a step has parts."""
        return -(-self._num_values // self._num_parts)

    def after_cut(self, goes_on: bool) -> None:
        """A program was handed over. With `goes_on` the step goes on: it was a part, and not the last one."""
        if goes_on:
            self._parts += 1
            if not self._is_hurried:
                self._is_hurried = True
                shorten(1)
            self._limit_part()
            return
        self._end_parts()

    def _end_parts(self) -> None:
        self._parts = 0
        if self._is_hurried:
            self._is_hurried = False
            shorten(-1)

    def _limit_part(self) -> None:
        if self._has_more:
            self._trace.limit = min(self._trace.limit, self._size)

    # -- reads ---------------------------------------------------------------------------------

    def after_read(self, seen: Seen) -> None:
        """The script goes on with a value that it has read. Cost: 0.5 us where there is nothing to gain."""
        if seen.is_new:
            self._step = None
        if self._parts:  # nothing was recorded after the last one
            self._end_parts()
        if self._num_parts:
            self._after_step_in_parts(seen.took_ns, seen.cuts)
            self._limit_part()
            return
        self._recorded_ns, self._num_values = seen.recorded_ns, seen.num_values
        if seen.cuts == [self._step]:
            self._after_step(seen.took_ns)
        else:
            self._step, self._times = seen.cuts[0] if len(seen.cuts) == 1 else None, 0
            self._samples, self._since_ns = [], time.perf_counter_ns()

    def forget_step(self) -> None:
        """The script has done something else meanwhile."""
        self._step, self._times = None, 0

    def _after_step(self, took_ns: int) -> None:
        self._times += 1
        step = self._step
        if step is None or self._times < _REPEATED or not self._may_gain(step):
            return None
        if step.num_parts:
            return self._begin_parts(step.num_parts)
        if step.whole_for:
            step.whole_for -= 1
            return None
        if time.perf_counter_ns() - self._since_ns < _TRIAL_NS * self._num_values:
            return None
        if self._is_disturbed():
            self._samples.clear()
            return None
        self._samples.append(took_ns)
        if len(self._samples) == _MEASURED:
            self._whole_ns = statistics.median(self._samples)
            self._begin_parts(max(2, min(_MOST_PARTS, self._recorded_ns // _PART_NS)))
        return None

    def _may_gain(self, step: CompiledGraph) -> bool:
        is_long = min(self._recorded_ns, step.policy.cost.cost_ns) >= _LEAST_NS
        is_compiled = step.program.tier in _TIERS and step.policy.is_decided(is_waited=True)
        return is_long and is_compiled and self._may_stream(step)

    def _begin_parts(self, count: int) -> None:
        self._num_parts = count
        self._samples, self._wait = [], _UNSETTLED
        self._before, self._misses = [], 0
        self._replay_ns, self._num_compiled = 0.0, 0
        self._limit_part()

    def _after_step_in_parts(self, took_ns: int, programs: list[CompiledGraph]) -> None:
        step = self._step
        assert step is not None
        before, self._before = self._before, programs
        if not self._may_stream(step):
            return self._begin_whole()
        if programs != before or len(programs) != self._num_parts:
            self._misses += 1
            if self._misses > _MISSES:  # the script does something else now
                step.whole_for = 0 if step.num_parts else _CHANGES
                self._begin_whole()
            return None
        self._misses = 0
        num_compiled = sum(each.program.tier is Tier.COMPILED for each in programs)
        if num_compiled != self._num_compiled:
            self._num_compiled, self._samples, self._wait = num_compiled, [], _UNSETTLED
        if self._wait:
            self._wait -= 1
        elif len(self._samples) < _MEASURED:
            self._samples.append(took_ns)
            if len(self._samples) == _MEASURED:
                self._judge(step, programs, statistics.median(self._samples))
        return None

    def _judge(self, step: CompiledGraph, programs: list[CompiledGraph], took_ns: float) -> None:
        """Go on in the way that is quickest: in parts or whole, and parts as compiled code or replayed."""
        if not step.num_parts:
            if took_ns >= _GAIN * self._whole_ns:
                step.whole_for = _LASTS
                return self._begin_whole()
            step.num_parts = self._num_parts
        if not self._num_compiled:
            self._replay_ns = took_ns
        elif self._replay_ns and took_ns > self._replay_ns / _GAIN:
            for each in programs:
                each.program.prefer(Tier.REPLAY)
        return None

    def _begin_whole(self) -> None:
        self._num_parts, self._times, self._samples = 0, 0, []
        self._trace.limit = self._trace.first_limit

    def _may_stream(self, step: CompiledGraph) -> bool:
        """Whether programs of parts may be in the place of that of a step. Collectives keep to one program."""
        is_wanted = self._is_possible and settings.streaming == "auto"
        # Who waits for the compiler does not want more graphs.
        is_wanted = is_wanted and settings.compile != "sync"
        return is_wanted and not step.lines and num_cores() > 1
