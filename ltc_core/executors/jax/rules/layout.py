"""Ops that make tensors, move elements, or change a shape. Nothing has strides: a view is a new value."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from jax import lax
from jax import numpy as jnp

from ltc_core.executors.jax.table import Array, Call, dtype_of, lowers, to_dtype

__all__: list[str] = []

_TO_THE_END = 2**63 - 1  # what PyTorch gives for the end of a slice that has none


# -- new tensors ---------------------------------------------------------------------------------


@lowers("full")
def full(c: Call, size: Sequence[int], value: Any, **options: Any) -> Array:
    return jnp.broadcast_to(to_dtype(value, c.dtype), c.shape)


@lowers("full_like", "new_full")
def full_like(c: Call, x: Array, *value: Any, **options: Any) -> Array:
    return jnp.broadcast_to(to_dtype(value[-1], c.dtype), c.shape)


@lowers("fill.Scalar", "fill.Tensor")
def fill(c: Call, x: Array, value: Any) -> Array:
    return jnp.broadcast_to(to_dtype(value, c.dtype), c.shape)


@lowers(
    "empty.memory_format",
    "empty_strided",
    "new_empty",
    "new_empty_strided",
    "empty_like",
    "empty_permuted",
)
@lowers("zeros", "zeros_like", "new_zeros")
def zeros(c: Call, *args: Any, **options: Any) -> Array:
    return jnp.zeros(c.shape, c.dtype)


@lowers("ones", "ones_like", "new_ones")
def ones(c: Call, *args: Any, **options: Any) -> Array:
    return jnp.ones(c.shape, c.dtype)


@lowers("scalar_tensor")
def scalar_tensor(c: Call, value: Any, **options: Any) -> Array:
    return to_dtype(value, c.dtype)


@lowers("arange.start_step")
def arange(c: Call, start: Any, end: Any, step: Any = 1, **options: Any) -> Array:
    (count,) = c.shape
    if np.issubdtype(c.dtype, np.integer):
        return to_dtype(int(start) + lax.iota(np.int64, count) * int(step), c.dtype)
    wide = np.float64 if c.dtype == np.float64 else np.float32
    return to_dtype(start + lax.iota(wide, count) * np.asarray(step, wide), c.dtype)


# -- copies and conversions ----------------------------------------------------------------------


@lowers(
    "clone",
    "alias",
    "detach",
    "lift_fresh",
    "lift_fresh_copy",
    "lift",
    "contiguous",
    "positive",
    "alias_copy",
)
def same(c: Call, x: Array, **options: Any) -> Array:
    return x


@lowers("_to_copy", "to.dtype")
def converted(c: Call, x: Array, *args: Any, **options: Any) -> Array:
    return to_dtype(x, c.dtype)


@lowers("copy")
def copy(c: Call, x: Array, y: Array, non_blocking: bool = False) -> Array:
    return jnp.broadcast_to(to_dtype(y, c.dtype), c.shape)


@lowers("view.dtype")
def view_dtype(c: Call, x: Array, dtype: torch.dtype) -> Array:
    target = dtype_of(dtype)
    if any(jnp.issubdtype(t, jnp.complexfloating) for t in (x.dtype, target)):
        raise NotImplementedError("XLA has no bits of complex numbers")
    if x.dtype == np.bool_:
        x = x.astype(np.uint8)
    bits = np.dtype(np.uint8 if target == np.bool_ else target)
    if bits.itemsize > x.dtype.itemsize:
        x = x.reshape(*x.shape[:-1], -1, bits.itemsize // x.dtype.itemsize)
    return to_dtype(lax.bitcast_convert_type(x, bits), target).reshape(c.shape)


@lowers("view_as_complex", "view_as_complex_copy")
def view_as_complex(c: Call, x: Array) -> Array:
    return lax.complex(x[..., 0], x[..., 1])


@lowers("view_as_real", "view_as_real_copy")
def view_as_real(c: Call, x: Array) -> Array:
    return jnp.stack([x.real, x.imag], -1)


# -- shapes --------------------------------------------------------------------------------------


@lowers("view", "_unsafe_view", "reshape", "_reshape_alias", "view_copy")
@lowers("squeeze", "squeeze.dim", "squeeze.dims", "unsqueeze")
def reshaped(c: Call, x: Array, *args: Any) -> Array:
    return x.reshape(c.shape)


@lowers("permute", "permute_copy")
def permute(c: Call, x: Array, dims: Sequence[int]) -> Array:
    return jnp.transpose(x, [d % x.ndim for d in dims])


@lowers("t")
def t(c: Call, x: Array) -> Array:
    return x.T


@lowers("transpose.int")
def transpose(c: Call, x: Array, a: int, b: int) -> Array:
    return x if x.ndim == 0 else jnp.swapaxes(x, a, b)


@lowers("expand", "expand_copy")
def expand(c: Call, x: Array, size: Sequence[int], implicit: bool = False) -> Array:
    return jnp.broadcast_to(x, c.shape)


@lowers("slice.Tensor", "slice_copy.Tensor")
def sliced(
    c: Call, x: Array, dim: int = 0, start: int | None = None, end: int | None = None, step: int = 1
) -> Array:
    size = x.shape[dim]
    if isinstance(size, int):
        return x[_along(x, dim, slice(*slice(start, end, step).indices(size)))]
    last = None if isinstance(end, int) and end >= _TO_THE_END else end
    return x[_along(x, dim, slice(start, last, step))]


def _along(x: Array, dim: int, item: Any) -> tuple[Any, ...]:
    """Index of one dim."""
    return (*[slice(None)] * (dim % x.ndim), item)


@lowers("select.int", "select_copy.int")
def select(c: Call, x: Array, dim: int, index: int) -> Array:
    return lax.index_in_dim(x, index % x.shape[dim], dim % x.ndim, keepdims=False)


@lowers("slice_scatter")
def slice_scatter(
    c: Call,
    x: Array,
    part: Array,
    dim: int = 0,
    start: int | None = None,
    end: int | None = None,
    step: int = 1,
) -> Array:
    chosen = slice(*slice(start, end, step).indices(x.shape[dim]))
    if step == 1:
        begin = [0] * x.ndim
        begin[dim] = chosen.start
        return lax.dynamic_update_slice(x, to_dtype(part, x.dtype), begin) if part.size else x
    return x.at[_along(x, dim, chosen)].set(to_dtype(part, x.dtype))


@lowers("select_scatter")
def select_scatter(c: Call, x: Array, part: Array, dim: int, index: int) -> Array:
    return x.at[_along(x, dim, index % x.shape[dim])].set(to_dtype(part, x.dtype))


@lowers("diagonal", "diagonal_copy")
def diagonal(c: Call, x: Array, offset: int = 0, dim1: int = 0, dim2: int = 1) -> Array:
    return jnp.diagonal(x, offset, dim1, dim2) if 0 not in c.shape else jnp.zeros(c.shape, c.dtype)


@lowers("diagonal_scatter")
def diagonal_scatter(
    c: Call, x: Array, part: Array, offset: int = 0, dim1: int = 0, dim2: int = 1
) -> Array:
    return _written(x, diagonal(c, _places(x), offset, dim1, dim2) if part.size else None, part)


@lowers("as_strided", "as_strided_copy")
def as_strided(
    c: Call, x: Array, size: Sequence[int], stride: Sequence[int], offset: int | None = None
) -> Array:
    if not offset and _is_whole(x, size, stride):
        return x.reshape(c.shape)
    return jnp.take(x.reshape(-1), _addresses(size, stride, offset), mode="clip").reshape(c.shape)


def _is_whole(x: Array, size: Sequence[int], stride: Sequence[int]) -> bool:
    """Whether the view has all elements, in their order."""
    count: Any = 1
    for n, step in zip(reversed(size), reversed(stride), strict=True):
        if n != 1 and step != count:
            return False
        count = count * n
    return bool(count == x.size)


@lowers("as_strided_scatter")
def as_strided_scatter(
    c: Call,
    x: Array,
    part: Array,
    size: Sequence[int],
    stride: Sequence[int],
    offset: int | None = None,
) -> Array:
    return _written(x, jnp.asarray(_addresses(size, stride, offset)), part)


def _addresses(size: Sequence[int], stride: Sequence[int], offset: int | None) -> Any:
    places = np.asarray(offset or 0)
    for n, step in zip(size, stride, strict=True):
        places = places[..., None] + np.arange(n) * step
    return places


def _places(x: Array) -> Array:
    """The address of each element of a packed tensor."""
    return jnp.arange(x.size).reshape(x.shape)


def _written(x: Array, places: Array | None, part: Array) -> Array:
    """`x` with `part` at these addresses."""
    if places is None:
        return x
    values = to_dtype(part, x.dtype).reshape(-1)
    return x.reshape(-1).at[places.reshape(-1)].set(values).reshape(x.shape)


@lowers("unfold", "unfold_copy")
def unfold(c: Call, x: Array, dim: int, size: int, step: int) -> Array:
    if x.ndim == 0:
        return x.reshape(c.shape)
    count = c.shape[dim % x.ndim]
    places = np.arange(count)[:, None] * step + np.arange(size)
    found = jnp.take(x, places.reshape(-1), axis=dim, mode="clip")
    found = found.reshape(*x.shape[: dim % x.ndim], count, size, *x.shape[dim % x.ndim + 1 :])
    return jnp.moveaxis(found, dim % x.ndim + 1, -1)


@lowers("cat", "concat")
def cat(c: Call, tensors: Sequence[Array], dim: int = 0) -> Array:
    rows = [to_dtype(x, c.dtype) for x in tensors if x.shape != (0,) or len(c.shape) == 1]
    return jnp.concatenate(rows, dim % len(c.shape)) if rows else jnp.zeros(c.shape, c.dtype)


@lowers("stack")
def stack(c: Call, tensors: Sequence[Array], dim: int = 0) -> Array:
    return jnp.stack([to_dtype(x, c.dtype) for x in tensors], dim)


@lowers("split_with_sizes", "split_with_sizes_copy")
def split_with_sizes(c: Call, x: Array, sizes: Sequence[int], dim: int = 0) -> Any:
    return jnp.split(x, np.cumsum(sizes)[:-1], dim)


@lowers("split.Tensor", "split_copy.Tensor")
def split(c: Call, x: Array, size: int, dim: int = 0) -> Any:
    return jnp.split(x, list(range(size, x.shape[dim], size)), dim)


@lowers("unbind.int")
def unbind(c: Call, x: Array, dim: int = 0) -> list[Array]:
    return [lax.index_in_dim(x, i, dim % x.ndim, keepdims=False) for i in range(x.shape[dim])]


@lowers("resize")
def resize(c: Call, x: Array, size: Sequence[int], **options: Any) -> Array:
    flat = x.reshape(-1)[: math.prod(size)]
    return jnp.pad(flat, (0, math.prod(size) - flat.size)).reshape(c.shape)


@lowers("flip")
def flip(c: Call, x: Array, dims: Sequence[int]) -> Array:
    return jnp.flip(x, [d % x.ndim for d in dims]) if x.ndim else x


@lowers("roll")
def roll(c: Call, x: Array, shifts: Sequence[int], dims: Sequence[int] = ()) -> Array:
    return jnp.roll(x, shifts, tuple(dims)) if dims else jnp.roll(x, shifts[0])


@lowers("repeat")
def repeat(c: Call, x: Array, repeats: Sequence[int]) -> Array:
    return jnp.tile(x, repeats)


@lowers("constant_pad_nd")
def constant_pad_nd(c: Call, x: Array, pad: Sequence[int], value: Any = 0) -> Array:
    rows = [(0, 0, 0)] * x.ndim
    for k in range(len(pad) // 2):
        rows[x.ndim - 1 - k] = (pad[2 * k], pad[2 * k + 1], 0)
    return lax.pad(x, to_dtype(value, x.dtype), rows)


@lowers("tril")
def tril(c: Call, x: Array, diagonal: int = 0) -> Array:
    return jnp.tril(x, diagonal)


@lowers("triu")
def triu(c: Call, x: Array, diagonal: int = 0) -> Array:
    return jnp.triu(x, diagonal)
