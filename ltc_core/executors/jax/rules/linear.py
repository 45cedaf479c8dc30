"""Products of matrices, and convolutions."""

from __future__ import annotations

import itertools
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
    return _added(bias, _wide_product(c, x, y), beta, alpha)


@lowers("baddbmm")
def baddbmm(c: Call, bias: Array, x: Array, y: Array, *, beta: Any = 1, alpha: Any = 1) -> Array:
    return _added(bias, _wide_product(c, x, y), beta, alpha)


@lowers("addmv")
def addmv(c: Call, bias: Array, x: Array, y: Array, *, beta: Any = 1, alpha: Any = 1) -> Array:
    return _added(bias, _wide_product(c, x, y), beta, alpha)


@lowers("addbmm")
def addbmm(c: Call, bias: Array, x: Array, y: Array, *, beta: Any = 1, alpha: Any = 1) -> Array:
    return _added(bias, jnp.sum(_wide_product(c, x, y), 0), beta, alpha)


def _wide_product(c: Call, x: Array, y: Array) -> Array:
    """The product, of float16 and bfloat16 in float32: it is rounded when the bias has been added."""
    if x.dtype.itemsize == 2 and jnp.issubdtype(x.dtype, jnp.floating):
        return jnp.matmul(x, y, precision=_EXACT, preferred_element_type=np.float32)
    return matmul(c, x, y)


def _added(bias: Array, product: Array, beta: Any, alpha: Any) -> Array:
    """`beta * bias + alpha * product`; with `beta` 0, `bias` does not count, even if it is nan."""
    if alpha != 1:
        product = product * to_dtype(alpha, product.dtype)
    if beta == 0:
        return product
    bias = to_dtype(bias, product.dtype)
    return product + (bias if beta == 1 else bias * to_dtype(beta, bias.dtype))


# -- convolutions --------------------------------------------------------------------------------


