"""Where a program runs: in the worker, while the next step is recorded, or in the thread that cuts.

Program and recording share the cores. A program with a thread on each core can lose more time to recording than the
overlap gains: each parallel loop waits for the core that records (ResNet-18 of design section 6 on two cores: 55 ms a
step in the worker, 47 in the thread that cuts, 41 alone). Where recording takes as long as the program, it may be
best to leave one core to it (MLP of design section 6: 4.9 ms in the thread that cuts, 3.9 with one thread in the
worker). On other machines it is the other way round, so `PlacementPolicy` measures.
One for each program, made by `program_cache`, asked by `device_context`.
"""

from __future__ import annotations

import enum
import statistics

__all__ = ["PlacementPolicy", "Placement"]

_UNSETTLED = 2  # launches after a change that are not measured, since the queue empties or fills
_MEASURED = 7
_LASTS = 2000  # launches until it is measured again
_GAIN = 0.97  # factor by which another placement must be faster than the worker, where a step costs the caller nothing

# A program that holds the GIL runs where it is cut if its ops are so short that the GIL bounds it: in the worker
# each of them would wait for the recording thread.
_SMALL_OP_NS = 20_000
_SMALL_RUN_NS = 5_000_000


class Placement(enum.Enum):
    """Placements of a program: in the worker, in the worker with one thread less, or in the thread that cuts."""

    WORKER = enum.auto()
    SPARING = enum.auto()
    HERE = enum.auto()


class PlacementPolicy:
    """Measures the placements of one program and chooses the fastest.

    Args:
        size: its ops.
    """

    __slots__ = (
        "_cost_ns", "_count", "_last_ns", "_medians", "_place", "_runs", "_samples", "_settled", "_size",
    )  # fmt: skip

    def __init__(self, size: int) -> None:
        self._size = max(size, 1)
        self._cost_ns = 0.0
        self._begin()

    def _begin(self) -> None:
        self._place = Placement.WORKER
        self._settled = False
        self._count = 0
        self._last_ns = 0
        self._samples: list[int] = []  # from launch to launch
        self._runs: list[int] = []
        self._medians: dict[Placement, float] = {}

    def note_run(self, cost_ns: int, elapsed_ns: int) -> None:
        """Note the CPU time and the duration of a run."""
        known = self._cost_ns
        self._cost_ns = 0.75 * known + 0.25 * cost_ns if known else cost_ns
        if not self._settled:
            self._runs.append(elapsed_ns)

    @property
    def is_small(self) -> bool:
        """Whether a program that holds the GIL is faster where it is cut."""
        cost = self._cost_ns
        return 0 < cost < _SMALL_RUN_NS and cost < _SMALL_OP_NS * self._size

    def choose(self, now_ns: int, num_threads: int) -> Placement:
        """Placement for the next launch of a program that does not hold the GIL; `num_threads` are available."""
        count, last = self._count, self._last_ns
        self._count, self._last_ns = count + 1, now_ns
        if self._settled:
            if count == _LASTS:
                self._begin()
            return self._place
        if count > _UNSETTLED:
            self._samples.append(now_ns - last)
        if len(self._samples) == _MEASURED:
            self._medians[self._place] = self._step_ns()
            self._samples.clear()
            self._runs.clear()
            self._count = 0
            self._place = self._next(num_threads)
        return self._place

    def _step_ns(self) -> float:
        """Duration of a step with this placement.

        In the worker it is at least that of a run: launches are faster only while the queue fills.
        """
        launches = statistics.median(self._samples)
        if self._place is Placement.HERE or not self._runs:
            return launches
        return max(launches, statistics.median(self._runs))

    def _next(self, num_threads: int) -> Placement:
        """The next placement to measure, or the best one after all are measured."""
        if Placement.HERE not in self._medians:
            return Placement.HERE
        if Placement.SPARING not in self._medians and self._may_spare(num_threads):
            return Placement.SPARING
        self._settled = True
        best = Placement.WORKER
        for place in (Placement.SPARING, Placement.HERE):
            if place in self._medians and self._medians[place] < _GAIN * self._medians[best]:
                best = place
        return best

    def _may_spare(self, num_threads: int) -> bool:
        """Whether recording takes longer than the program would with a thread less."""
        recording_ns = self._medians[Placement.HERE] - self._cost_ns
        return num_threads > 1 and recording_ns > self._cost_ns / num_threads
