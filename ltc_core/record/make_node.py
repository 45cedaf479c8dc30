"""The node of a new step: an op that was not recorded at this point of the trace before.

`recorder` and `view_recorder` pass `grow` and `grow_view` to `Trace.advance`. Both infer the results' metadata
(`shapes.shape_inference`) and return a `graph.ir.Node` with its operands by number. They raise `Unknown` or
`NotRecordable` for a call that cannot be recorded.
"""

from __future__ import annotations

from typing import Any

import torch

from ltc_core import errors, source
from ltc_core.graph.arguments import leaves
from ltc_core.graph.ir import Node, Ref, Scalar, TensorMeta, Write
from ltc_core.graph.lens import open_lens
from ltc_core.graph.op_schema import Arg, OpSchema
from ltc_core.record import modules
from ltc_core.record.signature import DROPPED, NotRecordable, shared_reads
from ltc_core.record.trace import Trace
from ltc_core.settings import settings
from ltc_core.shapes.shape_inference import Unknown, infer
from ltc_core.tensor.handles import Cell, base_of, lens_of
from ltc_core.tensor.lazy_tensor import LazyTensor

__all__ = [
    "NotRecordable", "OrderMatters", "OutResized", "grow", "grow_view", "new_results", "views",
]  # fmt: skip

_NONE: dict[str, Any] = {}  # shared by all nodes without keyword arguments


class OutResized(NotRecordable):
    """`out=` tensors must be resized first, to the metas in `resized`."""

    def __init__(self, resized: list[tuple[LazyTensor, TensorMeta]]) -> None:
        super().__init__()
        self.resized = resized


class OrderMatters(NotRecordable):
    """One tensor of a list must be written before the next is read: they share memory."""


def grow_view(
    schema: OpSchema, trace: Trace, operand: Ref, meta: TensorMeta, static: tuple[Any, ...]
) -> Node:
    many, outs = views(schema, meta, static)
    return Node(
        schema.op, (operand, *static), _NONE, trace.count, outs, view=True,
        result=list(range(len(outs))) if many else 0, line=source.user_line(),
        module=modules.module_path(),
    )  # fmt: skip


def views(
    schema: OpSchema, meta: TensorMeta, static: tuple[Any, ...]
) -> tuple[bool, tuple[TensorMeta, ...]]:
    """Whether a view op returns a list, and the metas of its results."""
    try:
        result = infer(schema, (meta, *static), {})
    except Unknown:
        result = _view_of_any_strides(schema, meta, static)
    many = isinstance(result, list | tuple)
    return many, tuple(result) if many else (result,)


def _view_of_any_strides(schema: OpSchema, meta: TensorMeta, static: tuple[Any, ...]) -> TensorMeta:
    """Support `x.t().view(-1)`: lazy tensors appear to be contiguous, so any shape that fits is a view."""
    if schema.op is torch.ops.aten.view.default:
        packed = TensorMeta.packed(meta.size, meta.dtype)
        return infer(schema, (packed, *static), {})  # type: ignore[no-any-return]
    return infer(schema, (meta, *static), {})  # type: ignore[no-any-return]


class _Template:
    """Turns an op's arguments into a node's: operands into `Ref`, written operands into `Write`, scalars into `Scalar`.

    It takes the arguments in the order in which the signature was built, so that scalars keep their positions.
    """

    def __init__(self, trace: Trace, bases: list[Cell], written: set[int]) -> None:
        self._next = len(trace.scalars)
        self._bases = {id(cell): k for k, cell in enumerate(bases)}
        self._written = written

    def make(self, a: Any, code: Arg) -> Any:
        if type(a) is LazyTensor:
            if id(a) in self._written:
                return Write(self._bases[id(base_of(a._h))], lens_of(a._h))
            return Ref(a._h.value.index)
        if code in (Arg.STATIC, Arg.STATIC_SCALAR):
            return tuple(a) if type(a) is list else a
        if isinstance(a, list | tuple):
            return [self.make(i, Arg.TENSOR) for i in a]
        if isinstance(a, bool | int | float | complex):
            self._next += 1
            return Scalar(self._next - 1)
        return None if code == Arg.GENERATOR else a


def grow(
    schema: OpSchema, trace: Trace, args: Any, kwargs: dict[str, Any], bases: list[Cell]
) -> Node:
    """The node of a new step; `bases` are the cells that the op writes."""
    written = _written_tensors(schema, args, kwargs)
    if any(t._h.meta.overlaps for t in written):
        raise NotRecordable  # eager refuses most such writes; it then raises at the user's call
    if settings.use_bf16 or settings.downcast_bf16:
        _refuse_writes_to_bits(written)
    if bases and schema.args[0] == Arg.TENSORS:
        _refuse_order(schema, args, kwargs, written, bases)
    result = _infer(schema, args, kwargs)
    outs, spec = _flatten_result(schema, result)
    _check_out_sizes(schema, result, args, kwargs)
    template = _Template(trace, bases, {id(t) for t in written})
    node_args = tuple(template.make(a, c) for a, c in zip(args, schema.args, strict=False))
    node_kwargs = {
        k: template.make(v, schema.named[k]) for k, v in kwargs.items() if k not in DROPPED
    } or _NONE
    if schema.draws:
        node_kwargs = {**node_kwargs, "generator": Write(len(bases) - 1, ())}
    return Node(
        schema.op, node_args, node_kwargs, trace.count, (*outs, *(c.meta for c in bases)),
        tuple(cell.value.index for cell in bases), result=spec, line=source.user_line(),
        uses_default_dtype=_uses_default_dtype(outs, args, kwargs), module=modules.module_path(),
    )  # fmt: skip


