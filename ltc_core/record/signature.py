"""The signature of a recorded op: what must be equal for it to be the same step again.

Operands go in by number (by meta where an input is read for the first time), structure by value, numbers by type:
their values are inputs of the graph. For an op that writes, the signature also says which operands share memory with
what is written: equal numbers are equal values, not the same memory. An operand that must be made first (a view of
memory that changed, memory nobody wrote yet) raises `Stale`; `make_operands` makes it.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch

from ltc_core import errors, source
from ltc_core.graph.ir import Lens
from ltc_core.graph.op_schema import Arg, OpSchema
from ltc_core.record.trace import Trace, is_stale
from ltc_core.shapes.shape_inference import typed
from ltc_core.tensor.handles import Cell, View, base_of, lens_of
from ltc_core.tensor.lazy_tensor import LazyTensor

__all__ = [
    "DROPPED", "NotRecordable", "SharedRead", "Stale", "argument", "check_device", "find_trace", "scalar", "operand",
    "shared_reads", "two_devices", "written", "written_cell",
]  # fmt: skip

# Arguments that say where a result goes, which the trace knows, or that enter a signature in a way of their own.
DROPPED = frozenset({"device", "pin_memory", "non_blocking", "generator"})


class NotRecordable(Exception):
    """The call needs real values, or first another form, before it can be recorded."""


class Stale(Exception):
    """Some operand has to be made first."""


def find_trace(args: Any, kwargs: Any) -> Trace:
    """Find the trace of the first lazy tensor among an op's arguments."""
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
    """Make the error for an op that is given tensors of two devices."""
    return errors.DeviceMismatchError(
        "Expected all tensors to be on the same device, but found at least two devices, "
        f"{ours} and {other}!",
        got=f"{what} on {other}",
        where=source.user_line(),
        next=f"move one of them: t.to('{ours}')",
    )


def operand(trace: Trace, handle: Cell | View) -> Any:
    """Give an operand's part of the signature: its number, or the meta of an input read for the first time."""
    if handle.trace is not trace:
        raise two_devices(trace.device, handle.trace.device, str(handle.meta))
    if is_stale(handle, trace.epoch):
        raise Stale
    value = handle.value
    return value.index if value.epoch == trace.epoch else trace.bind(value, handle.meta)


def scalar(a: Any, scalars: list[Any]) -> Any:
    """Give a number's part of the signature, its type, and put its value among the step's numbers."""
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
    if code in (Arg.NUMBER, Arg.TENSOR):
        return scalar(a, scalars)
    if code == Arg.STATIC_NUMBER:
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
    """Part of the signature of memory that is written: its number; ~k where it is the k-th of `bases` again."""
    if id(cell) in bases:
        return ~list(bases).index(id(cell))
    bases[id(cell)] = cell
    return operand(trace, cell)


class SharedRead(NamedTuple):
    """A tensor that an op reads from memory that it writes: the part of the k-th written cell under `lens`.

    It is the tensor at position `item` of the list that argument `name` is; `item` is 0 for a single tensor.
    """

    name: str
    item: int
    cell: int
    lens: Lens


def shared_reads(
    schema: OpSchema, args: Any, kwargs: Any, bases: dict[int, Cell]
) -> tuple[SharedRead, ...]:
    """Operands that an op reads from the memory of `bases`, which it writes."""
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
