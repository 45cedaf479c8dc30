"""Recording views: a view op on a handle returns another handle on the same cell.

`recorder` uses `record_view` as the handler of view ops. `record_view_step` records one step of a lens on a value, with
the signature that the op has when the user calls it, so that both are the same step of the trace. `make_operands`
records what a stale operand needs: the view steps of a part whose cell has changed, or memory that nobody wrote yet.
"""

from __future__ import annotations

from typing import Any

import torch

from ltc_core import source
from ltc_core.graph.arguments import leaves
from ltc_core.graph.ir import Node, Ref, TensorMeta, ViewStep
from ltc_core.graph.lens import lenses_of
from ltc_core.graph.op_schema import Arg, OpSchema
from ltc_core.record import modules
from ltc_core.record.dynamic_results import view_call
from ltc_core.record.dynamic_shapes import Call
from ltc_core.record.make_node import grow_view
from ltc_core.record.signature import NotRecordable, Stale, operand
from ltc_core.record.trace import Step, Trace, is_stale
from ltc_core.tensor.handles import Cell, Handle, Value, View, base_of, lens_of
from ltc_core.tensor.lazy_tensor import LazyTensor, wrap
from ltc_core.uninterrupted import uninterrupted

__all__ = ["make_operand", "make_operands", "record_view", "record_view_step"]


def record_view(schema: OpSchema, args: Any, kwargs: dict[str, Any]) -> Any:
    """Record a view op. Returns its view, or a list of views."""
    is_inference = args[0].is_inference()
    if is_inference != torch.is_inference_mode_enabled():
        with torch.inference_mode(is_inference):  # a view is an inference tensor if its base is
            return _record_view(schema, args, kwargs)
    return _record_view(schema, args, kwargs)


def _record_view(schema: OpSchema, args: Any, kwargs: dict[str, Any]) -> Any:
    origin = args[0]
    if type(origin) is not LazyTensor:
        raise NotRecordable
    handle = origin._h
    trace = handle.trace
    static = tuple([tuple(a) if type(a) is list else a for a in args[1:]])
    if kwargs:
        static += tuple(a for name, a in kwargs.items() if name in schema.names)
    return _record_view_on(trace, schema, handle, static)


def _record_view_on(trace: Trace, schema: OpSchema, handle: Handle, static: tuple[Any, ...]) -> Any:
    if trace.count >= trace.limit:
        trace.on_limit()  # type: ignore[misc]  # it cuts, which waits
    with trace.lock:
        return _record_step(trace, schema, handle, static)


@uninterrupted
def _record_step(trace: Trace, schema: OpSchema, handle: Handle, static: tuple[Any, ...]) -> Any:
    try:
        before = trace.count
        try:
            key = (schema, operand(trace, handle), *static)
        except Stale:
            make_operand(handle)
            before = trace.count
            key = (schema, operand(trace, handle), *static)
        sizes: list[Any] = []
        step = trace.advance(
            key,
            lambda: grow_view(schema, trace, Ref(handle.value.index), handle.meta, static),
            before,
            sizes,
            lambda: view_call(handle.meta, len(static)),
        )
        trace.scalars += sizes
        return _wrap_views(trace, step, base_of(handle), lens_of(handle), static)
    except BaseException:
        trace.rewind()
        raise


def _wrap_views(trace: Trace, step: Step, base: Cell, lens: Any, static: tuple[Any, ...]) -> Any:
    node = step.node
    assert node is not None
    tensors = []
    for k, (meta, view_lens) in enumerate(zip(step.outs, _lenses(step, static), strict=True)):
        assert meta is not None
        trace.note_size(meta, node.outs[k])
        tensors.append(wrap(View(base, lens + view_lens, meta, trace.define_view())))
    return tensors[0] if type(node.result) is int else tensors


def _lenses(step: Step, static: tuple[Any, ...]) -> tuple[tuple[ViewStep], ...]:
    """The lens of each result of a view op, which is one step."""
    of: Any = step if step.dynamic is None else step.dynamic.now
    if of.lenses is None:
        node = step.node
        assert node is not None
        of.lenses = lenses_of(node.op, static, len(node.outs), type(node.result) is not int)
    return of.lenses  # type: ignore[no-any-return]


def record_view_step(
    trace: Trace, value: Value, meta: TensorMeta, view: ViewStep
) -> tuple[Value, TensorMeta]:
    """Record one view op on a value, with the signature that it has when the user calls it."""
    before = trace.count
    schema = OpSchema.of(view.op)
    number = value.index if value.epoch == trace.epoch else trace.bind(value, meta)
    sizes: list[Any] = []
    step = trace.advance(
        (schema, number, *view.args),
        lambda: grow_view(schema, trace, Ref(value.index), meta, view.args),
        before,
        sizes,
        lambda: view_call(meta, len(view.args)),
    )
    trace.scalars += sizes
    outs = step.outs
    values = [trace.define_view() for _ in outs]
    which = view.which or 0
    return values[which], outs[which]  # type: ignore[return-value]


def make_operands(args: Any, kwargs: Any) -> None:
    """Record what stale operands of an op need: the view steps of a view, or memory that nobody wrote yet."""
    for item in leaves(args, *(kwargs.values() if kwargs else ())):
        if type(item) is LazyTensor:
            make_operand(item._h)


def make_operand(handle: Cell | View) -> None:
    trace = handle.trace
    base = base_of(handle)
    if is_stale(base, trace.epoch):
        _record_empty(trace, base)
    if type(handle) is not Cell and is_stale(handle, trace.epoch):
        value, meta = base.value, base.meta
        for step in lens_of(handle):
            value, meta = record_view_step(trace, value, meta, step)
        handle.value = value
        handle.version = base.version


def _record_empty(trace: Trace, cell: Cell) -> None:
    meta = cell.meta
    op = torch.ops.aten.empty_strided.default
    node_args = (tuple(meta.size), meta.stride)

    def grow() -> Node:
        return Node(
            op,
            node_args,
            {"dtype": meta.dtype},
            trace.count,
            (meta,),
            result=0,
            line=source.user_line(),
            module=modules.module_path(),
        )

    sizes: list[Any] = []
    key = (op, *node_args, meta.dtype)  # the op instead of its schema: no call of a user has it
    step = trace.advance(key, grow, trace.count, sizes, lambda: _MEMORY)
    trace.scalars += sizes
    trace.note_size(meta, step.node.outs[0])  # type: ignore[union-attr]
    cell.rebind(trace.define())


# A call for memory: the sizes and the strides decide.
_MEMORY = Call(
    ((-1, None), (0, Arg.STATIC), (1, Arg.STATIC), (-1, None)), (), lambda *_: ({}, None)
)
