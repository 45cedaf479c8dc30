"""Where a program runs: in the worker or in the thread that cuts, with all threads or with one less.

Program and recording share the cores. A program with a thread on each core can lose more time to recording than the
overlap gains: each parallel loop waits for the core that records (ResNet-18 on two cores: 55 ms a
step in the worker, 47 in the thread that cuts, 41 alone). With one thread less it leaves that core to recording, and
little is lost where its ops are too small for many threads (on two cores, a ViT: 9.7 ms a step, 13.8 with both
threads, eager 11.4; diffusion 6.2 and 8.5, eager 7.7). Large ones need all threads: a replay in the worker leaves out
one until somebody waits for a program (`executors.core_sharing`; ResNet-18 in eager 62 ms a step, 50 so, 81 with one
thread). On other machines it is the other way round, so `Places` measures, and measures again when steps become slow.

It begins in the worker (`in_worker`). Where that is far quicker than recording and running one after the other would
be, the thread that cuts is not tried: nine such steps are what a user sees first. With a thread on each core it is not
known what running in turn would take: there it is tried always. Steps that are waited for overlap with nothing: they
begin in the thread that cuts, and are handed to the worker to see whether the script gains by what runs on after its
read. One for each program, tier and rhythm of steps, made by `run_policy`.
"""

from __future__ import annotations

import enum
import statistics
from collections import deque
from collections.abc import Collection

from ltc_core.executors.processor import num_cores
from ltc_core.runtime.lasting import Lasting

__all__ = ["Placement", "Places", "in_worker"]

_UNSETTLED = 2  # launches after a change that are not measured, since the queue empties or fills
_MEASURED = 7
_SLOWER = 2.0  # factor by which steps must have become slower to measure again before
_SLOW_FOR = 3  # times seven steps
_HOPELESS = 2.0  # factor by which three steps must be slower than other ones to end measuring early
_CLEAR = 1.25  # factor by which each of the first ones must be slower than in another place
_CLEAR_STEPS = 3
_NEVER = float("inf")
# Factor by which another placement must be faster than the first one in the worker, where a step costs the caller
# nothing.
_GAIN = 0.97
_OVERLAPS = (
    0.85  # steps in the worker, as a part of recording and running in turn, that need no comparison
)


class Placement(enum.Enum):
    """Placements of a program.

    Attributes:
        WORKER: in the worker.
        SPARING: there, with one thread less.
        HERE: in the thread that cuts.
    """

    WORKER = enum.auto()
    SPARING = enum.auto()
    HERE = enum.auto()


