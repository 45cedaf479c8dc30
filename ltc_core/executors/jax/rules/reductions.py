"""Reductions, scans, sorting."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
from jax import lax
from jax import numpy as jnp

from ltc_core.executors.jax.table import Array, Call, is_narrow_float, lowers, to_dtype

__all__: list[str] = []


def _dims(x: Array, dim: Any) -> tuple[int, ...]:
    """The dims that are reduced; None and an empty list are all of them."""
    if dim is None or (isinstance(dim, list | tuple) and not dim):
        return tuple(range(x.ndim))
    chosen = dim if isinstance(dim, list | tuple) else [dim]
    return tuple(d % x.ndim for d in chosen) if x.ndim else ()


@lowers("sum", "sum.dim_IntList")
def total(c: Call, x: Array, dim: Any = None, keepdim: bool = False, dtype: Any = None) -> Array:
    return jnp.sum(to_dtype(x, c.dtype), _dims(x, dim), keepdims=keepdim)


@lowers("mean", "mean.dim")
def mean(c: Call, x: Array, dim: Any = None, keepdim: bool = False, dtype: Any = None) -> Array:
    return jnp.mean(to_dtype(x, c.dtype), _dims(x, dim), keepdims=keepdim)


@lowers("prod", "prod.dim_int")
def product(c: Call, x: Array, dim: Any = None, keepdim: bool = False, dtype: Any = None) -> Array:
    return jnp.prod(to_dtype(x, c.dtype), _dims(x, dim), keepdims=keepdim)


@lowers("amax", "max")
def amax(c: Call, x: Array, dim: Any = None, keepdim: bool = False) -> Array:
    return jnp.max(x, _dims(x, dim), keepdims=keepdim)


@lowers("amin", "min")
def amin(c: Call, x: Array, dim: Any = None, keepdim: bool = False) -> Array:
    return jnp.min(x, _dims(x, dim), keepdims=keepdim)


@lowers("any", "any.dim", "any.dims", "_is_any_true")
def any_of(c: Call, x: Array, dim: Any = None, keepdim: bool = False) -> Array:
    return jnp.any(to_dtype(x, np.bool_), _dims(x, dim), keepdims=keepdim)


@lowers("all", "all.dim", "all.dims", "_is_all_true")
def all_of(c: Call, x: Array, dim: Any = None, keepdim: bool = False) -> Array:
    return jnp.all(to_dtype(x, np.bool_), _dims(x, dim), keepdims=keepdim)


@lowers("var.correction")
def var(c: Call, x: Array, dim: Any = None, *, correction: Any = 1, keepdim: bool = False) -> Array:
    dims = _dims(x, dim)
    wide = _wide(x)
    away = wide - jnp.mean(wide, dims, keepdims=True)
    squares = jnp.sum(jnp.real(away * jnp.conj(away)), dims, keepdims=keepdim)
    count = math.prod(x.shape[d] for d in dims)
    left = max(count - (1 if correction is None else correction), 0)
    return squares / np.asarray(left, squares.dtype)


@lowers("var_mean.correction")
def var_mean(
    c: Call, x: Array, dim: Any = None, *, correction: Any = 1, keepdim: bool = False
) -> tuple[Array, Array]:
    middle = jnp.mean(_wide(x), _dims(x, dim), keepdims=keepdim)
    return var(c, x, dim, correction=correction, keepdim=keepdim), middle


def _wide(x: Array) -> Array:
    """In float32 at least, in which ATen's kernels compute."""
    return x.astype(np.float32) if x.dtype.itemsize < 4 else x


@lowers("argmax")
def argmax(c: Call, x: Array, dim: int | None = None, keepdim: bool = False) -> Array:
    return _position(jnp.argmax, x, dim, keepdim).reshape(c.shape)


@lowers("argmin")
def argmin(c: Call, x: Array, dim: int | None = None, keepdim: bool = False) -> Array:
    return _position(jnp.argmin, x, dim, keepdim).reshape(c.shape)


def _position(find: Callable[..., Array], x: Array, dim: int | None, keepdim: bool) -> Array:
    if dim is None or x.ndim == 0:
        return find(x.reshape(-1))
    return find(x, dim, keepdims=keepdim)


@lowers("max.dim")
def max_dim(c: Call, x: Array, dim: int, keepdim: bool = False) -> tuple[Array, Array]:
    return _with_position(jnp.argmax, x, dim, keepdim)


@lowers("min.dim")
def min_dim(c: Call, x: Array, dim: int, keepdim: bool = False) -> tuple[Array, Array]:
    return _with_position(jnp.argmin, x, dim, keepdim)


def _with_position(
    find: Callable[..., Array], x: Array, dim: int, keepdim: bool
) -> tuple[Array, Array]:
    if x.ndim == 0:
        return x, jnp.zeros((), np.int64)
    return _picked(x, find(x, dim, keepdims=True), dim, keepdim)


# -- scans ---------------------------------------------------------------------------------------


def _scan(call: Callable[..., Array]) -> Callable[..., Array]:
    """A scan that rounds each result once: of float16 and bfloat16 it adds up in float32, as eager."""

    def rule(c: Call, x: Array, dim: int, dtype: Any = None) -> Array:
        x = to_dtype(x, c.dtype)
        if x.ndim == 0:
            return x
        return call(x.astype(np.float32) if is_narrow_float(x.dtype) else x, dim % x.ndim)

    return rule


lowers("cumsum")(_scan(lax.cumsum))
lowers("cumprod")(_scan(lax.cumprod))
lowers("logcumsumexp")(_scan(lax.cumlogsumexp))


