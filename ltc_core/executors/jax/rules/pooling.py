"""Pooling and resampling.

Windows are walked by shifted slices, one for each place in the window, which XLA fuses into one loop: its own windowed
reductions and scatters run element by element on a CPU. What resamples each dim by itself is a product with a matrix
for each dim, which ATen's op on the unit vectors gives.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
from jax import lax
from jax import numpy as jnp

from ltc_core.executors.jax.table import Array, Call, lowers

__all__: list[str] = []

_EXACT = lax.Precision.HIGHEST


class _Window:
    """A window that moves over the last dims of a tensor."""

    def __init__(
        self,
        kernel: Sequence[int],
        stride: Sequence[int],
        padding: Sequence[int],
        dilation: Sequence[int] = (1,),
    ) -> None:
        dims = len(kernel)
        spread = [
            list(v) * dims if len(v) == 1 else list(v)
            for v in (stride or kernel, padding, dilation)
        ]
        self.kernel = list(kernel)
        self.stride, self.padding, self.dilation = spread
        self.dims = dims

    def places(self) -> Iterator[tuple[int, ...]]:
        """Each place in the window."""
        return itertools.product(*map(range, self.kernel))

    def _bounds(self, place: Sequence[int], sizes: Sequence[int]) -> list[tuple[int, int, int]]:
        """For each dim, the first element at a place of the window, one past the last, and the step."""
        rows = zip(place, self.dilation, self.padding, self.stride, sizes, strict=True)
        return [(k * d - p, k * d - p + (n - 1) * s + 1, s) for k, d, p, s, n in rows]

    def part(self, x: Array, place: Sequence[int], sizes: Sequence[int], fill: Any) -> Array:
        """The elements of `x` at a place of the window, for each of `sizes` windows; `fill` where there is none."""
        bounds = self._bounds(place, sizes)
        shape = x.shape[-self.dims :]
        pads = [
            (max(-low, 0), max(high - n, 0), 0)
            for (low, high, _), n in zip(bounds, shape, strict=True)
        ]
        if any(low or high for low, high, _ in pads):
            x = lax.pad(x, jnp.asarray(fill, x.dtype), [(0, 0, 0)] * (x.ndim - self.dims) + pads)
        chosen = [
            slice(low + before, high + before, step)
            for (low, high, step), (before, _, _) in zip(bounds, pads, strict=True)
        ]
        return x[(..., *chosen)]

    def spread(self, part: Array, place: Sequence[int], shape: Sequence[int]) -> Array:
        """The transpose of `part`: zeros of `shape` with these elements at the place of each window."""
        bounds = self._bounds(place, part.shape[-self.dims :])
        pads = [
            (low, n - high, step - 1) for (low, high, step), n in zip(bounds, shape, strict=True)
        ]
        return lax.pad(
            part, jnp.zeros((), part.dtype), [(0, 0, 0)] * (part.ndim - self.dims) + pads
        )


# -- largest values ------------------------------------------------------------------------------


@lowers("max_pool2d_with_indices", "max_pool3d_with_indices")
def max_pool(
    c: Call, x: Array, kernel: Sequence[int], stride: Sequence[int] = (), padding: Sequence[int] = (0,),
    dilation: Sequence[int] = (1,), ceil_mode: bool = False,
) -> tuple[Array, Array]:  # fmt: skip
    window = _Window(kernel, stride, padding, dilation)
    sizes = tuple(c.result[0].shape)[-window.dims :]
    lowest = -np.inf if jnp.issubdtype(x.dtype, jnp.floating) else jnp.iinfo(x.dtype).min
    addresses = _addresses(x.shape[-window.dims :])
    best: Array | None = None
    at: Array | None = None
    for place in window.places():
        value = window.part(x, place, sizes, lowest)
        # The address outside of the tensor is the least, so that it never wins.
        here = window.part(addresses, place, sizes, -1)
        if best is None or at is None:
            best, at = value, jnp.broadcast_to(here, value.shape)
            continue
        wins = ((value > best) | (value != value) | (at < 0)) & (here >= 0)
        best, at = jnp.where(wins, value, best), jnp.where(wins, here, at)
    assert best is not None and at is not None
    return best, at.astype(np.int64)


def _addresses(shape: Sequence[int]) -> Array:
    return jnp.arange(int(np.prod(shape)), dtype=np.int32).reshape(shape)


@lowers("max_pool2d_with_indices_backward", "max_pool3d_with_indices_backward")
def max_pool_backward(
    c: Call, grad: Array, x: Array, kernel: Sequence[int], stride: Sequence[int], padding: Sequence[int],
    dilation: Sequence[int], ceil_mode: bool, indices: Array,
) -> Array:  # fmt: skip
    window = _Window(kernel, stride, padding, dilation)
    shape, sizes = x.shape[-window.dims :], grad.shape[-window.dims :]
    addresses = _addresses(shape)
    indices = indices.astype(np.int32)
    result = jnp.zeros(x.shape, grad.dtype)
    for place in window.places():
        chosen = indices == window.part(addresses, place, sizes, -1)
        result = result + window.spread(jnp.where(chosen, grad, 0), place, shape)
    return result


@lowers("adaptive_max_pool2d_backward", "adaptive_max_pool3d_backward")
def adaptive_max_pool_backward(c: Call, grad: Array, x: Array, indices: Array) -> Array:
    dims = 2 if "2d" in c.op._opname else 3
    rows = indices.reshape(-1, int(np.prod(indices.shape[-dims:])))
    flat = jnp.zeros((rows.shape[0], int(np.prod(x.shape[-dims:]))), grad.dtype)
    row = jnp.arange(rows.shape[0])[:, None]
    return flat.at[row, rows].add(grad.reshape(rows.shape)).reshape(x.shape)


# -- means ---------------------------------------------------------------------------------------


@lowers("avg_pool2d", "avg_pool3d")
def avg_pool(
    c: Call, x: Array, kernel: Sequence[int], stride: Sequence[int] = (), padding: Sequence[int] = (0,),
    ceil_mode: bool = False, count_padding: bool = True, divisor: int | None = None,
) -> Array:  # fmt: skip
    window = _Window(kernel, stride, padding)
    sizes = c.shape[-window.dims :]
    counts = _counts(window, x.shape[-window.dims :], sizes, count_padding, divisor)
    total = sum(window.part(x, place, sizes, 0) for place in window.places())
    return total / counts.astype(x.dtype)


@lowers("avg_pool2d_backward", "avg_pool3d_backward")
def avg_pool_backward(
    c: Call, grad: Array, x: Array, kernel: Sequence[int], stride: Sequence[int], padding: Sequence[int],
    ceil_mode: bool, count_padding: bool, divisor: int | None,
) -> Array:  # fmt: skip
    window = _Window(kernel, stride, padding)
    shape, sizes = x.shape[-window.dims :], grad.shape[-window.dims :]
    counts = _counts(window, shape, sizes, count_padding, divisor)
    part = grad / counts.astype(grad.dtype)
    return sum(window.spread(part, place, shape) for place in window.places())


def _counts(
    window: _Window,
    shape: Sequence[int],
    sizes: Sequence[int],
    count_padding: bool,
    divisor: int | None,
) -> Any:
    """What the sum of each window is divided by."""
    if divisor is not None:
        return np.asarray(divisor)
    counts = np.ones(tuple(sizes), np.int64)
    rows = zip(shape, sizes, window.kernel, window.stride, window.padding, strict=True)
    for d, (n, count, k, s, p) in enumerate(rows):
        first = np.arange(count) * s - p
        last = np.minimum(first + k, n + p)  # the padding counts, what ceil_mode adds does not
        if not count_padding:
            first, last = np.maximum(first, 0), np.minimum(last, n)
        counts = counts * (last - first).reshape([-1 if e == d else 1 for e in range(window.dims)])
    return counts


# -- what resamples each dim by itself -----------------------------------------------------------


def _along_dims(x: Array, matrices: Sequence[Any]) -> Array:
    """`x` with each of its last dims multiplied by a matrix (from, to)."""
    wide = x.astype(np.float32) if x.dtype.itemsize < 4 else x
    for matrix in matrices:
        wide = jnp.tensordot(
            wide,
            jnp.asarray(matrix, wide.dtype),
            ((x.ndim - len(matrices),), (0,)),
            precision=_EXACT,
        )
    return wide


@functools.lru_cache(maxsize=256)
def _matrix(kind: str, n: int, to: int, *options: Any) -> np.ndarray[Any, Any]:
    """The matrix (n, to) of one dim: what ATen's op makes of the unit vectors."""
    units = torch.eye(n, dtype=torch.float64).unsqueeze(0)
    aten = torch.ops.aten
    if kind == "adaptive":
        found = aten.adaptive_avg_pool1d(units, [to])
    elif kind == "nearest":
        found = aten.upsample_nearest1d(units, [to], *options)
    elif kind == "nearest_exact":
        found = aten._upsample_nearest_exact1d(units, [to], *options)
    elif kind == "linear":
        found = aten.upsample_linear1d(units, [to], *options)
    else:
        aligned, scale = options
        found = aten.upsample_bicubic2d(units.unsqueeze(-1), [to, 1], aligned, scale, None).squeeze(
            -1
        )
    matrix: np.ndarray[Any, Any] = found[0].numpy()
    return matrix


