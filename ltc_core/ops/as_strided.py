"""`as_strided` as Python calls it: with the strides and the offset that a lazy tensor says.

`LazyTensor.stride()` returns contiguous strides. ATen, autograd and `torch.ops.aten` see the strides of eager, and
`as_strided` there addresses the memory of the base (`ops.special`). So the two kinds of call differ in who makes them,
not in a dispatch key: ATen's formulas and composites come through autograd's key, too. The rules here are the methods
of `LazyTensor` and replace the functions of `torch`, which only Python calls. A tensor whose elements lie in packed
order in memory needs no rule. For another one, element `storage_offset() + k` is the k-th of its own elements in the
order of `flatten()`, and the view asked for is made of view ops, which autograd and both recorders know.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.jit import _builtins

from ltc_core import errors, source
from ltc_core.graph.ir import TensorMeta, contiguous_stride
from ltc_core.tensor.lazy_tensor import LazyTensor, set_handle

__all__ = ["register_as_strided"]

Tensor = torch.Tensor
Rule = Callable[..., Any]

_as_strided = torch.Tensor.as_strided
_as_strided_in_place = torch.Tensor.as_strided_
_as_strided_scatter = torch.Tensor.as_strided_scatter
_as_strided_copy = torch.as_strided_copy
_set: Callable[..., Tensor] = torch.Tensor.set_


def as_strided(
    input: LazyTensor, size: Sequence[int], stride: Sequence[int], storage_offset: int | None = None
) -> Tensor:
    """A view of elements of `input`, addressed by the strides and the offset that `input` says."""
    if input._h.meta.contiguous or not _has_elements(size, stride):
        return _as_strided(input, size, stride, storage_offset)
    start = _own_start(input, size, stride, storage_offset, "as_strided")
    if _is_whole(input, size, stride, start):
        return input.view_as(input)
    return _window(input.view(-1), size, stride, start)


def as_strided_in_place(
    input: LazyTensor, size: Sequence[int], stride: Sequence[int], storage_offset: int | None = None
) -> Tensor:
    """Turn `input` into such a view of itself.

    Raises:
        UnsupportedOpError: its elements are not in packed order in memory, and it needs gradients.
    """
    if input._h.meta.contiguous or not _has_elements(size, stride):
        return _as_strided_in_place(input, size, stride, storage_offset)
    start = _own_start(input, size, stride, storage_offset, "as_strided_")
    if _is_whole(input, size, stride, start):
        return input
    if input.requires_grad and torch.is_grad_enabled():
        raise errors.UnsupportedOpError(
            "as_strided_ of a view that is not contiguous in memory has no derivative",
            got=f"{_describe(input)}; {_geometry(size, stride, storage_offset)}",
            where=source.user_line(),
            next="x = x.as_strided(...) in its place",
        )
    with torch.no_grad():
        view: Any = _window(input.view(-1), size, stride, start)
        set_handle(input, view._h)
    return input


def as_strided_copy(
    input: LazyTensor,
    size: Sequence[int],
    stride: Sequence[int],
    storage_offset: int | None = None,
    *,
    out: Tensor | None = None,
) -> Tensor:
    """A copy of what `as_strided` returns."""
    named: Any = {} if out is None else {"out": out}
    if input._h.meta.contiguous or not _has_elements(size, stride):
        return _as_strided_copy(input, size, stride, storage_offset, **named)
    start = _own_start(input, size, stride, storage_offset, "as_strided_copy")
    return _as_strided_copy(_packed(input), size, stride, start, **named)


def as_strided_scatter(
    input: LazyTensor,
    src: Tensor,
    size: Sequence[int],
    stride: Sequence[int],
    storage_offset: int | None = None,
) -> Tensor:
    """A copy of `input` with `src` in the elements that `as_strided` returns."""
    if input._h.meta.contiguous or not _has_elements(size, stride):
        return _as_strided_scatter(input, src, size, stride, storage_offset)
    start = _own_start(input, size, stride, storage_offset, "as_strided_scatter")
    return _as_strided_scatter(_packed(input), src, size, stride, start)


def set_(self: LazyTensor, source: Any = None, *geometry: Any, **named: Any) -> Tensor:
    """Give `self` the memory of `source`; the geometry uses the strides that `source.stride()` returns.

    The offset counts from the first element of `source`, as in eager.
    """
    given = dict(zip(("storage_offset", "size", "stride"), geometry, strict=False)) | named
    is_strided = type(source) is LazyTensor and given.get("size") is not None
    if not is_strided or source._h.meta.contiguous:
        rest = () if source is None else (source, *geometry)
        return _set(self, *rest, **named)
    size = given["size"]
    stride = given.get("stride") or contiguous_stride(size)
    offset = source.storage_offset() + given["storage_offset"]
    return _set(self, as_strided(source, size, stride, offset))


def _packed(t: LazyTensor) -> Tensor:
    return t.clone(memory_format=torch.contiguous_format)


def _has_elements(size: Sequence[int], stride: Sequence[int]) -> bool:
    """Whether a geometry names elements; ATen answers, or raises, for those that do not."""
    return len(size) == len(stride) and all(n > 0 for n in size) and all(s >= 0 for s in stride)


def _own_start(
    t: LazyTensor, size: Sequence[int], stride: Sequence[int], offset: int | None, name: str
) -> int:
    """Number, among the elements of `t`, of the first one that a geometry names."""
    meta: TensorMeta = t._h.meta
    start = 0 if offset is None else offset - meta.offset
    if 0 <= start <= meta.numel - _span(size, stride):
        return start
    raise errors.UnsupportedOpError(
        f"{name} leaves the elements of a view that is not contiguous in memory",
        got=f"{_describe(t)}, whose elements are {meta.offset} to {meta.offset + meta.numel - 1}; "
        f"{_geometry(size, stride, offset)}",
        where=source.user_line(),
        next="call it on the tensor that this is a view of, or use the strides that stride() returns",
    )


def _span(size: Sequence[int], stride: Sequence[int]) -> int:
    return 1 + sum((n - 1) * s for n, s in zip(size, stride, strict=True))


def _describe(t: LazyTensor) -> str:
    return str(t._h.meta)


def _geometry(size: Sequence[int], stride: Sequence[int], offset: int | None) -> str:
    return f"size {list(size)}, stride {list(stride)}, storage_offset {offset}"


def _is_whole(t: LazyTensor, size: Sequence[int], stride: Sequence[int], start: int) -> bool:
    rows = zip(size, stride, contiguous_stride(size), strict=True)
    return tuple(size) == t.shape and not start and all(n == 1 or a == b for n, a, b in rows)


def _window(flat: Tensor, size: Sequence[int], stride: Sequence[int], start: int) -> Tensor:
    """View elements of a 1-dim tensor: a slice, then for each stride windows of what is left."""
    dims = [d for d, n in enumerate(size) if n != 1]
    order = sorted(
        dims, key=lambda d: -stride[d]
    )  # largest first: the windows then hold few elements besides
    length = _span(size, stride)
    part = flat if length == flat.numel() else flat.narrow(0, start, length)
    for at, d in enumerate(order):
        sizes = [size[d] for d in order[at:]]
        if tuple(stride[d] for d in order[at:]) == contiguous_stride(sizes):
            part = part.unflatten(-1, sizes)  # type: ignore[no-untyped-call]
            break
        length -= (size[d] - 1) * stride[d]
        if stride[d]:
            part = part.unfold(-1, length, stride[d])
        else:
            part = part.unsqueeze(-2).expand(*part.shape[:-1], size[d], length)
    else:
        part = part.select(-1, 0)
    if order != dims:
        part = part.permute([order.index(d) for d in dims])
    for d, n in enumerate(size):
        if n == 1:
            part = part.unsqueeze(d)
    return part


# Name -> rule. `torch.Tensor` has no `as_strided_copy`, `torch` no `set_`.
_METHODS: dict[str, Rule] = {
    "as_strided": as_strided,
    "as_strided_": as_strided_in_place,
    "as_strided_scatter": as_strided_scatter,
    "set_": set_,
}
_FUNCTIONS: dict[str, Rule] = {
    "as_strided": as_strided,
    "as_strided_": as_strided_in_place,
    "as_strided_copy": as_strided_copy,
    "as_strided_scatter": as_strided_scatter,
}


def _function(original: Callable[..., Any], rule: Rule) -> Callable[..., Any]:
    """A function of `torch` that calls `rule` for lazy tensors, and `original` for all others."""

    @functools.wraps(original)
    def call(*args: Any, **kwargs: Any) -> Any:
        first = args[0] if args else kwargs.get("input")
        return (rule if type(first) is LazyTensor else original)(*args, **kwargs)

    call.__module__, call.__qualname__ = "torch", original.__name__  # for pickle
    return call


def register_as_strided() -> None:
    """Make the rules methods of `LazyTensor` and functions of `torch`.

    A `__torch_function__` would serve the functions, too, but each call of each function would go through it.
    """
    for name, rule in _METHODS.items():
        setattr(LazyTensor, name, rule)
    for name, rule in _FUNCTIONS.items():
        function = _function(getattr(torch, name), rule)
        setattr(torch, name, function)
        _builtins._register_builtin(
            function, f"aten::{name}"
        )  # torch.jit.script looks it up by identity
