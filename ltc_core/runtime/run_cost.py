"""What a run of one program costs, whether handing it to the worker would cost more, and whether its ops are large.

Made by `run_policy`; `launch` notes each run.
"""

from __future__ import annotations

from ltc_core.executors.core_sharing import LARGE_OP_NS

__all__ = ["RunCost"]

# A program that holds the GIL runs where it is cut if its ops are so short that the GIL bounds it: in the worker
# each of them would wait for the recording thread.
_SMALL_OP_NS = 20_000
_SMALL_RUN_NS = 5_000_000
_HANDOVER_NS = 100_000
_AWAITED_NS = 1_000_000  # runs that the caller waits for, and that are not worth a measurement


class RunCost:
    """CPU time of a program's runs.

    Args:
        size: its ops.

    Attributes:
        cost_ns: of a run, in nanoseconds: the mean, in which the last ones count most; 0 before the first one.
    """

    __slots__ = ("_size", "cost_ns")

    def __init__(self, size: int) -> None:
        self._size = max(size, 1)
        self.cost_ns = 0.0

    def note(self, cost_ns: int) -> None:
        """Note the CPU time of a run."""
        known = self.cost_ns
        self.cost_ns = 0.75 * known + 0.25 * cost_ns if known else cost_ns

    @property
    def is_small(self) -> bool:
        """Whether a program that holds the GIL is faster where it is cut."""
        cost = self.cost_ns
        return 0 < cost < _SMALL_RUN_NS and cost < _SMALL_OP_NS * self._size

    @property
    def has_large_ops(self) -> bool:
        """Whether its ops are so large that a thread less is likely to cost more than recording does."""
        return self.cost_ns >= LARGE_OP_NS * self._size

    def is_quicker_here(self, is_awaited: bool) -> bool:
        """Whether a run takes no longer than to hand it over; the caller can do nothing else if it waits for it."""
        return 0 < self.cost_ns < (_AWAITED_NS if is_awaited else _HANDOVER_NS)
