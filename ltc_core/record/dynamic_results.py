"""What a call of a dynamic step returns, by the metas of its operands and by its sizes.

The recorders pass `op_call` or `view_call` to `Trace.advance`. The `table` of a call is that of all steps whose
patterns differ in the numbers of operands only, with what infers the results that are not in it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from ltc_core.graph.arguments import leaves
from ltc_core.graph.ir import TensorMeta
from ltc_core.graph.lens import lenses_of
from ltc_core.graph.op_schema import Arg, OpSchema
from ltc_core.record.dynamic_shapes import (
    ANY,
    AnyMeta,
    Call,
    Entry,
    Key,
    Pattern,
    are_outs_alike,
    keep,
    may_vary,
)
from ltc_core.record.make_node import NotRecordable, new_results, views
from ltc_core.shapes.shape_inference import Unknown
from ltc_core.tensor.lazy_tensor import LazyTensor, wrap

__all__ = ["op_call", "view_call"]

_OPERAND = ("operand",)  # stands in a template for a tensor
_LIMIT = 100_000

_known: dict[Any, dict[Key, Entry]] = {}


def op_call(schema: OpSchema, args: Any, kwargs: dict[str, Any], dropped: frozenset[str]) -> Call:
    places: list[tuple[int, Any]] = [(-1, None)]
    places += [(k, code) for k, (_, code) in enumerate(zip(args, schema.args, strict=False))]
    for name in kwargs:
        if name not in dropped:
            places += [(-1, None), (schema.position(name), schema.named[name])]
    named = [kwargs[name] for name in sorted(kwargs, key=schema.position)]
    metas = tuple(t._h.meta for t in leaves(args, *named) if type(t) is LazyTensor)
    return Call(tuple(places), metas, _table)


def view_call(meta: TensorMeta, num_static: int) -> Call:
    static = tuple((1 + k, Arg.STATIC) for k in range(num_static))
    return Call(((-1, None), (0, Arg.TENSOR), *static), (meta,), _table)


def _table(
    pattern: Pattern, call: Call, trace: Any, outs: Sequence[TensorMeta | None]
) -> tuple[dict[Key, Entry], Callable[[Key], Entry | None] | None]:
    """Table of results of a step with this pattern, and what infers one that is not in it; None where nothing does."""
    schema = pattern[0]
    if not isinstance(schema, OpSchema) or schema.writes or not may_vary(schema):
        return {}, None
    template = tuple(
        _without_numbers(*row) for row in zip(pattern, _codes(pattern, call), strict=True)
    )
    # Steps of one pattern may differ in the number or the dtypes of their results.
    form = tuple(None if meta is None else meta.dtype for meta in outs)
    key = (template, torch.get_default_dtype(), form)
    if len(_known) >= _LIMIT:
        _known.clear()
    known = _known.setdefault(key, {})
    return known, _Infer(known, schema, template, call, trace, outs)


def _codes(pattern: Pattern, call: Call) -> list[Any]:
    codes = [code for _, code in call.places]
    return codes + [None] * (len(pattern) - len(codes))


def _without_numbers(part: Any, code: Any) -> Any:
    if code not in (Arg.TENSOR, Arg.TENSORS):
        return part
    if type(part) is tuple:
        return tuple(_without_numbers(i, code) for i in part)
    return _OPERAND if type(part) in (int, TensorMeta, AnyMeta) else part


class _Infer:
    """Infers the results of a call from its metas and sizes."""

    def __init__(
        self,
        known: dict[Key, Entry],
        schema: OpSchema,
        template: tuple[Any, ...],
        call: Call,
        trace: Any,
        outs: Sequence[TensorMeta | None],
    ) -> None:
        self._outs = outs
        self._known = known
        self._schema = schema
        self._trace = trace
        self._parts = [
            (position, code, part)
            for part, (position, code) in zip(template, call.places, strict=False)
            if position >= 0
        ]

    def __call__(self, key: Key) -> Entry | None:
        given = iter(key)
        schema = self._schema
        args: list[Any] = []
        kwargs: dict[str, Any] = {}
        sizes = iter([item for item in key if type(item) is int])
        for position, code, part in self._parts:
            item = self._filled(part, code, given, sizes)
            if position == len(args):
                args.append(item)
            else:
                kwargs[schema.names[position]] = item
        static, many = tuple(args[1:]), False
        outs: tuple[TensorMeta | None, ...]
        try:
            if schema.view:
                many, outs = views(schema, key[0], static)
            else:
                outs = new_results(schema, args, kwargs)
        except (Unknown, NotRecordable):
            return None
        if not are_outs_alike(outs, self._outs):
            return None
        entry = Entry(outs)
        if schema.view:
            entry.lenses = lenses_of(schema.op, static, len(outs), many)
        return keep(self._known, key, entry)

    def _filled(self, part: Any, code: Any, metas: Iterator[Any], sizes: Iterator[int]) -> Any:
        if part is _OPERAND:
            return wrap(self._trace.empty(next(metas)))
        if part is ANY:
            return next(sizes)
        if type(part) is type:  # a scalar: its value is an input of the graph
            return part(1)
        if type(part) is tuple:
            if code == Arg.STATIC_SCALAR and len(part) == 2 and type(part[0]) is type:
                return next(sizes) if part[1] is ANY else part[1]
            items = [self._filled(i, code, metas, sizes) for i in part]
            return items if code in (Arg.TENSORS, Arg.SCALARS) else tuple(items)
        return part