@lowers("cummax", "cummin")
def extreme_so_far(c: Call, x: Array, dim: int) -> tuple[Array, Array]:
    if x.ndim == 0:
        return x, jnp.zeros((), np.int64)
    is_max = c.op._opname == "cummax"
    places = lax.broadcasted_iota(np.int64, x.shape, dim % x.ndim)

    def later(a: tuple[Array, Array], b: tuple[Array, Array]) -> tuple[Array, Array]:
        (x, at), (y, other) = a, b
        wins = (y >= x) if is_max else (y <= x)  # of equal numbers the last
        wins = (wins | (y != y)) if jnp.issubdtype(x.dtype, jnp.floating) else wins
        wins = jnp.where(x != x, y != y, wins)
        return jnp.where(wins, y, x), jnp.where(wins, other, at)

    found: tuple[Array, Array] = lax.associative_scan(later, (x, places), axis=dim % x.ndim)
    return found


# -- sorting -------------------------------------------------------------------------------------


@lowers("sort", "sort.stable")
def sort(
    c: Call,
    x: Array,
    *args: Any,
    stable: bool | None = True,
    dim: int = -1,
    descending: bool = False,
) -> tuple[Array, Array]:
    if args:
        dim, descending = (*args, descending)[:2]
    if x.ndim == 0:
        return x, jnp.zeros((), np.int64)
    at = jnp.argsort(x, dim, stable=True, descending=descending)
    return jnp.take_along_axis(x, at, dim), at


@lowers("topk")
def topk(
    c: Call,
    x: Array,
    k: int,
    dim: int = -1,
    largest: bool = True,
    is_sorted: bool = True,
    **more: Any,
) -> tuple[Array, Array]:
    if x.ndim == 0:
        return x.reshape(c.result[0].shape), jnp.zeros(c.result[0].shape, np.int64)
    at = jnp.argsort(x, dim, stable=True, descending=largest)
    at = lax.slice_in_dim(at, 0, k, axis=dim % x.ndim)
    return jnp.take_along_axis(x, at, dim), at


@lowers("median", "nanmedian")
def median(c: Call, x: Array) -> Array:
    if not x.size:
        raise NotImplementedError("there is no median of nothing")
    ordered = jnp.sort(x.reshape(-1))
    if c.op._opname == "nanmedian" and jnp.issubdtype(x.dtype, jnp.floating):
        count = jnp.sum(~jnp.isnan(ordered))
        return ordered[jnp.maximum(count - 1, 0) // 2]
    middle = ordered[(x.size - 1) // 2]
    return (
        jnp.where(jnp.isnan(ordered[-1]), ordered[-1], middle)
        if jnp.issubdtype(x.dtype, jnp.floating)
        else middle
    )


@lowers("kthvalue")
def kthvalue(c: Call, x: Array, k: int, dim: int = -1, keepdim: bool = False) -> tuple[Array, ...]:
    if x.ndim == 0:
        return x, jnp.zeros((), np.int64)
    at = jnp.argsort(x, dim, stable=True)
    return _picked(x, lax.slice_in_dim(at, k - 1, k, axis=dim % x.ndim), dim, keepdim)


@lowers("median.dim")
def median_dim(c: Call, x: Array, dim: int, keepdim: bool = False) -> tuple[Array, ...]:
    if x.ndim == 0:
        return x, jnp.zeros((), np.int64)
    order = jnp.argsort(x, dim, stable=True)  # nan is last
    middle = (x.shape[dim] - 1) // 2
    at = lax.slice_in_dim(order, middle, middle + 1, axis=dim % x.ndim)
    if jnp.issubdtype(x.dtype, jnp.floating):
        first_nan = jnp.argmax(jnp.isnan(x), dim, keepdims=True)
        at = jnp.where(jnp.any(jnp.isnan(x), dim, keepdims=True), first_nan, at)
    return _picked(x, at, dim, keepdim)


def _picked(x: Array, at: Array, dim: int, keepdim: bool) -> tuple[Array, ...]:
    """The element of each row at its place, and the place."""
    value = jnp.take_along_axis(x, at, dim)
    return (value, at) if keepdim else (jnp.squeeze(value, dim), jnp.squeeze(at, dim))


@lowers("linalg_vector_norm")
def vector_norm(
    c: Call, x: Array, order: Any = 2, dim: Any = None, keepdim: bool = False, *, dtype: Any = None
) -> Array:
    if dim is None and not keepdim:
        x, dim = x.reshape(-1), [0]
    dims = _dims(x, dim)
    size = jnp.abs(_wide(x)) if dtype is None else jnp.abs(to_dtype(x, c.dtype))
    options: dict[str, Any] = {"axis": dims, "keepdims": keepdim}
    if order == math.inf:
        return jnp.max(size, **options)
    if order == -math.inf:
        return jnp.min(size, **options)
    if order == 0:
        return jnp.sum(size != 0, **options)
    if order == 1:
        return jnp.sum(size, **options)
    if order == 2:
        return jnp.sqrt(jnp.sum(size * size, **options))
    return jnp.sum(size**order, **options) ** (1 / order)


@lowers("histc")
def histc(c: Call, x: Array, bins: int = 100, low: Any = 0, high: Any = 0) -> Array:
    x = x.reshape(-1)
    low, high = (to_dtype(v, x.dtype) for v in (low, high))
    found = jnp.min(x) if x.size else low, jnp.max(x) if x.size else high
    low, high = jnp.where(low == high, found[0], low), jnp.where(low == high, found[1], high)
    low, high = jnp.where(low == high, low - 1, low), jnp.where(low == high, high + 1, high)
    at = ((x - low) / (high - low) * bins).astype(np.int64)
    at = jnp.where(x == high, bins - 1, at)
    inside = (x >= low) & (x <= high)
    return jnp.zeros(bins, c.dtype).at[jnp.clip(at, 0, bins - 1)].add(inside.astype(c.dtype))
