"""From an ATen call to its handler: the table of everything the device does.

Most ops are recorded as they are (`recorder`). A row of `SPECIAL` replaces that for ops that are free, that
move data, or that change what a tensor is; `composites` holds ops made of other ops. A call that cannot be recorded
goes through PyTorch's decompositions, then to `fallback`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from ltc_core import errors, metrics, source
from ltc_core.graph.op_schema import OpSchema
from ltc_core.ops import cpu_draws
from ltc_core.ops.composites import RULE_MAKERS, RULES
from ltc_core.ops.cpu_numbers import with_number
from ltc_core.ops.fallback import cannot_hold, run_real
from ltc_core.ops.special import SPECIAL, on_other_device, share
from ltc_core.record.fast_path import add_composite, add_op, enable
from ltc_core.record.make_node import OutResized
from ltc_core.record.recorder import recorder
from ltc_core.record.signature import NotRecordable, find_trace
from ltc_core.record.trace import Trace
from ltc_core.runtime.devices import contexts, upload
from ltc_core.settings import settings
from ltc_core.shapes.shape_inference import Unknown
from ltc_core.tensor.handles import base_of
from ltc_core.tensor.lazy_tensor import HANDLERS, LazyTensor
from ltc_core.uninterrupted import uninterrupted

__all__ = ["handler_of"]

Handler = Callable[[Any, Any], Any]

_VIEWS = torch._C.DispatchKey.ADInplaceOrView

# Their results are quantized, which meta kernels do not show; the device has no quantized tensors.
_QUANTIZED = ("quantize_per_", "_empty_affine", "_empty_per_channel", "_make_per_")

# Special only for a copy to another device, a preserved memory format, integers or mixed dtypes.
_RECORDED_AS_THEY_ARE = frozenset(
    {
        torch.ops.aten.clone.default,
        torch.ops.aten._to_copy.default,
        torch.ops.aten.copy_.default,
        torch.ops.aten.histc.default,
        torch.ops.aten.huber_loss.default,
        torch.ops.aten.index.Tensor,
    }
)

# Recorded as one where nothing needs its parts: C++ leaves it whole then (`record/csrc/whole_op.h`), and in inference
# mode all of it arrives here.
_LINEAR = torch.ops.aten.linear.default

# Operands, by position, that may be on the CPU as for every device: indices, lengths.
_INDICES = frozenset({1})
_MAY_BE_ON_CPU: dict[str, frozenset[int]] = {
    **dict.fromkeys(
        ("index", "index_put", "index_put_", "_index_put_impl_", "_unsafe_index"), _INDICES
    ),
    "_ctc_loss": frozenset({1, 2, 3}),
    "_ctc_loss_backward": frozenset({2, 3, 4}),
}
# Position of the class labels.
_LABELS = {
    "nll_loss_forward": 1,
    "nll_loss_backward": 2,
    "nll_loss2d_forward": 1,
    "nll_loss2d_backward": 2,
}
# Further ones that torch_xla uploads: scripts for it get that, counted as CpuOperand.
_BINARY = (
    "add",
    "bitwise_and",
    "bitwise_or",
    "bitwise_xor",
    "div",
    "fmod",
    "mul",
    "pow",
    "rsub",
    "sub",
)
_MAY_BE_ON_CPU_FOR_TORCH_XLA: dict[str, frozenset[int]] = {
    **dict.fromkeys(("__lshift__", "__rshift__", *_BINARY), frozenset({0, 1})),
    **dict.fromkeys((f"{name}_" for name in _BINARY), frozenset({1})),
}


def handler_of(op: torch._ops.OpOverload) -> Handler:
    """Make the handler of an overload, once."""
    schema = OpSchema.of(op)
    handler = _choose(op, schema)
    if settings.check_graphs:
        handler = _checked(schema, handler)
    if not settings.eager:
        return handler
    _choose_recorder()
    return _run_at_once(handler)


def choose_anew() -> None:
    """Choose every op's handler again at its next use, after a setting that decides it has changed."""
    _choose_recorder()
    for ctx in contexts():
        ctx.at_once.end()
    HANDLERS.clear()


def _choose_recorder() -> None:
    """Whether C++ records calls. In eager mode it only runs those at once that Python has handled before."""
    is_eager = settings.eager
    is_on = not settings.force_fallback and (not is_eager or settings.at_once != "never")
    enable(is_on, records=not is_eager)


def _checked(schema: OpSchema, handler: Handler) -> Handler:
    """Check after each call that the trace has as many values as its last step says, whatever the call raised."""

    def handle(args: Any, kwargs: Any) -> Any:
        try:
            return handler(args, kwargs)
        finally:
            with contextlib.suppress(NotRecordable):  # no operand is a lazy tensor
                _check(find_trace(args, kwargs), schema)

    return handle


@uninterrupted  # a signal handler may cut between two of the counts
def _check(trace: Trace, schema: OpSchema) -> None:
    with trace.lock:
        if not trace.count == len(trace.values) == trace.cursor.end:
            raise errors.GraphError(
                f"the trace is not that of its last step after {schema.op}",
                got=f"{trace.count} values, {len(trace.values)} of them known; {trace.cursor.end} expected",
                where=source.user_line(),
                next="report this, with the program that recorded it",
            )


