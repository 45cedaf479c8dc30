"""`torch_xla.experimental.scan`: the loop, and what its tests and tools take from the module."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.utils import _pytree as pytree

from ltc_core.api import loops
from ltc_core.graph.loop import LOOPS as _SCAN_COMPUTATION_CACHE

__all__ = [
    "_SCAN_COMPUTATION_CACHE",
    "scan",
    "tree_flatten_none",
    "value_and_grad_partitioned",
]


def scan(
    fn: Callable[[Any, Any], tuple[Any, Any]],
    init: Any,
    xs: Any,
    partition_fn: Callable[..., Any] | None = None,
    is_fn_pure: bool = False,
) -> tuple[Any, Any]:
    """Call `carry, y = fn(carry, x)` for each slice of `xs`; where the executor has loops, as a loop of the program.

    Args:
        fn, init, xs, partition_fn: as in `ltc_core.api.loops.scan`.
        is_fn_pure: `fn` is traced once for its sizes, not at each call.

    Returns:
        The last carry, and the structure of the `y`, stacked.

    Raises:
        ValueError: as there.
        OutsideWriteError: `fn` writes to a tensor that is not its argument, and would be a loop.

    Source: `torch_xla.experimental.scan`.
    """
    return loops.scan(fn, init, xs, partition_fn, is_fn_pure, is_traced=True)


def value_and_grad_partitioned(
    fn: Callable[[Any, Any], tuple[Any, Any]],
    init: Any,
    xs: Any,
    partition_fn: Callable[..., Any] | None = None,
) -> tuple[Callable[..., Any], Callable[..., Any], Callable[..., Any]]:
    """Trace `fn`, and return three functions of one iteration of a scan: `forward`, `alias_input` and `backward`.

    `forward(carry, x)` returns the next carry, then a pair of `y` and the activations that are no tensors of `x`.
    `alias_input(activations, x)` returns all activations. `backward(grad_carry, (grad_y, activations))` returns the
    gradients of the carry and of `x`; a tensor that needs none has None.

    Args:
        fn, init, xs: as in `scan`. The sizes count, not the values.
        partition_fn: as in `scan`.

    Raises:
        NoLoop: `fn` cannot be traced.

    Source: `torch_xla.experimental.scan.value_and_grad_partitioned`.
    """
    from ltc_core.api.pure_scan import traced_parts  # imports PyTorch's compiler: seconds

    forward, alias_input, backward = traced_parts(fn, init, xs, partition_fn)
    return forward, alias_input, backward


def tree_flatten_none(
    tree: Any,
) -> tuple[list[torch.Tensor], Callable[[Sequence[torch.Tensor]], Any]]:
    """Return the leaves of a structure that are not None, and a function that makes the structure of such leaves."""
    leaves, spec = pytree.tree_flatten(tree)

    def unflatten(found: Sequence[torch.Tensor]) -> Any:
        rest = iter(found)
        return pytree.tree_unflatten([None if t is None else next(rest) for t in leaves], spec)

    return [t for t in leaves if t is not None], unflatten