def new_results(
    schema: OpSchema, args: Any, kwargs: dict[str, Any]
) -> tuple[TensorMeta | None, ...]:
    """Metas of the results of an op that writes nothing."""
    return tuple(_flatten_result(schema, _infer(schema, args, kwargs))[0])


def _refuse_order(
    schema: OpSchema, args: Any, kwargs: Any, written: list[LazyTensor], bases: list[Cell]
) -> None:
    """Raise `OrderMatters` if the order matters in which an op on lists writes its tensors: it is then not one node."""
    position = {id(cell): k for k, cell in enumerate(bases)}
    cells = [position[id(base_of(t._h))] for t in written]
    for read in shared_reads(schema, args, kwargs, {id(cell): cell for cell in bases}):
        if any(cell == read.cell and item != read.item for item, cell in enumerate(cells)):
            raise OrderMatters
    if len(set(cells)) < len(cells):
        for t in written:
            _, copies = open_lens(base_of(t._h).meta.meta_tensor(), lens_of(t._h))
            if copies:  # each copy is written back as a whole: the last one hides the other writes
                raise OrderMatters


def _refuse_writes_to_bits(written: list[LazyTensor]) -> None:
    """Raise for a write through `view(dtype)`: under LTC_USE_BF16 the stored bits are not those of the dtype."""
    if any(step.op is torch.ops.aten.view.dtype for t in written for step in lens_of(t._h)):
        raise errors.UnsupportedOpError(
            "a write through view(dtype): floats are stored as something narrower",
            where=source.user_line(),
            next="unset LTC_USE_BF16 / LTC_DOWNCAST_BF16, or write the tensor itself",
        )


def _infer(schema: OpSchema, args: Any, kwargs: dict[str, Any]) -> Any:
    try:
        return infer(schema, args, kwargs)
    except Unknown as unknown:
        # An op that only writes has no results to infer; some fused optimizers have no meta kernel.
        if schema.returns or not isinstance(unknown.__cause__, NotImplementedError):
            raise
        return None


def _uses_default_dtype(outs: list[TensorMeta | None], args: Any, kwargs: dict[str, Any]) -> bool:
    """Whether a result's dtype may be torch's default dtype: it is a float dtype, and no operand has one."""
    if not any(_is_float(meta.dtype) for meta in outs if meta is not None):
        return False
    given = (t._h.meta for t in leaves(args, *kwargs.values()) if type(t) is LazyTensor)
    return not any(_is_float(meta.dtype) for meta in given)


def _is_float(dtype: torch.dtype) -> bool:
    return dtype.is_floating_point or dtype.is_complex


def _written_tensors(schema: OpSchema, args: Any, kwargs: dict[str, Any]) -> list[LazyTensor]:
    found: list[LazyTensor] = []
    for name in schema.writes:
        item = schema.given(name, args, kwargs)
        found += [item] if type(item) is LazyTensor else (item or [])
    return found


def _flatten_result(schema: OpSchema, result: Any) -> tuple[list[TensorMeta | None], Any]:
    """New values among an op's results, and what the op returns.

    It returns a position in that list, the name of a written argument, or a list or tuple of these.
    """
    outs: list[TensorMeta | None] = []

    def place(item: Any) -> Any:
        if isinstance(item, list | tuple):
            return [place(i) for i in item]
        if item is not None and not isinstance(item, TensorMeta):
            raise Unknown(f"a result of type {type(item).__name__}")
        outs.append(item)
        return len(outs) - 1

    returns = schema.returns
    if not returns:
        return outs, None
    items = (result,) if len(returns) == 1 else result
    spec = tuple(
        place(item) if name is None else name for name, item in zip(returns, items, strict=True)
    )
    return outs, spec[0] if len(spec) == 1 else spec


def _check_out_sizes(schema: OpSchema, result: Any, args: Any, kwargs: dict[str, Any]) -> None:
    items = (result,) if len(schema.returns) == 1 else result
    resized = []
    for name, item in zip(schema.returns, items or (), strict=False):
        if name is None or not isinstance(item, TensorMeta):
            continue
        written = schema.given(name, args, kwargs)
        if item.size != written._h.meta.size:
            resized.append((written, TensorMeta.packed(item.size, item.dtype)))
    if resized:
        raise OutResized(resized)