def _run_at_once(handler: Handler) -> Handler:
    """Cut after each op and wait, so that an op that fails does so where it is called (LTC_EAGER)."""

    def handle(args: Any, kwargs: Any) -> Any:
        result = handler(args, kwargs)
        for ctx in contexts():
            if ctx.trace:
                ctx.cut("Eager")
                ctx.worker.drain()
                ctx.raise_failure()
        return result

    return handle


def _choose(op: torch._ops.OpOverload, schema: OpSchema) -> Handler:
    special = SPECIAL.get(op)
    if special is not None:
        if special is share or op in _RECORDED_AS_THEY_ARE:
            add_op(op, schema, shares=special is share)
        return _with_rescue(schema, special)
    if schema.counter in settings.force_fallback and not schema.view:
        return _on_real_values(schema)
    rule = RULES.get(op)
    if rule is None and op.namespace in RULE_MAKERS:
        rule = RULE_MAKERS[op.namespace](op)
    if rule is not None:  # before composites: `_pad_packed_sequence` is one
        return lambda args, kwargs: rule(*args, **(kwargs or {}))
    if op is _LINEAR:
        add_op(op, schema)
        return _as_one(_with_rescue(schema, recorder(schema)), _decomposed(schema))
    if schema.composite:
        add_composite(op, keeps_views=_keeps_views(schema))
        return _decomposed(schema)
    if schema.name.startswith(_QUANTIZED):
        return _on_real_values(schema)
    if not schema.yields_tensors or not (schema.returns or schema.writes):
        # Its result, or its error (as for a singular matrix), depends on the values.
        return _on_real_values(schema)
    if _is_sized_by_values(op, schema):
        return _on_real_values(schema)
    record = _with_rescue(schema, recorder(schema))
    if schema.draws and cpu_draws.are_chosen():
        return cpu_draws.draw_at_once(schema, record)
    add_op(op, schema)
    if schema.name in _LABELS and _serves_torch_xla():
        return _with_labels_of_any_dtype(_LABELS[schema.name], record)
    return record


def _is_sized_by_values(op: torch._ops.OpOverload, schema: OpSchema) -> bool:
    """Whether the values of the only operand decide the size of the result: it would be inferred for nothing."""
    num_operands = sum("Tensor" in str(a.type) for a in op._schema.arguments)
    return torch.Tag.dynamic_output_shape in op.tags and num_operands == 1 and not schema.writes


def _serves_torch_xla() -> bool:
    return settings.compat and settings.device_name == "xla"


def _with_labels_of_any_dtype(position: int, record: Handler) -> Handler:
    """Take class labels as floats, as torch_xla does, which compares them with the classes."""

    def handle(args: Any, kwargs: Any) -> Any:
        labels = args[position]
        if labels.dtype.is_floating_point:
            labels = torch.ops.aten._to_copy.default(labels, dtype=torch.int64)
            args = (*args[:position], labels, *args[position + 1 :])
        return record(args, kwargs)

    return handle


def _on_real_values(schema: OpSchema) -> Handler:
    add_op(schema.op, schema, needs_values=True)
    return lambda args, kwargs: run_real(schema, args, kwargs or {}, find_trace(args, kwargs))


def _with_rescue(schema: OpSchema, record: Handler) -> Handler:
    def handle(args: Any, kwargs: Any) -> Any:
        try:
            return record(args, kwargs)
        except (NotRecordable, Unknown) as reason:
            return _rescue(schema, handle, args, kwargs or {}, reason)

    return handle


def _rescue(
    schema: OpSchema, handle: Handler, args: Any, kwargs: dict[str, Any], reason: Exception
) -> Any:
    """Run a call that could not be recorded: upload operands, decompose, or fall back."""
    if isinstance(reason, OutResized):
        if not _are_new_outs(reason, args, kwargs):
            return run_real(schema, args, kwargs, find_trace(args, kwargs))
        for tensor, meta in reason.resized:
            SPECIAL[torch.ops.aten.resize_.default]((tensor, meta.size), None)
        return handle(args, kwargs)
    device = kwargs.get("device")
    if device is not None and _is_elsewhere(device, args, kwargs):
        return on_other_device(schema, args, kwargs)
    numbers = with_number(schema, args)
    if numbers is not None:
        return handle(numbers, kwargs)
    trace = find_trace(args, kwargs)
    moved = _Mover(schema, trace.device)
    new_args = [moved.argument(a, position) for position, a in enumerate(args)]
    new_kwargs = {k: moved.argument(v, -1) for k, v in kwargs.items()}
    if moved.count:
        return handle(new_args, new_kwargs)
    if isinstance(reason.__cause__, NotImplementedError) and not schema.view:
        decomposition = torch._decomp.decomposition_table.get(schema.op)
        if decomposition is not None and not schema.writes:
            return decomposition(*args, **kwargs)
    return run_real(schema, args, kwargs, trace)


