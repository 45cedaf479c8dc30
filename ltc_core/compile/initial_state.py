"""Values made of nothing: those that begin a state, such as an optimizer's first moments.

`without_operands` rewrites `zeros_like(x)` and its kin so that they do not wait for `x`. `initial_values` finds the
nodes that make the first version of a state that outlives the graph. Used by executors that compile.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch

from ltc_core.graph.ir import Graph, Node, references
from ltc_core.graph.passes import origins

__all__ = ["initial_values", "without_operands"]

aten = torch.ops.aten

# Ops that read nothing of their operand but its metadata; what they fill in with.
_LIKE: dict[torch._ops.OpOverload, int | None] = {
    aten.empty_like.default: None,
    aten.zeros_like.default: 0,
    aten.ones_like.default: 1,
}


def _without_operand(node: Node) -> Node:
    if node.op not in _LIKE:
        return node
    meta, fill = node.outs[0], _LIKE[node.op]
    assert meta is not None
    kwargs = {"dtype": meta.dtype}
    if fill is None or not meta.contiguous:
        if fill is not None:
            return node
        args: tuple[Any, ...] = (tuple(meta.size), meta.stride)
        return dataclasses.replace(node, op=aten.empty_strided.default, args=args, kwargs=kwargs)
    args = (tuple(meta.size), fill)
    return dataclasses.replace(node, op=aten.full.default, args=args, kwargs=kwargs)


def without_operands(graph: Graph) -> Graph:
    """Replace operands of which only the metadata is read: a draw into one would split the graph."""
    return dataclasses.replace(graph, nodes=tuple(map(_without_operand, graph.nodes)))


def initial_values(graph: Graph) -> set[int]:
    """Return the positions of nodes that need nothing, and whose value is written until it is an output."""
    versions = origins(graph.nodes, graph.outputs).values()
    firsts = {older[-1] for older in versions if older}
    return {
        at
        for at, node in enumerate(graph.nodes)
        if node.first in firsts and len(node.outs) == 1 and next(references(node), None) is None
    }