class _Convolution:
    """A convolution of n dims; all of its numbers but the sizes of its operands."""

    def __init__(
        self, dims: int, stride: Sequence[int], padding: Sequence[int], dilation: Sequence[int], transposed: bool,
        output_padding: Sequence[int], groups: int,
    ) -> None:  # fmt: skip
        given = (stride, padding, dilation, output_padding)
        spread = [list(v) * dims if len(v) == 1 else list(v) for v in given]
        self.stride, self.padding, self.dilation, self.output_padding = spread
        self.dims = dims
        self.transposed = transposed
        self.groups = groups

    def __call__(self, x: Array, weight: Array) -> Array:
        """The convolution of a batch."""
        if self.transposed:
            return self._transposed(x, weight)
        if self._is_pointwise(weight):
            strided = x[(..., *(slice(None, None, s) for s in self.stride))]
            rows = jnp.moveaxis(strided, 1, -1)
            product = jnp.matmul(rows, weight.reshape(weight.shape[:2]).T, precision=_EXACT)
            return jnp.moveaxis(product, -1, 1)
        if self._is_depthwise(weight):
            return self._depthwise(x, weight)
        pads = [(p, p) for p in self.padding]
        if any(self.padding):
            return self._plain(x, weight, pads)
        # XLA calls its library for a CPU only if something is padded, and else computes in loops, 3 times slower.
        sizes = self._sizes(x, weight)
        out = self._plain(x, weight, [*pads[:-1], (0, 1)])
        return out[(..., *map(slice, sizes))]

    def _is_pointwise(self, weight: Array) -> bool:
        return self.groups == 1 and not any(self.padding) and set(weight.shape[2:]) == {1}

    def _is_depthwise(self, weight: Array) -> bool:
        return self.groups > 1 and weight.shape[1] == 1

    def _depthwise(self, x: Array, weight: Array) -> Array:
        """Each channel by itself, in a sum over the places in the window, which XLA fuses into one loop."""
        sizes = self._sizes(x, weight)
        padded = lax.pad(
            x, jnp.zeros((), x.dtype), [(0, 0, 0)] * 2 + [(p, p, 0) for p in self.padding]
        )
        weight = weight.reshape(self.groups, -1, *weight.shape[2:])
        out = sum(
            self._part(padded, place, sizes)[:, :, None]
            * weight[(..., *place)].reshape(*weight.shape[:2], *[1] * self.dims)
            for place in itertools.product(*map(range, weight.shape[2:]))
        )
        return jnp.reshape(out, (x.shape[0], -1, *sizes))

    def _part(self, padded: Array, place: Sequence[int], sizes: Sequence[int]) -> Array:
        """The elements at one place of each window, of a tensor whose last dims are padded."""
        rows = zip(place, self.dilation, sizes, self.stride, strict=True)
        return padded[(..., *(slice(k * d, k * d + (n - 1) * s + 1, s) for k, d, n, s in rows))]

    def _sizes(self, x: Array, weight: Array) -> list[int]:
        """The sizes of the result of a convolution that is not transposed."""
        rows = zip(
            x.shape[2:], weight.shape[2:], self.stride, self.padding, self.dilation, strict=True
        )
        return [(n + 2 * p - d * (k - 1) - 1) // s + 1 for n, k, s, p, d in rows]

    def _plain(self, x: Array, weight: Array, pads: Sequence[tuple[int, int]]) -> Array:
        return self._call(x, weight, pads, self.stride, [1] * self.dims)

    def _transposed(self, x: Array, weight: Array) -> Array:
        rows = zip(self.dilation, weight.shape[2:], self.padding, self.output_padding, strict=True)
        pads = [(d * (k - 1) - p, d * (k - 1) - p + extra) for d, k, p, extra in rows]
        return self._call(x, _mirrored(weight, self.groups), pads, [1] * self.dims, self.stride)

    def _call(
        self, x: Array, weight: Array, pads: Sequence[tuple[int, int]], stride: Sequence[int], spread: Sequence[int]
    ) -> Array:  # fmt: skip
        return lax.conv_general_dilated(
            x,
            weight,
            window_strides=stride,
            padding=pads,
            lhs_dilation=spread,
            rhs_dilation=self.dilation,
            feature_group_count=self.groups,
            precision=_EXACT,
        )

    def weight_gradient(self, grad: Array, x: Array, weight: Array) -> Array:
        """As one product of matrices for each place in the window.

        XLA takes minutes to compile some of these gradients as convolutions for a TPU, and runs them in loops on a CPU.
        """
        if self.transposed:  # the gradient of the plain convolution that goes the other way
            plain = _Convolution(
                self.dims, self.stride, self.padding, self.dilation, False, [0], self.groups
            )
            return plain.weight_gradient(x, grad, weight)
        padded = lax.pad(
            x, jnp.zeros((), x.dtype), [(0, 0, 0)] * 2 + [(p, p, 0) for p in self.padding]
        )
        if self._is_depthwise(weight):
            return self._depthwise_gradient(grad, padded, weight)
        padded = jnp.moveaxis(padded, 1, -1)
        count = self.groups
        grads = jnp.moveaxis(grad, 1, -1).reshape(-1, count, grad.shape[1] // count)
        sizes = grad.shape[2:]
        found = []
        for place in itertools.product(*map(range, weight.shape[2:])):
            rows = zip(place, self.dilation, sizes, self.stride, strict=True)
            chosen = [slice(k * d, k * d + (n - 1) * s + 1, s) for k, d, n, s in rows]
            part = padded[(slice(None), *chosen)].reshape(-1, count, x.shape[1] // count)
            # (group, output channel, input channel)
            found.append(jnp.einsum("rgo,rgi->goi", grads, part, precision=_EXACT))
        return jnp.stack(found, -1).reshape(weight.shape)

    def _depthwise_gradient(self, grad: Array, padded: Array, weight: Array) -> Array:
        sizes = grad.shape[2:]
        grads = grad.reshape(grad.shape[0], self.groups, -1, *sizes)
        over = (0, *range(3, grads.ndim))
        found = [
            jnp.sum(grads * self._part(padded, place, sizes)[:, :, None], over)
            for place in itertools.product(*map(range, weight.shape[2:]))
        ]
        return jnp.stack(found, -1).reshape(weight.shape)


def _mirrored(weight: Array, groups: int) -> Array:
    """The weight (out, in / groups, ...) with which a plain convolution does what the transposed one does."""
    flipped = jnp.flip(weight, range(2, weight.ndim))
    count, per_group = weight.shape[0] // groups, weight.shape[1]
    split = flipped.reshape(groups, count, per_group, *weight.shape[2:])
    return jnp.swapaxes(split, 1, 2).reshape(groups * per_group, count, *weight.shape[2:])


@lowers("convolution")
def convolution(c: Call, x: Array, weight: Array, bias: Array | None, *numbers: Any) -> Array:
    convolve = _Convolution(weight.ndim - 2, *numbers)
    is_batch = x.ndim == weight.ndim
    out = convolve(x if is_batch else x[None], weight)
    if bias is not None:
        out = out + bias.reshape(-1, *[1] * convolve.dims)
    return out if is_batch else out[0]


@lowers("convolution_backward")
def convolution_backward(
    c: Call, grad: Array, x: Array, weight: Array, bias_sizes: Any, *numbers: Any
) -> list[Array | None]:
    *numbers_of_forward, mask = numbers
    convolve = _Convolution(weight.ndim - 2, *numbers_of_forward)
    is_batch = x.ndim == weight.ndim
    batch, grads = (x, grad) if is_batch else (x[None], grad[None])
    found: list[Array | None] = [None, None, None]
    if mask[0]:
        (of_x,) = jax.linear_transpose(lambda x: convolve(x, weight), batch)(grads)
        found[0] = of_x if is_batch else of_x[0]
    if mask[1]:
        found[1] = convolve.weight_gradient(grads, batch, weight)
    if mask[2]:
        found[2] = jnp.sum(grads, [0, *range(2, grads.ndim)])
    return found
