"""Strides of an op's results, as the CPU kernel returns them.

Some of ATen's kernels for the device `meta` are written in Python and return other strides than the CPU kernels if
operands are not packed. `with_kernel_strides` calls the CPU kernel on small stand-ins of the operands and copies the
order of dims in memory from its results. For a convolution, ATen says which memory format its backend computes in.
Called by `shape_inference.infer` for calls that are not in its cache.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from ltc_core.graph.arguments import leaves, map_leaves
from ltc_core.graph.ir import TensorMeta
from ltc_core.graph.op_schema import Arg, OpSchema

__all__ = ["with_kernel_strides"]

aten = torch.ops.aten

# The most elements of stand-ins that must be as large as the operands.
_MOST_ELEMENTS = 1 << 16

# Ops whose results are not packed even if the operands are.
_TURN_PACKED = ("_fft_", "_linalg_svd", "linalg_eig")

# Ops that may be called on stand-ins of integers: their kernels compute with integers, or check them as indices. Other
# kernels may use integers as unchecked addresses.
_CHECKED_INTEGERS = ("floor_divide", "max_unpool")


def with_kernel_strides(schema: OpSchema, args: Any, kwargs: dict[str, Any], result: Any) -> Any:
    """`result`, the metas from ATen's meta kernel, with the strides of the CPU kernel's results.

    Cost: nothing for most ops if all operands are packed, else a call on some dozen elements (at most 65,536).
    """
    if schema.view or all(name is not None for name in schema.returns):
        return result
    format_of = _CONVOLUTIONS.get(schema.op)
    if format_of is not None:
        memory_format = format_of(*args)
        return _zipped(result, lambda _: memory_format, _in_format)
    operands = [a._h.meta for a in _tensors((*args, *kwargs.values())) if hasattr(a, "_h")]
    if not _may_differ(schema, operands):
        return result
    stand_ins = _stand_ins(schema, args, kwargs, operands, result)
    if stand_ins is None:
        return result
    given = _called(schema, args, kwargs, stand_ins)
    return result if given is None else _zipped(result, lambda path: _at(given, path), _in_order)


def _tensors(items: Sequence[Any]) -> Iterator[torch.Tensor]:
    return (item for item in leaves(*items) if isinstance(item, torch.Tensor))


# -- stand-ins -------------------------------------------------------------------------------------


def _may_differ(schema: OpSchema, operands: Sequence[TensorMeta]) -> bool:
    if schema.name.startswith("_foreach_"):
        return False
    is_checked = schema.op is aten.index.Tensor or schema.name.startswith(_CHECKED_INTEGERS)
    if torch.Tag.pointwise not in schema.op.tags and not is_checked:
        if any(_is_integer(meta.dtype) for meta in operands):
            return False
    return schema.name.startswith(_TURN_PACKED) or not all(meta.contiguous for meta in operands)


def _is_integer(dtype: torch.dtype) -> bool:
    return not (dtype.is_floating_point or dtype.is_complex or dtype is torch.bool)


def _stand_ins(
    schema: OpSchema, args: Any, kwargs: dict[str, Any], operands: Sequence[TensorMeta], result: Any
) -> Callable[[TensorMeta], torch.Tensor] | None:
    """Function that makes an operand's stand-in, small if the sizes do not matter; None if stand-ins are too large."""
    if _is_of_any_size(schema, operands, result) and not _has_sizes(schema, args, kwargs):
        sizes = sorted({n for meta in operands for n in meta.size if n > 1})
        small = {0: 0, 1: 1, **{n: k for k, n in enumerate(sizes, 2)}}
        return lambda meta: _filled(
            [small[n] for n in meta.size], _compact(meta, small), meta.dtype
        )
    if sum(meta.numel for meta in operands) > _MOST_ELEMENTS:
        return None
    return lambda meta: _filled(meta.size, meta.stride, meta.dtype)


def _is_of_any_size(schema: OpSchema, operands: Sequence[TensorMeta], result: Any) -> bool:
    """Whether the kernel works for smaller sizes that are equal where these are.

    Not tried for other ops: some kernels do not check the sizes that they rely on.
    """
    if torch.Tag.pointwise in schema.op.tags or "batch_norm" in schema.name:
        return True
    try:
        size = torch.broadcast_shapes(*[meta.size for meta in operands])  # type: ignore[no-untyped-call]
    except RuntimeError:
        return False
    return all(meta.size == size for meta in _metas(result))


def _metas(result: Any) -> Iterator[TensorMeta]:
    return (item for item in leaves(result) if isinstance(item, TensorMeta))


def _has_sizes(schema: OpSchema, args: Any, kwargs: dict[str, Any]) -> bool:
    """Whether some structural argument is an integer, dims excepted."""
    given = [
        a
        for name, a in (*zip(schema.names, args, strict=False), *kwargs.items())
        if schema.named[name] == Arg.STATIC and not name.startswith("dim")
    ]
    return any(type(item) is int for item in leaves(given))


