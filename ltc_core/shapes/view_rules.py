"""Metadata of views of any strides, in Python: a kernel for the device `meta` takes 0.1 ms.

A rule computes what ATen's view op does to size, stride and offset. It returns None where the call is wrong or it is
not sure; ATen then answers. `shape_inference.infer` asks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from ltc_core.graph.ir import TensorMeta

__all__ = ["view_of"]

aten = torch.ops.aten

Found = TensorMeta | list[TensorMeta] | None


def view_of(op: torch._ops.OpOverload, args: Sequence[Any], kwargs: dict[str, Any]) -> Found:
    """The results of a view op on a meta; None if no rule says what they are."""
    rule = _RULES.get(op)
    if rule is None or kwargs or type(args[0]) is not TensorMeta:
        return None
    try:
        return rule(*args)
    except (IndexError, TypeError, ValueError):  # ATen says what is wrong with the call
        return None


def _like(
    meta: TensorMeta, size: Sequence[int], stride: Sequence[int], more: int = 0
) -> TensorMeta:
    return TensorMeta.of(size, stride, meta.offset + more, meta.dtype)


def _slice(
    x: TensorMeta, dim: int = 0, start: int | None = None, end: int | None = None, step: int = 1
) -> Found:
    dim = range(len(x.size))[dim]
    if step <= 0:
        return None
    first, last, _ = slice(start, end).indices(x.size[dim])
    size, stride = list(x.size), list(x.stride)
    size[dim] = max(-(-(last - first) // step), 0)
    stride[dim] *= step
    return _like(x, size, stride, min(first, x.size[dim]) * x.stride[dim])


def _select(x: TensorMeta, dim: int, index: int) -> Found:
    dim = range(len(x.size))[dim]
    index = range(x.size[dim])[index]
    return _like(x, _without(x.size, dim), _without(x.stride, dim), index * x.stride[dim])


def _unbind(x: TensorMeta, dim: int = 0) -> Found:
    dim = range(len(x.size))[dim]
    size, stride, step = _without(x.size, dim), _without(x.stride, dim), x.stride[dim]
    return [_like(x, size, stride, k * step) for k in range(x.size[dim])]


def _without(items: Sequence[int], dim: int) -> list[int]:
    return [*items[:dim], *items[dim + 1 :]]


def _permute(x: TensorMeta, dims: Sequence[int]) -> Found:
    places = [range(len(x.size))[dim] for dim in dims]
    if sorted(places) != list(range(len(x.size))):
        return None
    return _like(x, [x.size[place] for place in places], [x.stride[place] for place in places])


def _transpose(x: TensorMeta, a: int, b: int) -> Found:
    places = list(range(len(x.size)))
    a, b = places[a], places[b]
    places[a], places[b] = b, a
    return _permute(x, places)


def _t(x: TensorMeta) -> Found:
    return _permute(x, range(len(x.size))[::-1]) if len(x.size) <= 2 else None


def _unsqueeze(x: TensorMeta, dim: int) -> Found:
    dim = range(len(x.size) + 1)[dim]
    step = x.size[dim] * x.stride[dim] if dim < len(x.size) else 1
    return _like(x, [*x.size[:dim], 1, *x.size[dim:]], [*x.stride[:dim], step, *x.stride[dim:]])


def _expand(x: TensorMeta, size: Sequence[int], implicit: bool = False) -> Found:
    new = len(size) - len(x.size)
    if new < 0:
        return None
    sizes, strides = list(size), [0] * len(size)
    for dim in reversed(range(len(size))):
        if dim >= new:
            had, stride = x.size[dim - new], x.stride[dim - new]
        else:
            had = 1
            stride = sizes[dim + 1] * strides[dim + 1] if dim + 1 < len(size) else 1
        if sizes[dim] == -1 and dim >= new:
            sizes[dim] = had
        if sizes[dim] < 0 or (had != 1 and had != sizes[dim]):
            return None
        strides[dim] = stride if had == sizes[dim] and x.size else 0
    return _like(x, sizes, strides)


_RULES: dict[Any, Callable[..., Found]] = {
    aten.slice.Tensor: _slice,
    aten.select.int: _select,
    aten.unbind.int: _unbind,
    aten.permute.default: _permute,
    aten.transpose.int: _transpose,
    aten.t.default: _t,
    aten.unsqueeze.default: _unsqueeze,
    aten.expand.default: _expand,
}
