"""The signature of a recorded op: calls with equal signatures are the same step.

An operand enters by number, or by meta if the op is the first to read this input. Structure enters by value. A scalar
enters by type: its value is an input of the graph. For an op that writes, the signature also says which operands share
memory with the written ones: equal numbers mean equal values, not the same memory. An operand that must be recorded
first raises `Stale` (a view of a cell that changed, memory that nobody wrote yet); `view_recorder.make_operands`
records it. `recorder` builds signatures from these parts.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from ltc_core import errors, source
from ltc_core.graph.op_schema import Arg, OpSchema
from ltc_core.record.dynamic_shapes import SharedRead
from ltc_core.record.trace import Trace, is_stale
from ltc_core.shapes.shape_inference import typed
from ltc_core.tensor.handles import Cell, View, base_of, lens_of
from ltc_core.tensor.lazy_tensor import LazyTensor

__all__ = [
    "DROPPED", "NotRecordable", "SharedRead", "Stale", "argument", "check_device", "find_trace", "scalar", "operand",
    "shared_reads", "two_devices", "written", "written_cell",
]  # fmt: skip

# Arguments that do not enter by name: they say where a result goes, which the trace knows. The generator enters as a
# written operand.
DROPPED = frozenset({"device", "pin_memory", "non_blocking", "generator"})


class NotRecordable(Exception):
    """The call cannot be recorded as it is: `ops.dispatch` changes it or runs it on real values."""


class Stale(Exception):
    """Some operand must be recorded first."""


def find_trace(args: Any, kwargs: Any) -> Trace:
    """The trace of the first lazy tensor among an op's arguments."""
    stack = [*args, *(kwargs.values() if kwargs else ())]
    for item in stack:
        if type(item) is LazyTensor:
            return item._h.trace  # type: ignore[no-any-return]
        if isinstance(item, list | tuple):
            for i in item:
                if type(i) is LazyTensor:
                    return i._h.trace  # type: ignore[no-any-return]
    raise NotRecordable


def two_devices(ours: torch.device, other: torch.device, what: str) -> errors.DeviceMismatchError:
    """The error for an op with tensors of two devices."""
    return errors.DeviceMismatchError(
        "Expected all tensors to be on the same device, but found at least two devices, "
        f"{ours} and {other}!",
        got=f"{what} on {other}",
        where=source.user_line(),
        next=f"move one of them: t.to('{ours}')",
    )


def operand(trace: Trace, handle: Cell | View) -> Any:
    """An operand's part of the signature: its number, or the meta of an input that is read for the first time."""
    if handle.trace is not trace:
        raise two_devices(trace.device, handle.trace.device, str(handle.meta))
    if is_stale(handle, trace.epoch):
        raise Stale
    value = handle.value
    return value.index if value.epoch == trace.epoch else trace.bind(value, handle.meta)


def scalar(a: Any, scalars: list[Any]) -> Any:
    """A scalar's part of the signature, which is its type; its value is appended to `scalars`."""
    if a is None:
        return None
    if isinstance(a, bool | int | float | complex):
        scalars.append(a)
        return type(a)
    if isinstance(a, torch.Tensor):
        raise NotRecordable
    return a


def _sequence(trace: Trace, a: Any, code: Arg, scalars: list[Any]) -> Any:
    if type(a) not in (list, tuple):
        return scalar(a, scalars) if code != Arg.GENERATOR else None
    return tuple([argument(trace, i, Arg.TENSOR, scalars) for i in a])


def argument(trace: Trace, a: Any, code: Arg, scalars: list[Any]) -> Any:
    if type(a) is LazyTensor:
        h = a._h
        v = h.value
        if v.epoch == trace.epoch and not is_stale(h, trace.epoch):
            return v.index
        return operand(trace, h)
    if code == Arg.STATIC:
        return tuple(a) if type(a) is list else a
    if code in (Arg.SCALAR, Arg.TENSOR):
        return scalar(a, scalars)
    if code == Arg.STATIC_SCALAR:
        return typed(a)
    return _sequence(trace, a, code, scalars)


def check_device(trace: Trace, device: Any) -> None:
    if device is not None:
        wanted = torch.device(device)
        if wanted.type != trace.device.type or wanted.index not in (None, trace.device.index):
            raise NotRecordable


def written(trace: Trace, a: Any, bases: dict[int, Cell]) -> Any:
    if type(a) is LazyTensor:
        handle = a._h
        scalar = written_cell(trace, base_of(handle), bases)
        return scalar if type(handle) is Cell else (scalar, lens_of(handle))
    if not isinstance(a, list | tuple):
        raise NotRecordable
    return tuple([written(trace, i, bases) for i in a])


def written_cell(trace: Trace, cell: Cell, bases: dict[int, Cell]) -> Any:
    """A written cell's part of the signature: as `operand` returns it, or ~k if it is the k-th of `bases` again."""
    if id(cell) in bases:
        return ~list(bases).index(id(cell))
    bases[id(cell)] = cell
    return operand(trace, cell)


def shared_reads(
    schema: OpSchema, args: Any, kwargs: Any, bases: dict[int, Cell]
) -> tuple[SharedRead, ...]:
    """Operands that an op reads from the cells that it writes, `bases`."""
    found = []
    for name, a in _read_arguments(schema, args, kwargs):
        if type(a) is LazyTensor:
            a = (a,)
        elif type(a) not in (list, tuple):
            continue
        for item, t in enumerate(a):
            if type(t) is LazyTensor and id(base_of(t._h)) in bases:
                cell = list(bases).index(id(base_of(t._h)))
                found.append(SharedRead(name, item, cell, lens_of(t._h)))
    return tuple(found)


def _read_arguments(schema: OpSchema, args: Any, kwargs: Any) -> Iterator[tuple[str, Any]]:
    writes = schema.writes
    for name, a in zip(schema.names, args, strict=False):
        if name not in writes:
            yield name, a
    for name, a in kwargs.items():
        if name not in writes:
            yield name, a
