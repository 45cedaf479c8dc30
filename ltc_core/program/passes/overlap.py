"""All-reduces in flight while the rest of a graph computes.

`overlap_reductions` replaces each all-reduce by flat vectors that compiled code fills, one for each bucket, a start for
each vector, and one finish. `program.schedule` then puts other nodes between them. Called by `partition`.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch

from ltc_core.graph import collective
from ltc_core.graph.buckets import deal_backwards
from ltc_core.graph.ir import Graph, Node, Ref, TensorMeta, Write
from ltc_core.graph.lens import apply_lens
from ltc_core.settings import settings

__all__ = ["overlap_reductions"]

aten = torch.ops.aten
_all_reduce = collective.ops.all_reduce
_REDUCTIONS = (_all_reduce.default, collective.ops.all_reduce_.default)


def overlap_reductions(graph: Graph) -> Graph:
    """The graph with its all-reduces over `Overlapping` transports replaced by vectors, starts and a finish."""
    if not any(node.op in _REDUCTIONS for node in graph.nodes):
        return graph
    metas = graph.metas()
    fresh = itertools.count(max(metas) + 1)
    nodes: list[Node] = []
    for node in graph.nodes:
        seen = _operands(node, metas) if node.op in _REDUCTIONS else None
        nodes += [node] if seen is None else _written_out(node, seen, metas, fresh)
    return replace(graph, nodes=tuple(nodes))


def _operands(node: Node, metas: Mapping[int, TensorMeta]) -> list[torch.Tensor] | None:
    """Meta tensors of an all-reduce's operands; None if it must stay one op.

    It stays one op if the transport cannot overlap, or if an operand is not a whole contiguous tensor.
    """
    if not isinstance(collective.transport_of(node.args[-1]), collective.Overlapping):
        return None
    if node.op is _all_reduce.default:
        items, numbers = [node.args[0]], [int(node.args[0])]
    else:
        items, numbers = list(node.args[0]), list(node.writes[:-1])
        if [item.base for item in items] != list(range(len(numbers))):
            return None  # one tensor is an operand twice
    seen = []
    for item, number in zip(items, numbers, strict=True):
        whole = metas[number].meta_tensor()
        part = apply_lens(whole, item.lens) if isinstance(item, Write) else whole
        if not (whole.is_contiguous() and part.is_contiguous() and part.numel() == whole.numel()):
            return None
        seen.append(part)
    return seen


def _written_out(
    node: Node, seen: list[torch.Tensor], metas: Mapping[int, TensorMeta], fresh: Iterator[int]
) -> Iterator[Node]:
    first, _, kind, scale, label, route = node.args
    *written, token = node.writes
    values = [Ref(v) for v in written] or [first]
    plan = collective.reduction_plan(kind, label, seen)
    buckets = list(deal_backwards(seen, settings.bucket_mb))
    token_meta = metas[token]
    flats, scales = [], []
    for chosen in buckets:
        rows = []
        for k in chosen:
            meta = TensorMeta.packed((seen[k].numel(),), seen[k].dtype)
            rows.append(Ref(next(fresh)))
            yield _made(node, aten.reshape.default, (values[k], (-1,)), rows[-1], meta, view=True)
        dtype = seen[chosen[0]].dtype
        last = TensorMeta.packed((seen[chosen[-1]].numel() + collective.TRAILER,), dtype)
        padded = Ref(next(fresh))
        yield _made(
            node,
            aten.constant_pad_nd.default,
            (rows[-1], [0, collective.TRAILER]),
            padded,
            last,
        )
        meta = TensorMeta.packed(
            (sum(seen[k].numel() for k in chosen) + collective.TRAILER,), dtype
        )
        flat = padded
        if len(rows) > 1:
            flat = Ref(next(fresh))
            yield _made(node, aten.cat.default, ([*rows[:-1], padded],), flat, meta)
        scales.append(scale)
        if collective.is_scaled_first(dtype, kind):
            unscaled, flat, scales[-1] = flat, Ref(next(fresh)), 1.0
            yield _made(node, aten.mul.Tensor, (unscaled, scale), flat, meta)
        writes = (int(flat), token)
        reduced, token = next(fresh), next(fresh)
        args = (Write(0, ()), Write(1, ()), kind, plan, route)
        outs = (meta, token_meta)
        yield replace(
            node,
            op=_all_reduce.start,
            args=args,
            first=reduced,
            outs=outs,
            writes=writes,
            result=None,
        )
        flats.append(Ref(reduced))
    shapes = collective.rows_to_ints([metas[int(v)].size for v in values])
    finish = (flats, Write(0, ()), collective.rows_to_ints(buckets), shapes, scales, route)
    # Its results keep the numbers of the all-reduce's results or written values; they are views of the vectors.
    numbers = list(range(len(values)))
    yield replace(node, op=_all_reduce.finish, args=finish, writes=(token,), result=numbers)


def _made(
    node: Node, op: Any, args: tuple[Any, ...], value: Ref, meta: TensorMeta, view: bool = False
) -> Node:
    return Node(op, args, {}, int(value), (meta,), view=view, result=0, line=node.line)
