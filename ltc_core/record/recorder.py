"""Recording one op: an ATen call becomes a step of the trace.

`recorder(schema)` returns the op's handler. The handler builds the op's signature (`signature`), moves the trace's
cursor along it (`trace`) and wraps the results. View ops go to `view_recorder`. Most calls that repeat a known step do
not get here: the `fast_path` records them. A call that cannot be recorded raises `NotRecordable` or `Unknown`;
`ops.dispatch` then runs it on real values.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.autograd.graph import increment_version

from ltc_core import errors, source
from ltc_core.graph.op_schema import Arg, OpSchema
from ltc_core.record import random_state
from ltc_core.record.dynamic_results import op_call
from ltc_core.record.make_node import OrderMatters, grow
from ltc_core.record.signature import (
    DROPPED,
    Stale,
    argument,
    check_device,
    find_trace,
    shared_reads,
    written,
    written_cell,
)
from ltc_core.record.trace import Step, Trace
from ltc_core.record.view_recorder import make_operand, make_operands, record_view
from ltc_core.shapes.shape_inference import infer
from ltc_core.tensor.handles import Cell
from ltc_core.tensor.lazy_tensor import LazyTensor, sizes_of, wrap
from ltc_core.uninterrupted import uninterrupted

__all__ = ["record_factory", "recorder"]


_FOR_EACH = torch._C.DispatchKey.CompositeExplicitAutograd  # its kernels: one op for each tensor


def recorder(schema: OpSchema) -> Callable[[Any, Any], Any]:
    """The handler that records this op."""
    record = _record
    if schema.view:
        record = record_view
    elif schema.name.startswith("_foreach_") and schema.writes:
        record = _record_writes
    return lambda args, kwargs: record(schema, args, kwargs or {})


def _record(schema: OpSchema, args: Any, kwargs: dict[str, Any]) -> Any:
    return _record_on(find_trace(args, kwargs), schema, args, kwargs)


def _record_writes(schema: OpSchema, args: Any, kwargs: dict[str, Any]) -> Any:
    """Record an op that writes a list of tensors, and increment the version counter of each.

    Autograd increments version counters to find tensors that were changed before backward needs them. For lists it
    relies on the ops that eager PyTorch calls for each tensor. Here those ops are recorded only if their order matters.
    """
    if not torch.is_inference_mode_enabled() and any(t.is_inference() for t in args[0]):
        raise errors.op_error(
            RuntimeError(
                "Inplace update to inference tensor outside InferenceMode is not allowed."
            ),
            what=str(schema.op),
            got=sizes_of(args),
            where=source.user_line(),
            next="write a clone of it, or write it within torch.inference_mode()",
        )
    try:
        result = _record(schema, args, kwargs)
    except OrderMatters:
        result = schema.op._op_dk(_FOR_EACH, *args, **kwargs)
    increment_version([t for t in args[0] if not t.is_inference()])
    return result


def record_factory(schema: OpSchema, trace: Trace, args: Any, kwargs: dict[str, Any]) -> Any:
    """Record an op without tensor operands."""
    kwargs = {k: v for k, v in kwargs.items() if k not in DROPPED or k == "generator"}
    if kwargs.get("dtype") is None:
        kwargs["dtype"] = _default_dtype(schema, args, kwargs)
    return _record_on(trace, schema, args, kwargs)


# (op, types of the arguments, default dtype) -> dtype of what a factory makes; a few entries for each factory.
_default_dtypes: dict[tuple[Any, ...], torch.dtype] = {}


def _default_dtype(schema: OpSchema, args: Any, kwargs: dict[str, Any]) -> torch.dtype:
    """The dtype that a factory gives if none is named: the types of its arguments decide it."""
    key = (schema, *map(type, args), torch.get_default_dtype())
    found = None if kwargs else _default_dtypes.get(key)
    if found is None:
        found = infer(schema, args, {**kwargs, "device": "meta"}).dtype
        if not kwargs:
            _default_dtypes[key] = found
    return found


def _record_on(trace: Trace, schema: OpSchema, args: Any, kwargs: dict[str, Any]) -> Any:
    if schema.draws:
        args, kwargs = _with_named_generator(schema, args, kwargs)
    if trace.count >= trace.limit:
        trace.on_limit()  # type: ignore[misc]  # it cuts, which waits
    with trace.lock:
        return _record_step(trace, schema, args, kwargs)


@uninterrupted
def _record_step(trace: Trace, schema: OpSchema, args: Any, kwargs: dict[str, Any]) -> Any:
    try:
        before = trace.count
        scalars: list[Any] = []
        bases: dict[int, Cell] = {}
        key = _signature(schema, trace, args, kwargs, scalars, bases)
        cells = list(bases.values())
        step = trace.advance(
            key,
            lambda: grow(schema, trace, args, kwargs, cells),
            before,
            scalars,
            lambda: op_call(schema, args, kwargs, DROPPED),
        )
        trace.scalars += scalars
        return _results(trace, step, cells, schema, args, kwargs)
    except Stale:
        trace.rewind()
        make_operands(args, kwargs)
        if schema.draws:
            make_operand(random_state.stream(trace, kwargs.get("generator")))
        return _record_step(trace, schema, args, kwargs)
    except BaseException:
        trace.rewind()
        raise


def _with_named_generator(schema: OpSchema, args: Any, kwargs: Any) -> tuple[Any, dict[str, Any]]:
    """The arguments, with the generator as a keyword; `aten::poisson` and others take it as the last positional one."""
    position = schema.args.index(Arg.GENERATOR)
    if position >= len(args):
        return args, kwargs
    return args[:position], {**kwargs, "generator": args[position]}


def _signature(
    schema: OpSchema,
    trace: Trace,
    args: Any,
    kwargs: dict[str, Any],
    scalars: list[Any],
    bases: dict[int, Cell],
) -> tuple[Any, ...]:
    """The signature of a call.

    A written operand enters as the number of its cell's value, for a view with the lens. Operands that the op reads
    from cells that it writes enter a second time, at the end.
    """
    writes = schema.writes
    key: list[Any] = [schema]
    for a, code, name in zip(args, schema.args, schema.names, strict=False):
        if name in writes and a is not None:
            key.append(written(trace, a, bases))
        else:
            key.append(argument(trace, a, code, scalars))
    generator = None
    for name, a in kwargs.items():
        if name == "generator":
            generator = a
        elif name == "device":
            check_device(trace, a)
        elif name not in DROPPED:
            key.append(name)
            is_written = name in writes and a is not None
            key.append(
                written(trace, a, bases)
                if is_written
                else argument(trace, a, schema.named[name], scalars)
            )
    if schema.draws:
        key.append(written_cell(trace, random_state.stream(trace, generator), bases))
    if writes:
        key += shared_reads(schema, args, kwargs, bases)
    return tuple(key)


def _results(
    trace: Trace, step: Step, bases: list[Cell], schema: OpSchema, args: Any, kwargs: dict[str, Any]
) -> Any:
    """Wrap an op's results and rebind the written cells to their new values."""
    node = step.node
    assert node is not None
    made: list[LazyTensor | None] = []
    outs = step.outs
    for k in range(len(outs) - len(node.writes)):
        meta = outs[k]
        if meta is None:
            trace.skip()
            made.append(None)
            continue
        trace.note_size(meta, node.outs[k])
        made.append(wrap(Cell(trace, trace.define(), meta)))
    for k, cell in enumerate(bases):
        trace.note_size(cell.meta, node.outs[len(outs) - len(bases) + k])
        cell.rebind(trace.define())
    return _arrange(node.result, made, schema, args, kwargs)


def _arrange(
    spec: Any, made: list[LazyTensor | None], schema: OpSchema, args: Any, kwargs: Any
) -> Any:
    if type(spec) is int:
        return made[spec]
    if spec is None:
        return None
    if type(spec) is str:
        return schema.given(spec, args, kwargs)
    items = [_arrange(s, made, schema, args, kwargs) for s in spec]
    return tuple(items) if type(spec) is tuple else items
