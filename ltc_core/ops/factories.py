"""Factories: ATen calls that make a tensor of the device from nothing.

They have no tensor argument, so they do not reach `LazyTensor`. PyTorch dispatches them to the kernels that are
registered here. `empty` records nothing; the others record one op.
"""

from __future__ import annotations

import functools
from typing import Any

import torch

from ltc_core import errors, source
from ltc_core.device import register
from ltc_core.graph.ir import TensorMeta
from ltc_core.graph.op_schema import OpSchema
from ltc_core.ops import cpu_draws
from ltc_core.ops.composites import RULES
from ltc_core.ops.fallback import run_real
from ltc_core.ops.set_data import set_data
from ltc_core.ops.uninitialized import teach_constructors
from ltc_core.record.fast_path import add_op
from ltc_core.record.recorder import record_factory
from ltc_core.record.signature import NotRecordable
from ltc_core.record.trace import Trace
from ltc_core.runtime.devices import checked, context, used
from ltc_core.shapes.shape_inference import Unknown
from ltc_core.tensor.lazy_tensor import LazyTensor, wrap

__all__ = ["register_factories"]

aten = torch.ops.aten

# ATen implements these as `empty` and one or two ops that write it; here they are one op.
_ONE_OP = (
    "zeros", "ones", "full", "arange", "arange.start", "arange.start_step", "eye", "eye.m", "linspace", "logspace",
    "randperm.generator", "tril_indices", "triu_indices", "scalar_tensor",
)  # fmt: skip

# PyTorch calls these below `LazyTensor` too (`torch.tensor(..., device=...)` copies with subclasses switched off).
_BELOW_TENSOR = (
    "copy_",
    "fill_.Scalar",
    "zero_",
    "_local_scalar_dense",
    "view",
    "as_strided",
    "set_.source_Tensor",
)

_libraries: list[Any] = []  # dropping one would take its kernels back


def _trace_of(kwargs: dict[str, Any]) -> Trace:
    device = kwargs.get("device")
    index = torch.device(device).index if device is not None else None
    if index is None:
        index = register.current_device()
    found = used(index)
    return (context(checked(index)) if found is None else found).trace


def _empty(size: Any, **kwargs: Any) -> torch.Tensor:
    dtype = kwargs.get("dtype") or torch.get_default_dtype()
    memory_format = kwargs.get("memory_format")
    if memory_format in (None, torch.contiguous_format, torch.preserve_format):
        meta = TensorMeta.packed(size, dtype)
    else:
        meta = TensorMeta.like(
            torch.empty(size, dtype=dtype, memory_format=memory_format, device="meta")
        )
    return wrap(_trace_of(kwargs).empty(meta))


def _empty_strided(size: Any, stride: Any, **kwargs: Any) -> torch.Tensor:
    dtype = kwargs.get("dtype") or torch.get_default_dtype()
    return wrap(_trace_of(kwargs).empty(TensorMeta.of(size, stride, 0, dtype)))


def _make(op: torch._ops.OpOverload, *args: Any, **kwargs: Any) -> Any:
    """Make a tensor of the device with one recorded op."""
    schema = OpSchema.of(op)
    if "device" not in schema.named:
        raise errors.UnsupportedOpError(
            f"{op} reached device {torch._C._get_privateuse1_backend_name()} without a tensor of it",
            where=source.user_line(),
            next="report the call that did this",
        )
    trace = _trace_of(kwargs)
    if schema.draws and cpu_draws.are_chosen() and kwargs.get("generator") is None:
        return cpu_draws.drawn(schema, trace, args, kwargs)
    try:
        return record_factory(schema, trace, args, kwargs)
    except (NotRecordable, Unknown):
        return run_real(schema, args, kwargs, trace)


def _dispatch(op: torch._ops.OpOverload, *args: Any, **kwargs: Any) -> Any:
    return LazyTensor.__torch_dispatch__(op, (), args, kwargs)


def _randperm(n: int, **kwargs: Any) -> Any:
    return _make(aten.randperm.generator, n, generator=None, **kwargs)


def _zeros(size: Any, **kwargs: Any) -> Any:
    """Zeros in memory. Forward-mode autograd's own have none: compiled code would read at address 0."""
    return _make(aten.zeros.default, size, **kwargs)


def register_factories() -> None:
    """Register the kernels; called once, after the device is."""
    library: Any = torch.library.Library("aten", "IMPL")  # type: ignore[no-untyped-call]
    library.impl("empty.memory_format", _empty, "PrivateUse1")
    library.impl("empty_strided", _empty_strided, "PrivateUse1")
    for name in _ONE_OP:
        packet, _, overload = name.partition(".")
        op = getattr(getattr(aten, packet), overload or "default")
        library.impl(name, functools.partial(_make, op), "PrivateUse1")
        if not OpSchema.of(op).draws:
            add_op(op, OpSchema.of(op), is_factory=True)
    library.impl("randperm", _randperm, "PrivateUse1")
    library.impl("_efficientzerotensor", _zeros, "PrivateUse1")
    for op in (
        aten._pack_padded_sequence_backward.default,
        aten._pad_packed_sequence.default,
        aten.ctc_loss.Tensor,
        aten.linalg_eigvalsh.default,
        aten.linalg_svdvals.default,
        aten.max_pool1d.default,
        aten.one_hot.default,
        aten.quantile.default,
        aten.nanquantile.default,
    ):
        name = op._schema.name.removeprefix("aten::")
        overload = op._schema.overload_name
        library.impl(f"{name}.{overload}" if overload else name, RULES[op], "AutogradPrivateUse1")
    library.impl("_has_compatible_shallow_copy_type", set_data, "AutogradPrivateUse1")
    set_strided = (
        aten.set_.source_Tensor_storage_offset
    )  # PyTorch's own asks the source for its storage
    library.impl(
        "set_.source_Tensor_storage_offset",
        functools.partial(_dispatch, set_strided),
        "AutogradPrivateUse1",
    )
    for name in _BELOW_TENSOR:
        packet, _, overload = name.partition(".")
        op = getattr(getattr(aten, packet), overload or "default")
        library.impl(name, functools.partial(_dispatch, op), "PrivateUse1")
    others: Any = torch.library.Library("_", "IMPL")  # type: ignore[no-untyped-call]
    others.fallback(_make, "PrivateUse1")
    if not torch._C._dispatch_has_backend_fallback(torch._C.DispatchKey.AutogradPrivateUse1):
        others.fallback(torch.library.fallthrough_kernel, "AutogradPrivateUse1")  # torch 2.9
    teach_constructors()
    _libraries.extend((library, others))