def _compact(meta: TensorMeta, small: dict[int, int]) -> list[int]:
    """Strides for the sizes in `small`, in the order of those of `meta`: equal ones stay equal, 0 stays 0."""
    found = {0: 0}
    step = 1
    for stride in sorted(set(meta.stride) - {0}):
        found[stride] = step
        for n, of_dim in zip(meta.size, meta.stride, strict=True):
            step *= max(small[n], 1) if of_dim == stride else 1
    return [found[stride] for stride in meta.stride]


def _filled(size: Sequence[int], stride: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """A stand-in of ones; integers are 0, because they may be indices."""
    return torch.empty_strided(size, stride, dtype=dtype).fill_(0 if _is_integer(dtype) else 1)


def _called(
    schema: OpSchema,
    args: Any,
    kwargs: dict[str, Any],
    stand_in: Callable[[TensorMeta], torch.Tensor],
) -> Any:
    """Results of the CPU kernel for stand-ins; None if it refuses them, as kernels that check sizes may."""

    def made(item: Any) -> Any:
        return stand_in(item._h.meta) if hasattr(item, "_h") else item

    named = {k: map_leaves(made, v) for k, v in kwargs.items() if k not in ("generator", "device")}
    if schema.draws:
        named["generator"] = torch.Generator()  # the process's own generator must not advance
    try:
        return schema.op(*map_leaves(made, list(args)), **named)
    except Exception:
        return None  # the call itself is not refused: its meta kernel accepted it


# -- results ---------------------------------------------------------------------------------------


def _zipped(
    result: Any,
    given: Callable[[tuple[int, ...]], Any],
    change: Callable[[TensorMeta, Any], TensorMeta],
    path: tuple[int, ...] = (),
) -> Any:
    """`result` with each meta replaced by `change(meta, given(path))`; `path` is its position in nested lists."""
    if isinstance(result, TensorMeta):
        return change(result, given(path))
    if isinstance(result, list | tuple):
        return type(result)(_zipped(r, given, change, (*path, k)) for k, r in enumerate(result))
    return result


def _at(given: Any, path: tuple[int, ...]) -> Any:
    for k in path:
        given = given[k]
    return given


def _in_order(meta: TensorMeta, t: torch.Tensor | None) -> TensorMeta:
    """`meta` with packed strides whose dims have the same order in memory as those of `t`."""
    if t is None:  # oneDNN's layer keeps nothing for backward while grad mode is off
        return meta
    given = t.stride()
    if t.dim() != len(meta.size) or not TensorMeta.like(t).dense or not meta.numel:
        return meta
    if any((a == 1) != (b == 1) for a, b in zip(t.shape, meta.size, strict=True)):
        return meta
    stride, step = [0] * t.dim(), 1
    for dim in sorted(range(t.dim()), key=lambda dim: (given[dim], -dim)):
        stride[dim] = step
        step *= meta.size[dim]
    return meta.with_strides(stride)


# -- convolutions ----------------------------------------------------------------------------------


def _format_of_forward(x: Any, weight: Any, bias: Any, *rest: Any) -> torch.memory_format:
    return _format(x, weight, bias, None, *rest)


def _format_of_backward(
    grad: Any, x: Any, weight: Any, bias_sizes: Any, *rest: Any
) -> torch.memory_format:
    return _format(x, weight, None, bias_sizes, *rest[:-1])


_CONVOLUTIONS: dict[torch._ops.OpOverload, Callable[..., torch.memory_format]] = {
    aten.convolution.default: _format_of_forward,
    aten.convolution_backward.default: _format_of_backward,
}


def _format(
    x: Any, weight: Any, bias: Any, bias_sizes: Any,
    stride: Any, padding: Any, dilation: Any, transposed: bool, output_padding: Any, groups: int,
) -> torch.memory_format:  # fmt: skip
    """The memory format that the backend of a convolution computes in.

    Source: `torch._subclasses.fake_impls.conv`.
    """
    x, weight, bias = (t if t is None else _unwritten(t._h.meta) for t in (x, weight, bias))
    named = {} if bias is not None else {"bias_sizes": bias_sizes}
    backend = torch._C._select_conv_backend(
        x, weight, bias=bias, stride=stride, padding=padding, dilation=dilation, transposed=transposed,
        output_padding=output_padding, groups=groups, **named,
    )  # fmt: skip
    if weight.dim() == 3:
        x, weight = torch.empty(x.shape, dtype=x.dtype).unsqueeze(2), weight.unsqueeze(2)
    return torch._C._conv_determine_backend_memory_format(x, weight, backend)


def _unwritten(meta: TensorMeta) -> torch.Tensor:
    return torch.empty_strided(meta.size, meta.stride, dtype=meta.dtype)


def _in_format(meta: TensorMeta, memory_format: torch.memory_format) -> TensorMeta:
    dims = len(meta.size)
    if dims < 3:
        return meta
    t = torch.empty(meta.size, device="meta")
    if dims == 3 and memory_format is torch.channels_last:
        t = t.unsqueeze(2).to(memory_format=memory_format).squeeze(2)
    else:
        t = t.to(memory_format=memory_format)
    return meta.with_strides(t.stride())
