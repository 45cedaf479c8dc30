"""Convolutions and their gradients.

On a TPU they have another form. XLA computes a convolution of float32 there in six passes of bfloat16
(precision HIGHEST), which takes it ten times as long to compile as one pass.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Sequence
from typing import Any, Self

import jax
import numpy as np
from jax import lax
from jax import numpy as jnp

from ltc_core.executors.jax.precision import precision
from ltc_core.executors.jax.table import Array, Call, lowers

__all__: list[str] = []

# Elements of a window over all input channels, up to which a TPU has room for them in its lanes. One channel, or three,
# leave most lanes empty.
_SMALL_WINDOW = 256


class Convolution:
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
            product = jnp.matmul(rows, weight.reshape(weight.shape[:2]).T, precision=precision())
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
        padded = self._padded(x)
        weight = weight.reshape(self.groups, -1, *weight.shape[2:])
        out = sum(
            self._part(padded, place, sizes)[:, :, None]
            * weight[(..., *place)].reshape(*weight.shape[:2], *[1] * self.dims)
            for place in itertools.product(*map(range, weight.shape[2:]))
        )
        return jnp.reshape(out, (x.shape[0], -1, *sizes))

    def _part(self, padded: Array, place: Sequence[int], sizes: Sequence[int]) -> Array:
        """The elements at one place of each window, of a tensor whose last dims are padded."""
        return padded[(..., *self._at(place, sizes))]

    def _at(self, place: Sequence[int], sizes: Sequence[int]) -> list[slice]:
        rows = zip(place, self.dilation, sizes, self.stride, strict=True)
        return [slice(k * d, k * d + (n - 1) * s + 1, s) for k, d, n, s in rows]

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
        convolve = functools.partial(
            lax.conv_general_dilated,
            window_strides=stride,
            padding=pads,
            lhs_dilation=spread,
            rhs_dilation=self.dilation,
            feature_group_count=self.groups,
        )
        return self._computed(convolve, x, weight)

    def _computed(self, convolve: Any, x: Array, weight: Array) -> Array:
        return convolve(x, weight, precision=precision())

    def input_gradient(self, grad: Array, x: Array, weight: Array) -> Array:
        (found,) = jax.linear_transpose(lambda x: self(x, weight), x)(grad)
        return found

    def weight_gradient(self, grad: Array, x: Array, weight: Array) -> Array:
        if self.transposed:  # the gradient of the plain convolution that goes the other way
            return self._other_way([0]).weight_gradient(x, grad, weight)
        if self._is_depthwise(weight):
            return self._depthwise_gradient(grad, self._padded(x), weight)
        return self._weight_gradient(grad, x, weight)

    def _other_way(self, output_padding: Sequence[int]) -> Self:
        """The transposed convolution for a plain one, and a plain one for a transposed one."""
        return type(self)(
            self.dims, self.stride, self.padding, self.dilation, not self.transposed, output_padding, self.groups
        )  # fmt: skip

    def _padded(self, x: Array) -> Array:
        pads = [(0, 0, 0)] * 2 + [(p, p, 0) for p in self.padding]
        return lax.pad(x, jnp.zeros((), x.dtype), pads)

    def _weight_gradient(self, grad: Array, x: Array, weight: Array) -> Array:
        if self.groups == 1 and self.dims < 3:
            (found,) = jax.linear_transpose(lambda weight: self(x, weight), weight)(grad)
            return found
        return self._weight_gradient_by_places(grad, x, weight)

    def _weight_gradient_by_places(self, grad: Array, x: Array, weight: Array) -> Array:
        """As a product of matrices for each place in the window.

        Of groups, and in three dims, XLA would compute the convolution in loops on a CPU, 2 to 40 times slower.
        """
        padded = jnp.moveaxis(self._padded(x), 1, -1)
        count = self.groups
        grads = jnp.moveaxis(grad, 1, -1).reshape(-1, count, grad.shape[1] // count)
        sizes = grad.shape[2:]
        found = []
        for place in itertools.product(*map(range, weight.shape[2:])):
            part = padded[(slice(None), *self._at(place, sizes))].reshape(
                -1, count, x.shape[1] // count
            )
            # (group, output channel, input channel)
            found.append(jnp.einsum("rgo,rgi->goi", grads, part, precision=precision()))
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


# Which parts of both operands are multiplied, the largest first.
_PRODUCTS = {
    lax.Precision.HIGHEST: ((0, 0), (0, 1), (1, 0), (1, 1), (0, 2), (2, 0)),
    lax.Precision.HIGH: ((0, 0), (0, 1), (1, 0)),
    lax.Precision.DEFAULT: ((0, 0),),
}


class ConvolutionOnTpu(Convolution):
    """In the forms that XLA compiles in seconds for a TPU. Gradients are convolutions, too.

    Seconds of a core to compile one for v5e (libtpu 0.0.52), as `Convolution` has it and as here: forward 18 and
    5, gradient of the weight 17 and 4; of the weight where one channel comes in, more than 60 and 7.
    """

    def _computed(self, convolve: Any, x: Array, weight: Array) -> Array:
        """Of float32, as one convolution of bfloat16 with six times the channels, or with three times (HIGH).

        Each number is the sum of three of bfloat16. The three smallest of their nine products do not count: the others
        are those that HIGHEST stands for, and the three largest those of HIGH.
        """
        pairs = _PRODUCTS[precision()]
        if x.dtype != np.float32 or len(pairs) == 1:
            return convolve(x, weight)
        of_x, of_weight = _parts_in_bfloat16(x), _parts_in_bfloat16(weight)
        x = self._joined([of_x[i] for i, _ in pairs])
        weight = jnp.concatenate([of_weight[k] for _, k in pairs], 1)
        return convolve(x, weight, preferred_element_type=np.float32)

    def _joined(self, parts: Sequence[Array]) -> Array:
        """Parts of each group's channels, one after the other."""
        count, _, *sizes = parts[0].shape
        grouped = [part.reshape(count, self.groups, -1, *sizes) for part in parts]
        return jnp.concatenate(grouped, 2).reshape(count, -1, *sizes)

    def input_gradient(self, grad: Array, x: Array, weight: Array) -> Array:
        output_padding = [0] * self.dims
        if not self.transposed:
            sizes = self._other_way(output_padding)._transposed_sizes(grad, weight)
            output_padding = [n - m for n, m in zip(x.shape[2:], sizes, strict=True)]
        return self._other_way(output_padding)(grad, weight)

    def _transposed_sizes(self, x: Array, weight: Array) -> list[int]:
        """The sizes of the result of a transposed convolution."""
        rows = zip(
            x.shape[2:], weight.shape[2:], self.stride, self.padding, self.dilation, strict=True
        )
        return [(n - 1) * s - 2 * p + d * (k - 1) + 1 for n, k, s, p, d in rows]

    def _weight_gradient(self, grad: Array, x: Array, weight: Array) -> Array:
        if self.groups > 1:
            return super()._weight_gradient(grad, x, weight)
        if x.shape[1] * math.prod(weight.shape[2:]) <= _SMALL_WINDOW:
            return self._product_with_windows(grad, x, weight)
        # Batch and channels change places.
        rows = zip(
            x.shape[2:], grad.shape[2:], weight.shape[2:],
            self.stride, self.padding, self.dilation, strict=True,
        )  # fmt: skip
        convolve = functools.partial(
            lax.conv_general_dilated,
            window_strides=self.dilation,
            padding=[(p, (k - 1) * d + (m - 1) * s + 1 - n - p) for n, m, k, s, p, d in rows],
            rhs_dilation=self.stride,
        )
        found = self._computed(convolve, jnp.swapaxes(x, 0, 1), jnp.swapaxes(grad, 0, 1))
        return jnp.swapaxes(found, 0, 1)

    def _product_with_windows(self, grad: Array, x: Array, weight: Array) -> Array:
        """As one product of matrices: XLA does not end compiling it as a convolution of one channel."""
        padded, sizes = self._padded(x), grad.shape[2:]
        places = itertools.product(*map(range, weight.shape[2:]))
        windows = jnp.stack([self._part(padded, place, sizes) for place in places], 2)
        rows = jnp.moveaxis(windows, (1, 2), (-2, -1)).reshape(-1, weight[0].size)
        grads = jnp.moveaxis(grad, 1, -1).reshape(-1, grad.shape[1])
        return jnp.matmul(grads.T, rows, precision=precision()).reshape(weight.shape)


