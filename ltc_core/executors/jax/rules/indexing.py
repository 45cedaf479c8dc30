"""Ops that read or write at indices. An index that is out of range is moved into it: `launch` checks them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from jax import lax
from jax import numpy as jnp

from ltc_core.executors.jax.table import Array, Call, lowers, to_dtype

__all__: list[str] = []

# Up to this many rows, the gradient of a table is one product of matrices: XLA adds to rows one by one on a CPU.
_MAX_ONE_HOT_ROWS = 1024


@lowers("embedding")
def embedding(c: Call, table: Array, index: Array, *rest: Any) -> Array:
    return jnp.take(table, index, axis=0, mode="clip")


@lowers("embedding_dense_backward")
def embedding_dense_backward(
    c: Call, grad: Array, index: Array, count: int, padding: int, scale_by_count: bool
) -> Array:
    width = grad.shape[-1]
    rows, index = grad.reshape(-1, width), index.reshape(-1)
    if scale_by_count:
        counts = jnp.zeros(count, rows.dtype).at[index].add(1)
        rows = rows / counts[index][:, None]
    if padding >= 0:
        rows = jnp.where((index == padding)[:, None], 0, rows)
    if count <= _MAX_ONE_HOT_ROWS and rows.dtype == np.float32:
        chosen = (jnp.arange(count)[:, None] == index).astype(rows.dtype)
        return lax.dot(chosen, rows, precision=lax.Precision.HIGHEST)
    return jnp.zeros((count, width), c.dtype).at[index].add(rows.astype(c.dtype))


@lowers("index_select")
def index_select(c: Call, x: Array, dim: int, index: Array) -> Array:
    if x.ndim == 0:
        return jnp.broadcast_to(x, c.shape)
    return jnp.take(x, index.reshape(-1), axis=dim, mode="clip")


@lowers("gather")
def gather(c: Call, x: Array, dim: int, index: Array, sparse_grad: bool = False) -> Array:
    if x.ndim == 0:
        return jnp.broadcast_to(x, c.shape)
    places = _grid(index, dim, x.ndim)
    return x[places] if index.size else jnp.zeros(c.shape, c.dtype)


def _grid(index: Array, dim: int, ndim: int) -> tuple[Array, ...]:
    """Indices of all dims: `index` for `dim`, and the element's own place for the others."""
    index = index.reshape(index.shape or (1,))
    own = [lax.broadcasted_iota(np.int64, index.shape, d) for d in range(ndim)]
    own[dim % ndim] = index.astype(np.int64)
    return tuple(own)


def _part(source: Any, index: Array, dtype: Any) -> Array:
    """The elements of `source` at the places of `index`; a number stays one."""
    shape = index.shape or (1,)
    source = to_dtype(source, dtype)
    if source.ndim == 0:
        return jnp.broadcast_to(source, shape)
    return source[tuple(slice(n) for n in shape)]


@lowers("scatter.src", "scatter.value")
def scatter(c: Call, x: Array, dim: int, index: Array, source: Any) -> Array:
    return _scattered(x, dim, index, source, "set")


@lowers("scatter_add")
def scatter_add(c: Call, x: Array, dim: int, index: Array, source: Array) -> Array:
    return _scattered(x, dim, index, source, "add")


def _scattered(x: Array, dim: int, index: Array, source: Any, how: str) -> Array:
    if not index.size:
        return x
    flat = x.reshape(x.shape or (1,))
    at = flat.at[_grid(index, dim, flat.ndim)]
    return getattr(at, how)(_part(source, index, x.dtype)).reshape(x.shape)


_REDUCTIONS = {"sum": "add", "prod": "multiply", "amax": "max", "amin": "min", "mean": "add"}


@lowers("scatter_reduce.two")
def scatter_reduce(
    c: Call,
    x: Array,
    dim: int,
    index: Array,
    source: Array,
    reduce: str,
    *,
    include_self: bool = True,
) -> Array:
    start = x if include_self else _scattered(x, dim, index, _neutral(reduce, x.dtype), "set")
    result = _scattered(start, dim, index, source, _REDUCTIONS[reduce])
    if reduce != "mean":
        return result
    counts = _scattered(jnp.zeros(x.shape, np.int64), dim, index, 1, "add") + include_self
    counts = jnp.maximum(counts, 1).astype(x.dtype)
    return result / counts if jnp.issubdtype(x.dtype, jnp.inexact) else result // counts


def _neutral(reduce: str, dtype: Any) -> Any:
    """The number that does not change a reduction."""
    if reduce in ("sum", "mean", "prod"):
        return 1 if reduce == "prod" else 0
    if dtype == np.bool_:
        return reduce == "amin"
    if jnp.issubdtype(dtype, jnp.inexact):
        return np.inf if reduce == "amin" else -np.inf
    limits = jnp.iinfo(dtype)
    return limits.max if reduce == "amin" else limits.min


@lowers("index.Tensor", "_unsafe_index.Tensor")
def index(c: Call, x: Array, indices: Sequence[Array | None]) -> Array:
    if any(i is not None and i.dtype in (np.bool_, np.uint8) for i in indices):
        raise NotImplementedError("the size of what a mask selects is data")
    if 0 in c.shape:
        return jnp.zeros(c.shape, c.dtype)
    return x[_places(indices)]


