"""The time of each op of a program that calls its ops one by one, for whoever asks.

`executors.reference` gives the times of a run while `on` is set; `report` sets it. Only ops on the CPU are timed: those
of a GPU are launched, not run.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

__all__ = ["on"]

# Called with the nodes of a program, and the nanoseconds that each has taken in the run that has ended.
on: Callable[[Sequence[Any], Sequence[int]], None] | None = None
