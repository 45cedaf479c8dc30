"""Where and how a program runs: in the worker or in the thread that cuts; compiled, or its ops replayed.

Program and recording share the cores. A program with a thread on each core can lose more time to recording than the
overlap gains: each parallel loop waits for the core that records (ResNet-18 on two cores: 55 ms a
step in the worker, 47 in the thread that cuts, 41 alone). Where recording takes as long as the program, it may be
best to leave one core to it (MLP: 4.9 ms in the thread that cuts, 3.9 with one thread in the
worker). Where other processes use the cores, threads that wait must give them up (see `openmp`). On other machines it
is the other way round, so `PlacementPolicy` measures, and measures again when steps become slow. Compiled code is not
always quicker than the kernels of PyTorch, so both are measured in steps of the script, too.
One for each program, made by `program_cache`, asked by `device_context`.
"""

from __future__ import annotations

import enum
import resource
import statistics

from ltc_core.executors.openmp import can_spin_briefly
from ltc_core.program.program import StepTimes, Tier

__all__ = ["PlacementPolicy", "Placement"]

_UNSETTLED = 2  # launches after a change that are not measured, since the queue empties or fills
_MEASURED = 7
_LASTS = 2000  # launches until it is measured again
_SLOWER = 2.0  # factor by which steps must have become slower to measure again before
_SLOW_FOR = 3  # times seven steps
_HOPELESS = (
    3.0  # factor by which steps must be slower than with another placement to end measuring early
)
_BUSY = 1  # times that a step must have lost a core to another thread, where cores are busy
_GAIN = 0.97  # factor by which another placement must be faster than the worker, where a step costs the caller nothing

# A program that holds the GIL runs where it is cut if its ops are so short that the GIL bounds it: in the worker
# each of them would wait for the recording thread.
_SMALL_OP_NS = 20_000
_SMALL_RUN_NS = 5_000_000
_HANDOVER_NS = 100_000
_AWAITED_NS = 1_000_000  # runs that the caller waits for, and that are not worth a measurement

_NEAR = 2.5  # factor by which replay may have been slower, beside a compiler, to be tried again beside compiled code


class Placement(enum.Enum):
    """Placements of a program.

    Attributes:
        WORKER: in the worker.
        YIELDING: there, with OpenMP threads that give up their core where they wait for each other.
        SPARING: there, with one thread less.
        HERE: in the thread that cuts.
    """

    WORKER = enum.auto()
    YIELDING = enum.auto()
    SPARING = enum.auto()
    HERE = enum.auto()


