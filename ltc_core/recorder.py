"""Recording one op: from the call ATen makes to a step of the trace.

`recorder(schema)` gives the op's handler. It builds the op's signature, moves the trace's cursor along it and wraps
the results. This is the hot path: a step that was recorded before costs one signature, one comparison and one new
tensor. What cannot be recorded raises `NotRecordable` or `Unknown`, and `dispatch` runs it on real values.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch

from ltc_core import rng
from ltc_core.branch import grow
from ltc_core.cell import Cell, Value
from ltc_core.infer import infer
from ltc_core.record_view import make_operand, make_operands, record_view
from ltc_core.schema import Arg, OpSchema
from ltc_core.signature import (
    DROPPED,
    NUMBERS,
    Stale,
    argument,
    check_device,
    find_trace,
    number,
    operand,
    written,
    written_cell,
)
from ltc_core.tensor import LazyTensor
from ltc_core.trace import Step, Trace

__all__ = ["record_factory", "recorder"]

_make = torch.Tensor._make_wrapper_subclass
_ref = weakref.ref


def recorder(schema: OpSchema) -> Callable[[Any, Any], Any]:
    """Give the handler that records this op."""
    if schema.view:
        return lambda args, kwargs: record_view(schema, args, kwargs or {})
    if schema.writes or schema.draws:
        return lambda args, kwargs: _record_write(schema, args, kwargs or {})
    return _pure_recorder(schema)


def _pure_recorder(schema: OpSchema) -> Callable[[Any, Any], Any]:
    codes = schema.args
    named = schema.named
    static, tensor_code, number_code = Arg.STATIC, Arg.TENSOR, Arg.NUMBER

    def record(args: Any, kwargs: Any) -> Any:
        first = args[0] if args else None
        trace: Trace = first._h.trace if type(first) is LazyTensor else find_trace(args, kwargs)
        with trace.lock:
            if trace.count >= trace.limit:
                trace.on_limit()  # type: ignore[misc]
            before = trace.count
            epoch = trace.epoch
            numbers: list[Any] = []
            key: list[Any] = [schema]
            append = key.append
            try:
                for a, code in zip(args, codes):  # noqa: B905 - strict= costs 40 ns an op
                    kind = type(a)
                    if kind is LazyTensor:
                        h = a._h
                        v = h.value
                        if v.epoch == epoch and (type(h) is Cell or h.version == h.base.version):
                            append(v.index)
                        else:
                            append(operand(trace, h))
                    elif code == static:
                        append(tuple(a) if kind is list else a)
                    elif code == number_code or code == tensor_code:
                        if kind in NUMBERS:
                            numbers.append(a)
                            append(kind)
                        else:
                            append(number(a, numbers))
                    else:
                        append(argument(trace, a, code, numbers))
                if kwargs:
                    for name, a in kwargs.items():
                        if name not in DROPPED:
                            append(name)
                            append(argument(trace, a, named[name], numbers))
                        elif name == "device":
                            check_device(trace, a)
                signature = tuple(key)
                cursor = trace.cursor
                if cursor.next_key == signature:
                    step: Step = cursor.next  # type: ignore[assignment]
                    trace.cursor = step
                else:
                    step = trace.advance(
                        signature,
                        lambda: grow(schema, trace, args, kwargs or {}, []),
                        before,
                        len(numbers),
                    )
                if numbers:
                    trace.scalars += numbers
                if step.single:
                    index = trace.count
                    value = Value(epoch, index)
                    trace.refs.append(_ref(value))
                    trace.count = index + 1
                    t = _make(LazyTensor, *step.wraps[0])
                    t._h = Cell(trace, value, step.node.outs[0])  # type: ignore[union-attr,arg-type]
                    return t
                return _results(trace, step, [], schema, args, kwargs or {})
            except Stale:
                trace.settle()
                make_operands(args, kwargs)
                return record(args, kwargs)
            except BaseException:
                trace.settle()
                raise

    return record


def _record_write(schema: OpSchema, args: Any, kwargs: dict[str, Any]) -> Any:
    """Record an op that writes some operands (in place, `out=`) or draws from a random stream.

    The written ones enter the signature as (number of the whole tensor, lens)."""
    return _record_on(find_trace(args, kwargs), schema, args, kwargs)


def record_factory(schema: OpSchema, trace: Trace, args: Any, kwargs: dict[str, Any]) -> Any:
    """Record an op without tensor operands."""
    kwargs = {k: v for k, v in kwargs.items() if k not in DROPPED or k == "generator"}
    if kwargs.get("dtype") is None:
        kwargs["dtype"] = infer(schema, args, {**kwargs, "device": "meta"}).dtype
    return _record_on(trace, schema, args, kwargs)


def _record_on(trace: Trace, schema: OpSchema, args: Any, kwargs: dict[str, Any]) -> Any:
    with trace.lock:
        if trace.count >= trace.limit:
            trace.on_limit()  # type: ignore[misc]
        try:
            before = trace.count
            numbers: list[Any] = []
            bases: dict[int, Cell] = {}
            key = _write_signature(schema, trace, args, kwargs, numbers, bases)
            cells = list(bases.values())
            cursor = trace.cursor
            if cursor.next_key == key:
                step: Step = cursor.next  # type: ignore[assignment]
                trace.cursor = step
            else:
                step = trace.advance(
                    key, lambda: grow(schema, trace, args, kwargs, cells), before, len(numbers)
                )
            trace.scalars += numbers
            return _results(trace, step, cells, schema, args, kwargs)
        except Stale:
            trace.settle()
            make_operands(args, kwargs)
            if schema.draws:
                make_operand(rng.stream(trace, kwargs.get("generator")))
            return _record_on(trace, schema, args, kwargs)
        except BaseException:
            trace.settle()
            raise


def _write_signature(
    schema: OpSchema,
    trace: Trace,
    args: Any,
    kwargs: dict[str, Any],
    numbers: list[Any],
    bases: dict[int, Cell],
) -> tuple[Any, ...]:
    writes = schema.writes
    key: list[Any] = [schema]
    for a, code, name in zip(args, schema.args, schema.names, strict=False):
        if name in writes and a is not None:
            key.append(written(trace, a, bases))
        else:
            key.append(argument(trace, a, code, numbers))
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
                else argument(trace, a, schema.named[name], numbers)
            )
    if schema.draws:
        key.append(written_cell(trace, rng.stream(trace, generator), bases))
    return tuple(key)


def _results(
    trace: Trace, step: Step, bases: list[Cell], schema: OpSchema, args: Any, kwargs: dict[str, Any]
) -> Any:
    """Wrap an op's results and give the written operands their new values."""
    node = step.node
    assert node is not None
    epoch = trace.epoch
    refs = trace.refs
    made: list[LazyTensor | None] = []
    for wraps, meta in zip(step.wraps, node.outs, strict=False):
        if meta is None:
            trace.skip()
            made.append(None)
            continue
        value = trace.define()
        t = _make(LazyTensor, *wraps)
        t._h = Cell(trace, value, meta)
        made.append(t)
    for cell in bases:
        # define() and rebind() written out, as in signature.written: a foreach op writes hundreds. Together
        # 654 -> 560 us for AdamW over 32 tensors (benchmarks.record, "AdamW step, foreach").
        index = trace.count
        value = Value(epoch, index)
        refs.append(_ref(value))
        trace.count = index + 1
        cell.value = value
        cell.version += 1
    return _arrange(node.result, made, schema, args, kwargs)


def _arrange(
    spec: Any, made: list[LazyTensor | None], schema: OpSchema, args: Any, kwargs: Any
) -> Any:
    if type(spec) is int:
        return made[spec]
    if spec is None:
        return None
    if type(spec) is str:
        position = schema.position(spec)
        return args[position] if position < len(args) else kwargs[spec]
    items = [_arrange(s, made, schema, args, kwargs) for s in spec]
    return tuple(items) if type(spec) is tuple else items