@lowers("_adaptive_avg_pool2d", "_adaptive_avg_pool3d", "adaptive_avg_pool1d")
def adaptive_avg_pool(c: Call, x: Array, size: Sequence[int]) -> Array:
    shape = x.shape[-len(size) :]
    return _along_dims(x, [_matrix("adaptive", n, to) for n, to in zip(shape, size, strict=True)])


@lowers("_adaptive_avg_pool2d_backward", "_adaptive_avg_pool3d_backward")
def adaptive_avg_pool_backward(c: Call, grad: Array, x: Array) -> Array:
    dims = 2 if "2d" in c.op._opname else 3
    pairs = zip(x.shape[-dims:], grad.shape[-dims:], strict=True)
    return _along_dims(grad, [_matrix("adaptive", n, to).T for n, to in pairs])


def _kind(c: Call) -> str:
    name = c.op._opname
    return next(k for k in ("nearest_exact", "nearest", "linear", "cubic") if k in name)


def _scales(c: Call, dims: int, scales: Sequence[Any]) -> list[tuple[Any, ...]]:
    """For each dim, the arguments of ATen's op for one dim after the size."""
    kind = _kind(c)
    if kind in ("nearest", "nearest_exact"):
        given = [*scales, *[None] * (dims - len(scales))]
        return [(scale,) for scale in given]
    aligned, *rest = scales
    given = [*rest, *[None] * (dims - len(rest))]
    return [(aligned, scale) for scale in given]


_KINDS = (
    "upsample_nearest1d", "upsample_nearest2d", "upsample_nearest3d",
    "_upsample_nearest_exact1d", "_upsample_nearest_exact2d", "_upsample_nearest_exact3d",
    "upsample_linear1d", "upsample_bilinear2d", "upsample_trilinear3d", "upsample_bicubic2d",
)  # fmt: skip


@lowers(*_KINDS)
def upsample(c: Call, x: Array, size: Sequence[int], *scales: Any) -> Array:
    options = _scales(c, len(size), scales)
    rows = zip(x.shape[-len(size) :], size, options, strict=True)
    return _along_dims(x, [_matrix(_kind(c), n, to, *more) for n, to, more in rows])


@lowers(*(f"{kind}_backward" for kind in _KINDS))
def upsample_backward(
    c: Call, grad: Array, size: Sequence[int], input_size: Sequence[int], *scales: Any
) -> Array:
    options = _scales(c, len(size), scales)
    rows = zip(input_size[-len(size) :], size, options, strict=True)
    return _along_dims(grad, [_matrix(_kind(c), n, to, *more).T for n, to, more in rows])
