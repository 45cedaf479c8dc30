"""Metadata of a call's results from a call of the same form with operands of other sizes.

ATen's kernels for the device `meta` take 0.1 to 3 ms a call, many are Python. Each op of a batch of a new length would
pay that. Here a rule for each op says the sizes of its results. The rest is as in the first call of the form: dtypes,
the order of dims in memory, and that eager accepts the call. That first call checks the rule, too.

The form of a call is its key in the cache of `shape_inference` without the sizes of operands: these have their number
of dims, their dims of size 1, the order of their dims in memory and whether they have gaps there instead. Operands
with gaps have a form for ops whose results are packed, in an order that depends on that of the operands only.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

from ltc_core.graph.arguments import leaves, map_leaves
from ltc_core.graph.ir import TensorMeta
from ltc_core.graph.op_schema import OpSchema

__all__ = ["Known", "is_of_any_size"]

Size = tuple[int, ...]
Sizes = Size | list[Size | None]  # of one result, of several
Order = tuple[int, ...] | None  # dims from the outermost in memory inwards; None: packed

_CACHE_SIZE = 20_000
_NO_FORM = (None, ())

aten = torch.ops.aten


class _Unsure(Exception):
    """The rule does not cover this call, or eager refuses it."""


def is_of_any_size(schema: OpSchema) -> bool:
    """Whether there is a rule for the op."""
    return _is_pointwise(schema) or schema.op in _RULES


def _is_pointwise(schema: OpSchema) -> bool:
    return torch.Tag.pointwise in schema.op.tags and not schema.writes


class Known:
    """Forms of calls, and what is known of each."""

    def __init__(self) -> None:
        self._results: dict[Any, Any] = {}

    def form(
        self, schema: OpSchema, key: Sequence[Any], num_args: int
    ) -> tuple[Any, tuple[Any, ...]]:
        """The form of a call, and its arguments with sizes for tensors; the form is None if it has none.

        Args:
            key: schema, default dtype, the signatures of the arguments, and those of keyword arguments by name.
        """
        size = _SIZES.get(schema.op, -1)
        args, named = key[2 : 2 + num_args], key[2 + num_args :]
        if any(type(item) is TensorMeta for item in leaves(named)):
            return _NO_FORM
        try:
            may_have_gaps = _gives_packed(schema, named) or _is_pointwise(schema)
            parts = [_part(item, k == size, may_have_gaps) for k, item in enumerate(args)]
        except _Unsure:
            return _NO_FORM
        return (*key[:2], tuple([of for of, _ in parts]), named), tuple([s for _, s in parts])

    def find(self, schema: OpSchema, form: Any, args: tuple[Any, ...]) -> Any:
        """The results, or None if the form was not learned, or the rule is not sure."""
        known = self._results.get(form)
        if known is None:
            return None
        try:
            sizes = iter(_sizes(schema, args))
            return map_leaves(lambda leaf: leaf and leaf.of(next(sizes)), known)
        except (_Unsure, ValueError, IndexError):
            return None

    def learn(self, schema: OpSchema, form: Any, args: tuple[Any, ...], results: Any) -> None:
        """Keep what a call of this form has returned, if the rule says its sizes."""
        if len(self._results) >= _CACHE_SIZE:
            self._results.clear()
        try:
            wanted = _sizes(schema, args)
            found = [meta for meta in leaves(results) if isinstance(meta, TensorMeta)]
            if [tuple(meta.size) for meta in found] == wanted:
                self._results[form] = map_leaves(_Result.like, results)
        except (_Unsure, ValueError, IndexError):
            return


class _Result:
    """A result without its size."""

    def __init__(self, dtype: torch.dtype, order: Order) -> None:
        self._dtype = dtype
        self._order = order

    @classmethod
    def like(cls, meta: Any) -> _Result | None:
        if meta is None:
            return None
        if not isinstance(meta, TensorMeta) or meta.offset:
            raise _Unsure
        return cls(meta.dtype, _order(meta))

    def of(self, size: Size) -> TensorMeta:
        if self._order is None:
            return TensorMeta.packed(size, self._dtype)
        strides, step = [0] * len(size), 1
        for dim in reversed(self._order):
            strides[dim] = step
            step *= size[dim]
        return TensorMeta.of(size, strides, 0, self._dtype)


def _part(item: Any, is_size: bool, may_have_gaps: bool) -> tuple[Any, Any]:
    """A part of a form, and what a rule is given for it."""
    if type(item) is TensorMeta:
        if not item.numel or (item.offset and not may_have_gaps):
            raise _Unsure
        size = tuple(item.size)
        form = item.dtype, tuple([n == 1 for n in size]), _order(item, may_have_gaps), item.dense
        return form, size
    if is_size:
        return len(item), item
    if type(item) is tuple:
        parts = [_part(i, False, may_have_gaps) for i in item]
        return tuple([of for of, _ in parts]), tuple([size for _, size in parts])
    return item, item


def _order(meta: TensorMeta, may_have_gaps: bool = False) -> Order:
    if meta.contiguous:
        return None
    has_order = meta.dense
    if may_have_gaps:
        has_order = 0 not in meta.stride and len({*meta.stride}) == len(meta.stride)
    if 1 in meta.size or not has_order:
        raise _Unsure
    return tuple(sorted(range(len(meta.size)), key=lambda dim: -meta.stride[dim]))


def _gives_packed(schema: OpSchema, named: Sequence[Any]) -> bool:
    """Whether the results of an op are packed, whatever gaps the operands have."""
    if schema.op is aten.clone.default:
        return ("memory_format", torch.contiguous_format) in named
    return schema.op in _PACKED


def _sizes(schema: OpSchema, args: tuple[Any, ...]) -> list[Size]:
    """Sizes of the results that are tensors."""
    rule: Callable[..., Sizes] = _RULES.get(schema.op, _broadcast)
    found = rule(*args)
    return [size for size in found if size is not None] if isinstance(found, list) else [found]


def _require(is_so: bool) -> None:
    if not is_so:
        raise _Unsure


# -- rules: sizes of operands -> sizes of results --------------------------------------------------


def _broadcast(*args: Any) -> Size:
    sizes = [a for a in args if type(a) is tuple]
    _require(all(1 not in size for size in sizes))
    most = max(sizes, key=len)
    _require(all(size == most[len(most) - len(size) :] for size in sizes))
    return most


def _same(x: Size, *rest: Any) -> Size:
    return x


def _of_equal(x: Size, y: Size, *rest: Any) -> Size:
    _require(x == y)
    return x


def _mm(a: Size, b: Size, *rest: Any) -> Size:
    (rows, depth), (other, columns) = a, b
    _require(depth == other)
    return (rows, columns)


def _linear(x: Size, weight: Size, bias: Size | None = None) -> Size:
    columns, depth = weight
    _require(x[-1] == depth and bias in (None, (columns,)))
    return (*x[:-1], columns)


def _bmm(a: Size, b: Size, *rest: Any) -> Size:
    _require(len(a) == 3 == len(b) and a[0] == b[0])
    return (a[0], *_mm(a[1:], b[1:]))


def _added(product: Callable[..., Size]) -> Callable[..., Size]:
    def rule(c: Size, a: Size, b: Size, *rest: Any) -> Size:
        size = product(a, b)
        _require(c == size[len(size) - len(c) :])
        return size

    return rule


def _reduce(x: Size, dims: Any = None, keeps: Any = False, *rest: Any) -> Size:
    dims = (dims,) if type(dims) is int else dims
    gone = {range(len(x))[dim] for dim in dims or range(-len(x), 0)}
    return tuple(1 if dim in gone else n for dim, n in enumerate(x) if keeps or dim not in gone)


def _layer_norm(x: Size, shape: Size, weight: Any, bias: Any, *rest: Any) -> Sizes:
    lead = x[: len(x) - len(shape)]
    _require(x == (*lead, *shape) and all(p is None or p == shape for p in (weight, bias)))
    saved = (*lead, *[1] * len(shape))
    return [x, saved, saved]


def _layer_norm_backward(
    grad: Size, x: Size, shape: Size, mean: Size, rstd: Size, weight: Any, bias: Any, mask: Any
) -> Sizes:
    _, saved, _ = _layer_norm(x, shape, weight, bias)
    _require(grad == x and mean == saved == rstd)
    return [of if wanted else None for of, wanted in zip((x, weight, bias), mask, strict=True)]


def _nll_loss(x: Size, target: Size, weight: Any, reduction: int, *rest: Any) -> Sizes:
    _require(len(x) == 2 and target == x[:1] and weight in (None, x[1:]))
    return [() if reduction else target, ()]


def _nll_loss_backward(
    grad: Size, x: Size, target: Size, weight: Any, reduction: int, *rest: Any
) -> Size:
    _require(grad == _nll_loss(x, target, weight, reduction)[0])
    return x


def _embedding(weight: Size, indices: Size, *rest: Any) -> Size:
    _, width = weight
    return (*indices, width)


def _embedding_backward(grad: Size, indices: Size, rows: int, *rest: Any) -> Size:
    _require(grad[:-1] == indices)
    return (rows, grad[-1])


def _stack(tensors: Sequence[Size], dim: int = 0) -> Size:
    first = tensors[0]
    _require(all(size == first for size in tensors))
    place = range(len(first) + 1)[dim]
    return (*first[:place], len(tensors), *first[place:])


def _cat(tensors: Sequence[Size], dim: int = 0) -> Size:
    first = tensors[0]
    place = range(len(first))[dim]
    rest = [(*size[:place], *size[place + 1 :]) for size in tensors]
    _require(all(size == rest[0] for size in rest) and all(len(s) == len(first) for s in tensors))
    return (*first[:place], sum(size[place] for size in tensors), *first[place + 1 :])


def _view(x: Size, size: Sequence[int]) -> Size:
    known = math.prod(n for n in size if n != -1)
    _require(size.count(-1) <= 1 and known > 0 and math.prod(x) % known == 0)
    found = tuple(math.prod(x) // known if n == -1 else n for n in size)
    _require(math.prod(found) == math.prod(x))
    return found


def _attention(q: Size, k: Size, v: Size, *rest: Any) -> Sizes:
    _require(len(q) == len(k) == len(v) == 4 and q[0] == k[0] and k[:3] == v[:3])
    _require(q[3] == k[3] == v[3] and k[1] > 0 and q[1] % k[1] == 0)
    return [q, q[:3]]


def _attention_backward(
    grad: Size, q: Size, k: Size, v: Size, out: Size, logsumexp: Size, *rest: Any
) -> Sizes:
    _require(grad == out and [out, logsumexp] == _attention(q, k, v))
    return [q, k, v]


def _index(x: Size, indices: Sequence[Size | None]) -> Size:
    places = [k for k, item in enumerate(indices) if item is not None]
    _require(bool(places) and places[-1] - places[0] == len(places) - 1)
    size = indices[places[0]]
    _require(size is not None and all(indices[k] == size for k in places))
    return (*x[: places[0]], *(size or ()), *x[places[-1] + 1 :])


def _filled(size: Size, *rest: Any) -> Size:
    _require(all(n >= 0 for n in size))
    return size


def _arange(end: Any) -> Size:
    kind, n = end
    _require(kind is int and n > 0)
    return (n,)


def _index_select(x: Size, dim: int, index: Size) -> Size:
    _require(len(x) > 0 and len(index) == 1)
    size = list(x)
    size[dim] = index[0]
    return tuple(size)


# Ops whose results are packed, in an order that depends on the order of the operands' dims at most.
_PACKED = {
    aten.mm.default,
    aten.bmm.default,
    aten.addmm.default,
    aten.linear.default,
    aten.embedding.default,
    aten.embedding_dense_backward.default,
    aten.index_select.default,
    aten.index.Tensor,
    aten._scaled_dot_product_flash_attention_for_cpu.default,
    aten._scaled_dot_product_flash_attention_for_cpu_backward.default,
}

# Ops, and the position of an argument that is a size.
_SIZES = {
    aten.view.default: 1,
    aten._unsafe_view.default: 1,
    aten.zeros.default: 0,
    aten.ones.default: 0,
    aten.full.default: 0,
    aten.arange.default: 0,
}

# An op that is not here and has the tag `pointwise` has `_broadcast`.
_RULES: dict[Any, Callable[..., Sizes]] = {
    aten.mm.default: _mm,
    aten.bmm.default: _bmm,
    aten.addmm.default: _added(_mm),
    aten.linear.default: _linear,
    aten.baddbmm.default: _added(_bmm),
    aten.sum.dim_IntList: _reduce,
    aten.mean.dim: _reduce,
    aten.prod.dim_int: _reduce,
    aten.amax.default: _reduce,
    aten.amin.default: _reduce,
    aten._softmax.default: _same,
    aten._log_softmax.default: _same,
    aten._softmax_backward_data.default: _of_equal,
    aten._log_softmax_backward_data.default: _of_equal,
    aten.cumsum.default: _same,
    aten.tril.default: _same,
    aten.triu.default: _same,
    aten.clone.default: _same,
    aten.zeros_like.default: _same,
    aten.ones_like.default: _same,
    aten.empty_like.default: _same,
    aten.native_layer_norm.default: _layer_norm,
    aten.native_layer_norm_backward.default: _layer_norm_backward,
    aten.nll_loss_forward.default: _nll_loss,
    aten.nll_loss_backward.default: _nll_loss_backward,
    aten.embedding.default: _embedding,
    aten.embedding_dense_backward.default: _embedding_backward,
    aten._scaled_dot_product_flash_attention_for_cpu.default: _attention,
    aten._scaled_dot_product_flash_attention_for_cpu_backward.default: _attention_backward,
    aten.stack.default: _stack,
    aten.cat.default: _cat,
    aten.index.Tensor: _index,
    aten.index_select.default: _index_select,
    aten.index_copy.default: _same,
    aten.zeros.default: _filled,
    aten.ones.default: _filled,
    aten.full.default: _filled,
    aten.arange.default: _arange,
    aten.view.default: _view,
    aten._unsafe_view.default: _view,
}
