"""Fallback: run an op on real values if it cannot be recorded.

The step is cut, the operands are fetched, ATen runs the op on the CPU, and recording goes on with the results. So
control flow and results whose shape depends on values work, an op without a rule works, and a wrong call raises eager
PyTorch's error at the user's call. Counted as `aten::name`.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch

from ltc_core import errors, metrics, source
from ltc_core.graph.arguments import leaves, map_leaves
from ltc_core.graph.ir import TensorMeta
from ltc_core.graph.lens import Pending, close_lens, open_lens
from ltc_core.graph.op_schema import OpSchema
from ltc_core.record import random_state
from ltc_core.record.signature import two_devices
from ltc_core.runtime.devices import DeviceContext, context, real
from ltc_core.settings import settings
from ltc_core.tensor.buffer import Buffer
from ltc_core.tensor.handles import Cell, Value, base_of, lens_of
from ltc_core.tensor.lazy_tensor import LazyTensor, sizes_of, wrap
from ltc_core.thread_state import in_own_state
from ltc_core.timeline import slices

__all__ = ["run_real", "word_errors"]

Wording = Callable[[str, Mapping[str, Any]], str | None]

_warned: set[str] = set()
_wordings: list[Wording] = []
_open_lens = in_own_state(open_lens)


def word_errors(wording: Wording) -> None:
    """Have errors of ops say what `wording(name, arguments)` returns, and nothing else; None: PyTorch's text.

    They are RuntimeErrors then, and their other parts are notes.
    """
    _wordings.append(wording)


class _RealCall:
    """One call on real values: fetches lazy operands and uploads the results."""

    def __init__(self, schema: OpSchema, ctx: DeviceContext) -> None:
        self.schema = schema
        self.ctx = ctx
        self.written: dict[int, tuple[Cell, torch.Tensor]] = {}  # whole memory, by its cell
        self.opened: dict[int, tuple[torch.Tensor, list[Pending]]] = {}  # by the tensor of the call
        self.outs: list[tuple[LazyTensor, torch.Tensor]] = []
        self.pending: list[Pending] = []
        self.operands: list[torch.Tensor] = []

    def argument(self, name: str, item: Any) -> Any:
        if type(item) is not LazyTensor:
            if isinstance(item, torch.Tensor) and item.dim() > 0:
                raise self._elsewhere(item)
            return item
        if item._h.trace is not self.ctx.trace:
            raise self._elsewhere(item)
        if name in self.schema.writes:
            return self._written(item)
        if id(base_of(item._h)) in self.written:
            operand, _ = self._opened(item)
        else:
            operand = real(item._h, self.schema.name)
        self.operands.append(operand)
        return operand

    def _elsewhere(self, item: torch.Tensor) -> errors.DeviceMismatchError:
        return two_devices(self.ctx.device, item.device, f"{item.dtype}{list(item.shape)}")

    @in_own_state
    def open_written(self, item: Any) -> None:
        """Fetch the memory of written operands first, before arguments that may share it."""
        for t in leaves(item):
            if type(t) is LazyTensor and t._h.trace is self.ctx.trace:
                base = base_of(t._h)
                if id(base) not in self.written:
                    self.written[id(base)] = (base, real(base, self.schema.name).clone())

    def _written(self, item: LazyTensor) -> torch.Tensor:
        part, copies = self._opened(item)
        self.pending += copies
        self.outs.append((item, part))
        return part

    def _opened(self, item: LazyTensor) -> tuple[torch.Tensor, list[Pending]]:
        """The CPU view of a tensor in written memory: a tensor that is read and written is one tensor, as in eager."""
        found = self.opened.get(id(item))
        if found is None:
            _, whole = self.written[id(base_of(item._h))]
            found = self.opened[id(item)] = _open_lens(whole, lens_of(item._h))
        return found

    @in_own_state
    def finish(self) -> None:
        """Rebind the written operands to their new values, and to their new shapes where the op resized them."""
        close_lens(self.pending)
        for base, whole in self.written.values():
            if whole.shape == base.meta.size:
                base.rebind(_value(self.ctx, whole, base.meta, base.value.buffer))
        for item, part in self.outs:
            if part.shape != item.shape:
                with torch.inference_mode(item.is_inference()):
                    item.resize_(part.shape).copy_(part)

    def result(self, item: Any) -> Any:
        if isinstance(item, torch.Tensor):
            for original, part in self.outs:
                if item is part:
                    return original
            if item.layout is not torch.strided or item.is_quantized or item.is_nested:
                raise cannot_hold(item, f"{self.schema.op} gives", self.ctx.device)
            return wrap(self._new_cell(item))
        return item

    @in_own_state
    def _new_cell(self, data: torch.Tensor) -> Cell:
        """New memory of the device with this tensor's values, packed where it has gaps or overlaps."""
        meta = TensorMeta.of(data.size(), data.stride(), 0, data.dtype)
        if not meta.dense:
            meta = TensorMeta.packed(data.size(), data.dtype)
        return Cell(self.ctx.trace, _value(self.ctx, data, meta), meta)


