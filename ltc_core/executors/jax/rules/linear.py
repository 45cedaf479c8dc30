"""Products of matrices, and convolutions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax import lax
from jax import numpy as jnp

from ltc_core.executors.jax.table import Array, Call, lowers, to_dtype

__all__: list[str] = []

# A TPU multiplies float32 in three passes of bfloat16 by default, a GPU in TF32: as exact as PyTorch's on the CPU.
_EXACT = lax.Precision.HIGHEST


@lowers("mm", "bmm", "matmul", "dot", "mv")
def matmul(c: Call, x: Array, y: Array) -> Array:
    if x.dtype == np.bool_:
        return (x.astype(np.int32) @ y.astype(np.int32)) != 0
    return jnp.matmul(x, y, precision=_EXACT)


@lowers("addmm")
def addmm(c: Call, bias: Array, x: Array, y: Array, *, beta: Any = 1, alpha: Any = 1) -> Array:
    return _added(c, bias, matmul(c, x, y), beta, alpha)


@lowers("baddbmm")
def baddbmm(c: Call, bias: Array, x: Array, y: Array, *, beta: Any = 1, alpha: Any = 1) -> Array:
    return _added(c, bias, matmul(c, x, y), beta, alpha)


@lowers("addmv")
def addmv(c: Call, bias: Array, x: Array, y: Array, *, beta: Any = 1, alpha: Any = 1) -> Array:
    return _added(c, bias, matmul(c, x, y), beta, alpha)


@lowers("addbmm")
def addbmm(c: Call, bias: Array, x: Array, y: Array, *, beta: Any = 1, alpha: Any = 1) -> Array:
    return _added(c, bias, jnp.sum(matmul(c, x, y), 0), beta, alpha)


def _added(c: Call, bias: Array, product: Array, beta: Any, alpha: Any) -> Array:
    """`beta * bias + alpha * product`; with `beta` 0, `bias` does not count, even if it is nan."""
    if alpha != 1:
        product = product * to_dtype(alpha, product.dtype)
    if beta == 0:
        return product
    return product + (bias if beta == 1 else bias * to_dtype(beta, bias.dtype))


# -- convolutions --------------------------------------------------------------------------------


@lowers("convolution")
def convolution(
    c: Call, x: Array, weight: Array, bias: Array | None, stride: Sequence[int], padding: Sequence[int],
    dilation: Sequence[int], transposed: bool, output_padding: Sequence[int], groups: int,
) -> Array:  # fmt: skip
    out = _convolved(x, weight, stride, padding, dilation, transposed, output_padding, groups)
    return out if bias is None else out + bias.reshape(-1, *[1] * (weight.ndim - 2))


def _convolved(
    x: Array, weight: Array, stride: Sequence[int], padding: Sequence[int], dilation: Sequence[int], transposed: bool,
    output_padding: Sequence[int], groups: int,
) -> Array:  # fmt: skip
    dims = weight.ndim - 2
    stride, padding, dilation, output_padding = (
        list(v) * dims if len(v) == 1 else list(v)
        for v in (stride, padding, dilation, output_padding)
    )
    batched = x if x.ndim == weight.ndim else x[None]
    if transposed:
        reach = [d * (n - 1) for d, n in zip(dilation, weight.shape[2:], strict=True)]
        pads = [
            (r - p, r - p + extra)
            for r, p, extra in zip(reach, padding, output_padding, strict=True)
        ]
        scales = {"window_strides": [1] * dims, "lhs_dilation": stride}
        weight = _mirrored(weight, groups)
    else:
        pads = [(p, p) for p in padding]
        scales = {"window_strides": stride, "lhs_dilation": [1] * dims}
    out = lax.conv_general_dilated(
        batched,
        weight,
        padding=pads,
        rhs_dilation=dilation,
        feature_group_count=groups,
        precision=_EXACT,
        **scales,
    )
    return out if x.ndim == weight.ndim else out[0]


def _mirrored(weight: Array, groups: int) -> Array:
    """The weight (out, in / groups, ...) with which a plain convolution does what the transposed one does."""
    flipped = jnp.flip(weight, range(2, weight.ndim))
    count, per_group = weight.shape[0] // groups, weight.shape[1]
    split = flipped.reshape(groups, count, per_group, *weight.shape[2:])
    return jnp.swapaxes(split, 1, 2).reshape(groups * per_group, count, *weight.shape[2:])


@lowers("convolution_backward")
def convolution_backward(
    c: Call, grad: Array, x: Array, weight: Array, bias_sizes: Any, stride: Sequence[int], padding: Sequence[int],
    dilation: Sequence[int], transposed: bool, output_padding: Sequence[int], groups: int, mask: Sequence[bool],
) -> list[Array | None]:  # fmt: skip
    def forward(x: Array, weight: Array) -> Array:
        return _convolved(x, weight, stride, padding, dilation, transposed, output_padding, groups)

    found: list[Array | None] = [None, None, None]
    if mask[0]:
        (found[0],) = jax.linear_transpose(lambda x: forward(x, weight), x)(grad)
    if mask[1]:
        (found[1],) = jax.linear_transpose(lambda weight: forward(x, weight), weight)(grad)
    if mask[2]:
        channel = grad.ndim - (weight.ndim - 2) - 1
        found[2] = jnp.sum(grad, [d for d in range(grad.ndim) if d != channel])
    return found