class Places:
    """Measures the placements of one program, in one tier and one rhythm of steps, and chooses the fastest.

    Args:
        may_overlap: whether the next step can be recorded while the program runs.

    Attributes:
        chosen: where the last launch was to run.
        best_ns: duration of a step with the placement that was chosen; 0 while they are measured.
        sample_ns: from the last launch to the next one of any program; 0 if it does not count.
    """

    __slots__ = (
        "_before", "_count", "_durations", "_is_given", "_last_cost_ns", "_last_cpu_ns",
        "_last_ns", "_lasting", "_may_overlap", "_place", "_recorded", "_runs",
        "_samples", "_serial_ns", "_slow", "_was_given", "_ways", "best_ns", "chosen", "sample_ns",
    )  # fmt: skip

    def __init__(self, may_overlap: bool) -> None:
        self._may_overlap = may_overlap
        self._last_ns = self._last_cpu_ns = 0
        self._last_cost_ns = 0.0
        self._is_given = False  # the place of the last launch
        self._lasting = Lasting()
        self._place = Placement.WORKER  # what is measured, or was the best
        self.best_ns = 0.0
        self.begin()

    def begin(self) -> None:
        """Measure anew. What was the best comes first: what is clearly slower is then left after a few steps."""
        self._before = self._place if self.is_settled else None
        self.chosen = self._place
        self.best_ns = 0.0
        self.sample_ns = 0
        self._slow = 0  # how often in a row a step was much slower than the best
        self._count = 0  # launches with this placement
        self._samples: list[int] = []  # from a launch to the next one
        self._recorded: list[int] = []  # CPU time of the thread that launches, in the meantime
        self._serial_ns = float("inf")  # a step that is recorded and run in turn, by CPU time
        # In the worker. Some runs are not placed, because they cost too little.
        self._runs: deque[int] = deque(maxlen=_UNSETTLED + _MEASURED)
        self._ways: tuple[Placement, ...] = (Placement.WORKER,)  # in the worker
        self._was_given = False  # the only placement that was measured
        self._durations: dict[Placement, float] = {}

    @property
    def is_settled(self) -> bool:
        """Whether a placement has been chosen."""
        return self.best_ns > 0

    @property
    def best(self) -> Placement:
        """The placement that was chosen, if one has been."""
        return self._place

    def pause(self) -> None:
        """The program is launched otherwise for a while: the next launches do not count."""
        self._last_ns = self.sample_ns = 0
        if not self.is_settled:
            self._forget()

    def skip(self) -> None:
        """What runs meanwhile is not noted: the last launch does not count."""
        self._last_ns = self.sample_ns = 0

    def keep(self, given: Placement | None, ways: tuple[Placement, ...]) -> Placement:
        """Placement for a launch that tells nothing about the next ones: it is not measured."""
        self.pause()
        self.chosen = given or (self._place if self.is_settled else ways[0])
        return self.chosen

    def note_run(self, elapsed_ns: int) -> None:
        """Note the duration of a run in the worker."""
        if not self.is_settled:
            self._runs.append(elapsed_ns)

    def choose(
        self,
        now_ns: int,
        cpu_ns: int,
        num_threads: int,
        cost_ns: float,
        ways: tuple[Placement, ...],
        limit_ns: float,
        given: Placement | None = None,
        may_begin: bool = True,
    ) -> Placement:
        """Placement for the next launch.

        Args:
            now_ns: the time.
            cpu_ns: CPU time of the thread that launches, up to now.
            num_threads: available ones.
            cost_ns: CPU time of a run.
            ways: those in the worker, see `in_worker`.
            limit_ns: the duration of a step in another tier: what is much slower is not measured to the end.
            given: where the launch runs anyway; it is measured all the same.
            may_begin: whether it may be measured again, if nothing has become slow.
        """
        if given is None and self._was_given:
            self.begin()
        if given is None and not self._count and not self._durations and not self.is_settled:
            self._ways = tuple(sorted(ways, key=lambda place: place is not self._before))
            self._place = self._next(num_threads)
        self.chosen = given or self._place
        self._is_given = given is not None
        count, self._count = self._count, self._count + 1
        self._last_ns, self._last_cpu_ns, self._last_cost_ns = now_ns, cpu_ns, cost_ns
        if self.is_settled:
            if (count >= self._lasting.steps and may_begin) or self._has_slowed():
                self.begin()
        elif len(self._samples) == _MEASURED or self._is_hopeless(limit_ns):
            if given is None:
                self._end_placement(num_threads)
                self.chosen = self._place
            else:
                self._end(given, self._step_ns())
                self._forget()
                self._was_given = True
        return self.chosen

    def note_next(self, now_ns: int, cpu_ns: int) -> None:
        """The next program is launched, this one or another: the last launch of this one has taken until now.

        Args:
            now_ns: the time.
            cpu_ns: CPU time of the thread that launches, up to now.
        """
        last, self._last_ns = self._last_ns, 0
        is_first = self._count <= _UNSETTLED and not self._is_given and not self.is_settled
        self.sample_ns = 0 if is_first or not last else now_ns - last
        if not self.sample_ns:
            return
        self._samples.append(self.sample_ns)
        if not self.is_settled and self._place is self._ways[0]:
            self._recorded.append(cpu_ns - self._last_cpu_ns)
            self._serial_ns = statistics.median(self._recorded) + self._last_cost_ns

    def _end_placement(self, num_threads: int) -> None:
        self._durations[self._place] = self._step_ns()
        self._forget()
        self._place = self._next(num_threads)

    def _forget(self) -> None:
        self._samples.clear()
        self._recorded.clear()
        self._runs.clear()
        self._count = 0

    def _has_slowed(self) -> bool:
        """Whether the last steps were much slower than when the placement was chosen: others use the cores now."""
        if len(self._samples) < _MEASURED:
            return False
        is_slow = statistics.median(self._samples) > _SLOWER * self.best_ns
        self._slow = self._slow + 1 if is_slow else 0
        self._samples.clear()
        return self._slow == _SLOW_FOR

    def _is_hopeless(self, limit_ns: float) -> bool:
        """Whether three steps were so slow that the rest need not be waited for."""
        best_ns = min(self._durations.values(), default=_NEVER)
        limit = _HOPELESS * min(limit_ns, self._serial_ns, best_ns)
        if sum(sample > limit for sample in self._samples) == 3:
            return True
        return len(self._samples) == _CLEAR_STEPS and min(self._samples) > _CLEAR * best_ns

    def _step_ns(self) -> float:
        """Duration of a step with this placement.

        In the worker it is at least that of a run: launches are faster only while the queue fills.
        """
        launches = _typical(self._samples)
        if self.chosen is Placement.HERE or not self._runs:
            return launches
        return max(launches, _typical(self._runs))

    def _next(self, num_threads: int) -> Placement:
        """The next placement to measure, or the best one after all are measured."""
        found, first = self._durations, self._ways[0]
        if not self._may_overlap and Placement.HERE not in found:
            return Placement.HERE
        if first not in found:
            return first
        if Placement.HERE not in found and not self._overlaps(num_threads):
            return Placement.HERE
        for place in self._ways[1:]:
            if place not in found and not self._is_far_ahead():
                return place
        best = first
        for place in (*self._ways[1:], Placement.HERE):
            if found.get(place, _NEVER) < _GAIN * found[best]:
                best = place
        self._end(best, found[best])
        return best

    def _end(self, best: Placement, best_ns: float) -> None:
        """It has been measured which one is the fastest."""
        self._place, self.best_ns = best, best_ns
        self._lasting.note(best)

    def _is_far_ahead(self) -> bool:
        """Whether steps were far quicker in the worker than in the thread that cuts."""
        found = self._durations
        return found[self._ways[0]] < _OVERLAPS * found.get(Placement.HERE, 0)

    def _overlaps(self, num_threads: int) -> bool:
        """Whether steps in the worker were far quicker than recording and running in turn would be.

        Where each core has a thread, it is not known what running in turn would take.
        """
        if not self._may_overlap or num_threads >= num_cores() > 1:
            return False
        return self._durations[self._ways[0]] < _OVERLAPS * self._serial_ns


def in_worker(may_spare: bool, has_large_ops: bool) -> tuple[Placement, ...]:
    """Placements in the worker that are worth measuring, the most promising one first.

    Args:
        may_spare: whether the program has a thread on each core, and may round as with one less.
        has_large_ops: whether its ops are so large that they are likely to need all threads.
    """
    if not may_spare:
        return (Placement.WORKER,)
    ways = Placement.WORKER, Placement.SPARING
    return ways if has_large_ops else ways[::-1]


def _typical(durations: Collection[int]) -> float:
    """The mean without the longest: one burst of other work does not count, steps that are long again and again do."""
    longest = max(durations) if len(durations) > 1 else 0
    return (sum(durations) - longest) / max(len(durations) - 1, 1)
