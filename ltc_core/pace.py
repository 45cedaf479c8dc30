"""Where a program runs: in the worker, beside the recording of the next step, or in the thread that cuts.

Beside each other they share the cores. A program whose threads take all of them loses more to a recording thread than
that gains: each parallel loop waits for the core that records (ResNet-18 of design section 6 on two cores: 55 ms a
step in the worker, 47 in the thread that cuts, 41 alone). On other machines it is the other way round, so `Pace`
measures both. Made and asked by `compiler` and `context`, for each program.
"""

from __future__ import annotations

import statistics

__all__ = ["Pace"]

_UNSETTLED = 2  # launches after a change that are not measured: the queue empties or fills
_MEASURED = 7
_LASTS = 2000  # launches until it is measured again
_GAIN = 0.97  # what the thread that cuts must reach to be preferred: in the worker, a step costs the caller nothing

# A program that holds Python's lock runs where it is cut if its ops are so short that the lock bounds it: in the worker
# each of them would wait for the thread that records.
_SMALL_OP_NS = 20_000
_SMALL_RUN_NS = 5_000_000


class Pace:
    """The place of one program.

    Args:
        size: its ops.
    """

    __slots__ = ("_cost_ns", "_count", "_here", "_last_ns", "_medians", "_samples", "_size")

    def __init__(self, size: int) -> None:
        self._size = max(size, 1)
        self._cost_ns = 0.0
        self._begin()

    def _begin(self) -> None:
        self._here = False
        self._count = 0
        self._last_ns = 0
        self._samples: list[int] = []
        self._medians: list[float] = []

    def note_run(self, elapsed_ns: int) -> None:
        """Learn from the processor time of a run."""
        known = self._cost_ns
        self._cost_ns = 0.75 * known + 0.25 * elapsed_ns if known else elapsed_ns

    @property
    def is_small(self) -> bool:
        """Whether a program that holds Python's lock runs better where it is cut."""
        cost = self._cost_ns
        return 0 < cost < _SMALL_RUN_NS and cost < _SMALL_OP_NS * self._size

    def runs_here(self, now_ns: int) -> bool:
        """Tell, at a launch of a program that does not hold the lock, whether to run it in this thread."""
        count, last = self._count, self._last_ns
        self._count, self._last_ns = count + 1, now_ns
        if len(self._medians) == 2:
            if count == _LASTS:
                self._begin()
            return self._here
        if count > _UNSETTLED:
            self._samples.append(now_ns - last)
        if len(self._samples) == _MEASURED:
            self._medians.append(statistics.median(self._samples))
            self._samples.clear()
            self._count = 0
            if len(self._medians) == 1:
                self._here = True
            else:
                there, here = self._medians
                self._here = here < _GAIN * there
        return self._here
