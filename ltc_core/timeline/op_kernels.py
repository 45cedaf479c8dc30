"""The kernels of a program that has been compiled, for whoever asks.

`executors.inductor` gives them when a program was built or found in the cache, while `on` is set; `report` sets it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

__all__ = ["on"]

# Called with the graph of a program, its kernel calls in the order in which they run (name, and the nodes that the call
# computes), and the nodes that are called one by one between them.
on: Callable[[Any, Sequence[tuple[str, Sequence[Any]]], Sequence[Any]], None] | None = None