def cannot_hold(
    item: torch.Tensor, which_op: str, device: torch.device
) -> errors.UnsupportedOpError:
    """The error for a tensor of a kind that the device does not have; `which_op` says what an op does with it."""
    instead = ""
    if item.is_nested:
        kind, instead = (
            "nested",
            ", or pad: torch.nn.utils.rnn.pad_sequence, enable_nested_tensor=False",
        )
    elif item.is_quantized:
        kind = "quantized"
    else:
        kind = str(item.layout).removeprefix("torch.")
        instead = (
            ", or have dense tensors: sparse=False in a layer, Adam for SparseAdam, to_dense()"
        )
    return errors.UnsupportedOpError(
        f"{which_op} a {kind} tensor, which {device} cannot hold",
        where=source.user_line(),
        next=f"run it on the CPU: t.cpu(){instead}",
    )


def _value(
    ctx: DeviceContext, data: torch.Tensor, meta: TensorMeta, before: Buffer | None = None
) -> Value:
    """Data on the device; `before`: the memory that they replace."""
    placed = ctx.executor.upload(meta.laid_out(data))
    if before is not None and before.data is not None:
        placed = ctx.executor.place_like(placed, before.data)
    return Value.of(Buffer.ready(ctx.memory, placed, meta.nbytes))


def run_real(schema: OpSchema, args: Any, kwargs: dict[str, Any], trace: Any) -> Any:
    """Run an op on the CPU on real values. Cost: syncs, two copies an operand.

    Raises:
        The exception eager PyTorch raises for this call, as an `LtcError` too, with the user's line.
        UnsupportedOpError: under LTC_FALLBACK=error.
    """
    ctx = context(trace.device.index)
    metrics.count(schema.counter)
    with slices.watched("run on the CPU") as seen:
        if seen is not None:
            seen.note(op=schema.name, line=source.user_line())
        return _run_real(_RealCall(schema, ctx), schema, args, kwargs, trace)


def _run_real(
    call: _RealCall, schema: OpSchema, args: Any, kwargs: dict[str, Any], trace: Any
) -> Any:
    for name, a in (*zip(schema.names, args, strict=False), *kwargs.items()):
        if name in schema.writes:
            call.open_written(a)
    real_args = [
        map_leaves(partial(call.argument, n), a) for n, a in zip(schema.names, args, strict=False)
    ]
    real_kwargs = {k: map_leaves(partial(call.argument, k), v) for k, v in kwargs.items()}
    if real_kwargs.get("device") is not None:
        real_kwargs["device"] = torch.device("cpu")
    real_kwargs.pop("pin_memory", None)
    result = _call(schema, args, real_args, real_kwargs, trace)
    if not _needs_values(schema.op):
        _report(schema)
    call.finish()
    return map_leaves(call.result, result)