def _parts_in_bfloat16(x: Array) -> list[Array]:
    """Three arrays of bfloat16 whose sum is `x`."""
    found = []
    for _ in range(3):
        part = lax.reduce_precision(x, 8, 7)  # XLA may remove an `astype` and the one back
        found.append(part.astype(jnp.bfloat16))
        x = jnp.where(jnp.isfinite(part), x - part, 0)
    return found


@lowers("convolution")
def convolution(c: Call, x: Array, weight: Array, bias: Array | None, *numbers: Any) -> Array:
    dims = weight.ndim - 2
    is_batch = x.ndim == weight.ndim
    out = lax.platform_dependent(
        x if is_batch else x[None],
        weight,
        tpu=ConvolutionOnTpu(dims, *numbers),
        default=Convolution(dims, *numbers),
    )
    if bias is not None:
        out = out + bias.reshape(-1, *[1] * dims)
    return out if is_batch else out[0]


@lowers("convolution_backward")
def convolution_backward(
    c: Call, grad: Array, x: Array, weight: Array, bias_sizes: Any, *numbers: Any
) -> list[Array | None]:
    *numbers_of_forward, mask = numbers
    of_tpu, of_others = (
        kind(weight.ndim - 2, *numbers_of_forward) for kind in (ConvolutionOnTpu, Convolution)
    )
    is_batch = x.ndim == weight.ndim
    batch, grads = (x, grad) if is_batch else (x[None], grad[None])
    given = grads, batch, weight
    found: list[Array | None] = [None, None, None]
    if mask[0]:
        of_x = lax.platform_dependent(
            *given, tpu=of_tpu.input_gradient, default=of_others.input_gradient
        )
        found[0] = of_x if is_batch else of_x[0]
    if mask[1]:
        found[1] = lax.platform_dependent(
            *given, tpu=of_tpu.weight_gradient, default=of_others.weight_gradient
        )
    if mask[2]:
        found[2] = jnp.sum(grads, [0, *range(2, grads.ndim)])
    return found