class PlacementPolicy:
    """Measures the placements of one program and chooses the fastest.

    Args:
        size: its ops.

    Attributes:
        wanted: the tier that is to run next; None while it does not matter.
        times: durations of a step in both tiers, when they have just been compared; whoever takes them resets it.
    """

    __slots__ = (
        "_best_ns", "_cost_ns", "_count", "_is_busy", "_last_ns", "_lost_cores", "_medians", "_place", "_runs",
        "_samples", "_settled", "_size", "_slow", "_steps", "_tier", "_trials", "times", "wanted",
    )  # fmt: skip

    def __init__(self, size: int) -> None:
        self._size = max(size, 1)
        self._cost_ns = 0.0
        self._tier: Tier | None = None
        self.wanted: Tier | None = None
        self.times: StepTimes | None = None
        self._steps: dict[Tier, float] = {}  # a step's duration, with the best placement
        self._trials = 0  # of replay beside compiled code
        self._begin()

    def _begin(self) -> None:
        self._place = Placement.WORKER
        self._settled = False
        self._best_ns = 0.0  # a step's duration with the placement that was chosen
        self._slow = 0  # how often in a row it was much slower since
        self._count = 0
        self._last_ns = 0
        self._samples: list[int] = []  # from launch to launch
        self._runs: list[int] = []
        self._lost_cores = 0  # by this process, at the first sample
        self._is_busy = False
        self._medians: dict[Placement, float] = {}

    def note_run(self, cost_ns: int, elapsed_ns: int) -> None:
        """Note the CPU time and the duration of a run."""
        known = self._cost_ns
        self._cost_ns = 0.75 * known + 0.25 * cost_ns if known else cost_ns
        if not self._settled:
            self._runs.append(elapsed_ns)

    @property
    def cost_ns(self) -> float:
        """CPU time of a run; 0 before the first one."""
        return self._cost_ns

    @property
    def is_small(self) -> bool:
        """Whether a program that holds the GIL is faster where it is cut."""
        cost = self._cost_ns
        return 0 < cost < _SMALL_RUN_NS and cost < _SMALL_OP_NS * self._size

    @property
    def is_here(self) -> bool:
        """Whether the last launch that `choose` placed was to run in the thread that cuts."""
        return self._place is Placement.HERE

    def is_quicker_here(self, is_awaited: bool) -> bool:
        """Whether a run takes no longer than to hand it over; the caller can do nothing else if it waits for it."""
        return 0 < self._cost_ns < (_AWAITED_NS if is_awaited else _HANDOVER_NS)

    def choose(
        self, now_ns: int, num_threads: int, tier: Tier, may_spare: bool, may_compete: bool = False
    ) -> Placement:
        """Placement for the next launch of a program that does not hold the GIL.

        Args:
            now_ns: the time.
            num_threads: available ones.
            tier: of the program; what was measured in one tier does not count in another.
            may_spare: whether the program may round as with fewer threads.
            may_compete: whether replay may be measured beside compiled code.
        """
        self._note_tier(tier)
        if not self._count and not self._medians:
            self._place = self._next(num_threads, may_spare)
        count, last = self._count, self._last_ns
        self._count, self._last_ns = count + 1, now_ns
        if count == _UNSETTLED and not self._settled:
            self._lost_cores = _lost_cores()
        if count > _UNSETTLED:
            self._samples.append(now_ns - last)
        if self._settled:
            if count == _LASTS or self._has_slowed():
                self._begin()
            return self._place
        if len(self._samples) == _MEASURED or self._is_hopeless():
            if self._place is Placement.HERE:
                lost = _lost_cores() - self._lost_cores
                self._is_busy = lost > _BUSY * len(self._samples)
            self._medians[self._place] = self._step_ns()
            self._forget()
            self._place = self._next(num_threads, may_spare)
            if self._settled:
                self._compare(tier, may_compete)
        return self._place

    def note_begun(self, now_ns: int, tier: Tier, may_compete: bool) -> None:
        """A launch of a run that has begun while its step was recorded: it goes on in the worker (`early_run`)."""
        self._note_tier(tier)
        last, self._last_ns = self._last_ns, now_ns
        if self._settled:
            return
        self._place = Placement.WORKER
        if last:
            self._samples.append(now_ns - last)
        if len(self._samples) == _MEASURED:
            self._best_ns = statistics.median(self._samples)
            self._medians = {Placement.HERE: self._best_ns, Placement.WORKER: self._best_ns}
            self._forget()
            self._settled = True
            self._compare(tier, may_compete)

    def _note_tier(self, tier: Tier) -> None:
        if tier is not self._tier:
            self._tier = tier
            self.wanted = None
            self._begin()

    def _compare(self, tier: Tier, may_compete: bool) -> None:
        """Want the other tier if its steps are quicker, or may be.

        Replay was measured beside the compiler, if at all. So it is tried once more when compiled code has settled.
        """
        mine = self._steps[tier] = self._best_ns
        if tier is Tier.COMPILED and may_compete and not self._trials:
            self._trials = 1
            if self._steps.get(Tier.REPLAY, 0.0) < _NEAR * mine:
                self.wanted = Tier.REPLAY
            else:
                self.times = StepTimes(self._steps[Tier.REPLAY], mine)
        elif tier is Tier.REPLAY and self._trials == 1 and Tier.COMPILED in self._steps:
            self._trials = 2
            self.times = StepTimes(mine, self._steps[Tier.COMPILED])
            if mine > _GAIN * self._steps[Tier.COMPILED]:
                self.wanted = Tier.COMPILED

    def _forget(self) -> None:
        self._samples.clear()
        self._runs.clear()
        self._count = 0

    def _has_slowed(self) -> bool:
        """Whether the last steps were much slower than when the placement was chosen: others use the cores now."""
        if len(self._samples) < _MEASURED:
            return False
        is_slow = statistics.median(self._samples) > _SLOWER * self._best_ns
        self._slow = self._slow + 1 if is_slow else 0
        self._samples.clear()
        return self._slow == _SLOW_FOR

    def _is_hopeless(self) -> bool:
        """Whether three steps were so slow that the rest need not be waited for."""
        limit = _HOPELESS * min(
            [*self._medians.values(), *self._steps.values()], default=float("inf")
        )
        return sum(sample > limit for sample in self._samples) == 3

    def _step_ns(self) -> float:
        """Duration of a step with this placement.

        In the worker it is at least that of a run: launches are faster only while the queue fills.
        """
        launches = statistics.median(self._samples)
        if self._place is Placement.HERE or not self._runs:
            return launches
        return max(launches, statistics.median(self._runs))

    def _next(self, num_threads: int, may_spare: bool) -> Placement:
        """The next placement to measure, or the best one after all are measured.

        The first one is as quick as eager, and shows whether others use the cores.
        """
        found = self._medians
        if Placement.HERE not in found:
            return Placement.HERE
        if (
            self._is_busy
            and num_threads > 1
            and can_spin_briefly()
            and Placement.YIELDING not in found
        ):
            return Placement.YIELDING
        if Placement.WORKER not in found:
            return Placement.WORKER
        if Placement.SPARING not in found and may_spare and self._can_spare(num_threads):
            return Placement.SPARING
        self._settled = True
        best = Placement.WORKER
        if found.get(Placement.YIELDING, float("inf")) < found[best]:
            best = Placement.YIELDING
        for place in (Placement.SPARING, Placement.HERE):
            if place in found and found[place] < _GAIN * found[best]:
                best = place
        self._best_ns = found[best]
        return best

    def _can_spare(self, num_threads: int) -> bool:
        """Whether recording takes longer than the program would with a thread less."""
        recording_ns = self._medians[Placement.HERE] - self._cost_ns
        return num_threads > 1 and recording_ns > self._cost_ns / num_threads


def _lost_cores() -> int:
    """How often a thread of this process had to leave a core that it still needed."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_nivcsw