def _are_new_outs(reason: OutResized, args: Any, kwargs: dict[str, Any]) -> bool:
    """Whether all tensors to be resized are of `out=`, and none of them shares memory with an operand.

    In-place ops never resize what they write; an operand of another size is another call.
    """
    outs = {id(item) for item in kwargs.values()}
    bases = {base_of(t._h) for t in tree_leaves(args) if type(t) is LazyTensor}
    return all(id(t) in outs and base_of(t._h) not in bases for t, _ in reason.resized)


def _is_elsewhere(device: Any, args: Any, kwargs: Any) -> bool:
    wanted = torch.device(device)
    if wanted.type != settings.device_name:
        return True
    return wanted.index is not None and wanted.index != find_trace(args, kwargs).device.index


# As scripts for each device know the error.
_A_TENSOR = "an XLA tensor" if settings.device_name == "xla" else "a lazy tensor"


class _Mover:
    """Uploads the CPU tensors of a call: 0-dim ones anywhere, others at the positions in `_MAY_BE_ON_CPU`."""

    def __init__(self, schema: OpSchema, device: torch.device) -> None:
        self._schema = schema
        self._device = device
        self.count = 0

    def argument(self, item: Any, position: int) -> Any:
        if isinstance(item, list | tuple):
            return [self.argument(i, position) for i in item]
        if not isinstance(item, torch.Tensor) or type(item) is LazyTensor:
            return item
        if item.is_nested or (item.layout is not torch.strided and item.device == self._device):
            raise cannot_hold(item, f"{self._schema.op} takes", self._device)
        may_be = item.dim() == 0 or position in _MAY_BE_ON_CPU.get(self._schema.name, ())
        if not may_be and _serves_torch_xla():
            may_be = position in _MAY_BE_ON_CPU_FOR_TORCH_XLA.get(self._schema.name, ())
            metrics.count("CpuOperand", int(may_be))
        if item.device == self._device:
            raise errors.DeviceMismatchError(
                f"an operand says that it is on {self._device}, but its memory is not of this device",
                got=f"{list(item.shape)} among the operands of {self._schema.op}; DLPack may have made it",
                where=source.user_line(),
                next="hand it over by the CPU: torch.from_dlpack(t.cpu())",
            )
        if item.device.type != "cpu" or not may_be:
            raise errors.DeviceMismatchError(
                f"Input tensor is not {_A_TENSOR}: {_type_name(item)}",
                got=f"{list(item.shape)} on {item.device} among the operands of {self._schema.op} on {self._device}",
                where=source.user_line(),
                next=f"move it first: t.to('{self._device.type}') (a module: module.to(...))",
            )
        self.count += 1
        return upload(item, self._device.index)


def _type_name(t: torch.Tensor) -> str:
    return t.type() if t.device.type == "cpu" else f"{t.dtype} on {t.device}"


def _decomposed(schema: OpSchema) -> Handler:
    """Return the handler of an op that consists of others.

    Outside of inference mode autograd decomposes it before, and tracks views in each of its ops. In inference mode the
    whole op arrives here, below autograd; C++ takes it apart from the second call on (`record/csrc/composite.h`).
    """
    keeps_views = _keeps_views(schema)

    def handle(args: Any, kwargs: Any) -> Any:
        is_lost = torch.is_inference_mode_enabled() and not keeps_views
        with _with_views() if is_lost else contextlib.nullcontext():
            result = schema.op.decompose(*args, **(kwargs or {}))
        if result is NotImplemented:
            return run_real(schema, args, kwargs or {}, find_trace(args, kwargs))
        return result

    return handle


def _keeps_views(schema: OpSchema) -> bool:
    """Whether the op has a kernel of its own where autograd notes views, as a few have."""
    overload = schema.op._overloadname
    name = f"{schema.counter}.{overload}" if overload != "default" else schema.counter
    return bool(torch._C._dispatch_has_kernel_for_dispatch_key(name, _VIEWS.name))


def _as_one(record: Handler, decomposed: Handler) -> Handler:
    """Record a linear layer as one op, if its parts are a product of rows and at most one addition."""

    def handle(args: Any, kwargs: Any) -> Any:
        given: list[Any] = [*args, *(kwargs or {}).values()]
        x, weight = given[:2]
        biases = [t for t in given[2:] if t is not None]
        is_whole = (
            all(type(t) is LazyTensor and t.dtype is x.dtype for t in (x, weight, *biases))
            and x.dim() >= 2
            and weight.dim() == 2
            and all(t.dim() <= 1 for t in biases)
            and x._h.meta.contiguous  # a lazy tensor looks contiguous to Python
        )
        return (record if is_whole else decomposed)(args, kwargs)

    return handle


def _with_views() -> torch._C._ForceDispatchKeyGuard:
    """Enable autograd's view tracking for calls from within a handler."""
    included = torch._C._dispatch_tls_local_include_set()
    excluded = torch._C._dispatch_tls_local_exclude_set()
    return torch._C._ForceDispatchKeyGuard(included, excluded.remove(_VIEWS))
