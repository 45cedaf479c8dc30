"""`torch_xla.experimental.scan`: the loop, and what its tests and tools take from the module."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.utils import _pytree as pytree

from ltc_core.api.loops import scan
from ltc_core.graph.loop import LOOPS as _SCAN_COMPUTATION_CACHE
from ltc_dist.compat.absent import Absent

__all__ = [
    "_SCAN_COMPUTATION_CACHE",
    "scan",
    "tree_flatten_none",
    "value_and_grad_partitioned",
]

value_and_grad_partitioned = Absent(
    "value_and_grad_partitioned",
    "scan traces a function by itself; scan(..., partition_fn=, is_fn_pure=True) takes a partition function",
)


def tree_flatten_none(
    tree: Any,
) -> tuple[list[torch.Tensor], Callable[[Sequence[torch.Tensor]], Any]]:
    """Return the leaves of a structure that are not None, and a function that makes the structure of such leaves."""
    leaves, spec = pytree.tree_flatten(tree)

    def unflatten(found: Sequence[torch.Tensor]) -> Any:
        rest = iter(found)
        return pytree.tree_unflatten([None if t is None else next(rest) for t in leaves], spec)

    return [t for t in leaves if t is not None], unflatten
