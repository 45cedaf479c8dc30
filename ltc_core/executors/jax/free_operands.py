"""Operands of elementwise ops whose sizes are free: the program broadcasts them to the result's shape as it runs.

JAX broadcasts sizes of 1 that it knows. `broadcast` takes operands whose free sizes may be 1 or not; its op in
StableHLO is dynamic_broadcast_in_dim. Used by `lowering`, for recorded graphs with sizes that are shown as free.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
import torch
from jax._src.core import max_dim
from jax._src.interpreters.mlir import eval_dynamic_shape_as_tensor
from jax.core import ShapedArray
from jax.extend.core import Primitive
from jax.interpreters import mlir
from jaxlib.mlir.dialects import stablehlo

from ltc_core.executors.jax.free_sizes import FixedSizeError
from ltc_core.executors.jax.table import Array

__all__ = ["broadcast", "has_free_size", "is_elementwise"]

# Elementwise, and without the tag of such ops.
_UNTAGGED = {torch.ops.aten._to_copy.default, torch.ops.aten.lift_fresh_copy.default}


def is_elementwise(op: torch._ops.OpOverload) -> bool:
    return torch.Tag.pointwise in op.tags or op in _UNTAGGED


def has_free_size(x: Any) -> bool:
    return isinstance(x, jax.Array) and not all(isinstance(size, int) for size in x.shape)


def broadcast(operands: Sequence[Array]) -> list[Array]:
    """The operands in the shape of their result.

    Where sizes are known they have to fit; a free one is that of the result or 1 when the program runs.

    Raises:
        FixedSizeError: known sizes do not fit.
    """
    shape = functools.reduce(_joined, (x.shape for x in operands))
    return [_BROADCAST.bind(x, shape=shape) for x in operands]


def _joined(first: Sequence[Any], second: Sequence[Any]) -> tuple[Any, ...]:
    pairs = itertools.zip_longest(reversed(first), reversed(second), fillvalue=1)
    return tuple(_size(*pair) for pair in pairs)[::-1]


def _size(first: Any, second: Any) -> Any:
    if isinstance(first, int) and first == 1:
        return second
    if isinstance(second, int) and second == 1 or first is second:
        return first
    known = {size for size in (first, second) if isinstance(size, int)}
    if len(known) == 2:
        raise FixedSizeError(f"sizes {first} and {second} are not broadcast")
    return known.pop() if known else max_dim(first, second)


def _shaped(x: Any, *, shape: tuple[Any, ...]) -> Any:
    return ShapedArray(shape, x.dtype)


def _lowered(ctx: Any, x: Any, *, shape: tuple[Any, ...]) -> Any:
    (given,), (wanted,) = ctx.avals_in, ctx.avals_out
    dims = np.arange(len(shape) - given.ndim, len(shape))
    return stablehlo.DynamicBroadcastInDimOp(
        mlir.aval_to_ir_type(ctx.module_context, wanted),
        x,
        eval_dynamic_shape_as_tensor(ctx, shape),
        mlir.dense_int_array(dims),
    ).results


_BROADCAST = Primitive("broadcast_free_sizes")
_BROADCAST.def_abstract_eval(_shaped)
mlir.register_lowering(_BROADCAST, _lowered)