@in_own_state
def _call(
    schema: OpSchema, args: Any, real_args: Any, real_kwargs: dict[str, Any], trace: Any
) -> Any:
    cell = None
    if schema.draws:
        given = schema.given("generator", real_args, real_kwargs)
        if given is not None or settings.random != "cpu_stream":
            real_args = real_args[: schema.position("generator")]
            cell = random_state.stream(trace, given)
            state = real(cell, schema.name)
    try:
        if cell is None:
            result = schema.op(*real_args, **real_kwargs)
        else:
            result, after = random_state.draw_on_cpu(
                state,
                lambda drawing: schema.op(*real_args, **{**real_kwargs, "generator": drawing}),
            )
    except Exception as error:
        text = _worded(schema, args, real_kwargs)
        is_of_matrix = _is_of_matrix(error)
        failed = errors.op_error(
            _without_list_of_kernels(error) if text is None else RuntimeError(text),
            what=str(schema.op) if text is None and not is_of_matrix else "",
            got="" if is_of_matrix else sizes_of(args) or ", ".join(map(repr, args)),
            where=source.user_line(),
            next=_advice(error),
        )
        raise (failed if text is None else errors.with_notes(failed)) from None
    if cell is not None:
        cell.rebind(random_state.state_value(trace, after))
    return result


def _worded(schema: OpSchema, args: Any, kwargs: dict[str, Any]) -> str | None:
    given = {**dict(zip(schema.names, args, strict=False)), **kwargs}
    return next(
        (text for word in _wordings if (text := word(schema.name, given)) is not None), None
    )


def _without_list_of_kernels(error: Exception) -> Exception:
    """PyTorch's error of an op that has no kernel, without the 60 lines that say where it has one."""
    if not isinstance(error, NotImplementedError):
        return error
    text, _, rest = str(error).partition(
        ". This could be because the operator doesn't exist for this backend"
    )
    return NotImplementedError(text) if rest else error


def _is_of_matrix(error: Exception) -> bool:
    """Whether the values of a matrix are at fault, which a check of PyTorch's own has found."""
    return isinstance(error, torch.linalg.LinAlgError)  # type: ignore[attr-defined]


def _advice(error: Exception) -> str:
    if isinstance(error, NotImplementedError):
        return "eager PyTorch cannot do this on the CPU either; write it with other ops"
    if _is_of_matrix(error):
        return (
            "look at the matrix's values; a small multiple of the identity may help, and cholesky_ex, inv_ex or "
            "solve_ex say what failed instead of raising"
        )
    if "allocate memory" in str(error):
        return "use smaller tensors or a smaller batch; get_memory_info() tells what is held"
    return "the call is wrong for eager PyTorch too: check the shapes, dtypes and indices above"


def _needs_values(op: torch._ops.OpOverload) -> bool:
    """Whether the result of the op depends on values by its nature."""
    tags = op.tags
    return (
        torch.Tag.dynamic_output_shape in tags
        or torch.Tag.data_dependent_output in tags
        or op._opname in ("_linalg_check_errors", "equal", "is_nonzero", "_local_scalar_dense")
    )


def _report(schema: OpSchema) -> None:
    if settings.fallback == "allow" or schema.counter in settings.force_fallback:
        return
    line = source.user_line()
    if settings.fallback == "error":
        raise errors.UnsupportedOpError(
            f"{schema.counter} has no rule on device {settings.device_name}",
            got=str(schema.op._schema)[:200],
            where=line,
            next="LTC_FALLBACK=warn runs it on the CPU (a sync and two copies a call)",
        )
    if schema.counter not in _warned:
        _warned.add(schema.counter)
        warnings.warn(
            f"{schema.counter} has no rule on device {settings.device_name} (recorded at {line}): it cuts the step and "
            "runs on the CPU. Next: replace it, or silence this with LTC_FALLBACK=allow.",
            stacklevel=3,
        )