def _places(indices: Sequence[Array | None]) -> tuple[Any, ...]:
    return tuple(slice(None) if i is None else i for i in indices)


@lowers("index_put", "_unsafe_index_put")
def index_put(
    c: Call, x: Array, indices: Sequence[Array | None], values: Array, accumulate: bool = False
) -> Array:
    values = to_dtype(values, x.dtype)
    masks = [i for i in indices if i is not None and i.dtype in (np.bool_, np.uint8)]
    if masks:
        if len(masks) > 1 or indices[0] is None or values.size != 1:
            raise NotImplementedError("the size of what a mask selects is data")
        mask = masks[0] != 0
        mask = mask.reshape(*mask.shape, *[1] * (x.ndim - mask.ndim))
        new = x + values.reshape(()) if accumulate else values.reshape(())
        return jnp.where(mask, new, x)
    at = x.at[_places(indices)]
    return at.add(values) if accumulate else at.set(values)


@lowers("put")
def put(c: Call, x: Array, index: Array, source: Array, accumulate: bool = False) -> Array:
    at = x.reshape(-1).at[index.reshape(-1)]
    values = to_dtype(source, x.dtype).reshape(-1)
    return (at.add(values) if accumulate else at.set(values)).reshape(x.shape)


@lowers("masked_scatter")
def masked_scatter(c: Call, x: Array, mask: Array, source: Array) -> Array:
    x, mask = jnp.broadcast_arrays(x, mask)
    order = jnp.cumsum(mask.reshape(-1)) - 1
    found = jnp.take(source.reshape(-1), order, mode="clip").reshape(x.shape)
    return jnp.where(mask, to_dtype(found, x.dtype), x)


@lowers("take")
def take(c: Call, x: Array, index: Array) -> Array:
    return x.reshape(-1)[index]


@lowers("bucketize.Tensor")
def bucketize(
    c: Call, x: Array, edges: Array, *, out_int32: bool = False, right: bool = False
) -> Array:
    return jnp.searchsorted(edges, x, side="right" if right else "left")


@lowers("searchsorted.Tensor")
def searchsorted(
    c: Call, edges: Array, x: Array, *, out_int32: bool = False, right: bool = False, side: str | None = None,
    sorter: Any = None,
) -> Array:  # fmt: skip
    if edges.ndim != 1 or sorter is not None:
        raise NotImplementedError("searchsorted in rows, or with a sorter")
    return jnp.searchsorted(edges, x, side=side or ("right" if right else "left"))


# -- bags of embeddings --------------------------------------------------------------------------

_SUM, _MEAN = 0, 1


def _bags(index: Array, offsets: Array) -> Array:
    """The bag of each index, from the offset at which each bag begins."""
    return (
        jnp.searchsorted(offsets, jnp.arange(index.shape[0], dtype=offsets.dtype), side="right") - 1
    )


@lowers("_embedding_bag", "_embedding_bag_forward_only")
def embedding_bag(
    c: Call, table: Array, index: Array, offsets: Array, scale_by_count: bool = False, mode: int = _SUM,
    sparse: bool = False, weights: Array | None = None, include_last: bool = False, padding: int = -1,
) -> tuple[Array, ...]:  # fmt: skip
    if mode not in (_SUM, _MEAN) or padding >= 0:
        raise NotImplementedError("embedding_bag of the largest value, or with padding")
    out, bag_of, sizes, _ = c.result
    bags = out.shape[0]
    of = _bags(index, offsets[:bags])
    rows = jnp.take(table, index, axis=0, mode="clip")
    if weights is not None:
        rows = rows * weights[:, None]
    sums = jnp.zeros((bags, table.shape[1]), table.dtype).at[of].add(rows)
    counts = jnp.zeros(bags, np.int64).at[of].add(1)
    if mode == _MEAN:
        sums = sums / jnp.maximum(counts, 1)[:, None].astype(sums.dtype)
    results = (sums, of, counts, jnp.zeros(c.result[3].shape, np.int64))
    return tuple(
        r if r.shape == tuple(wanted.shape) else jnp.zeros(tuple(wanted.shape), r.dtype)
        for r, wanted in zip(results, c.result, strict=True)
    )


@lowers("_embedding_bag_backward")
def embedding_bag_backward(
    c: Call, grad: Array, index: Array, offsets: Array, bag_of: Array, sizes: Array, maxima: Array, count: int,
    scale_by_count: bool, mode: int, sparse: bool, weights: Array | None, padding: int = -1,
) -> Array:  # fmt: skip
    if mode not in (_SUM, _MEAN) or padding >= 0 or scale_by_count:
        raise NotImplementedError("the gradient of this kind of embedding_bag")
    of = _bags(index, offsets[: grad.shape[0]])
    rows = grad[of]
    if weights is not None:
        rows = rows * weights[:, None]
    if mode == _MEAN:
        counts = jnp.zeros(grad.shape[0], rows.dtype).at[of].add(1)
        rows = rows / counts[of][:, None]
    return embedding_dense_backward(c, rows, index, count, -1, False)
