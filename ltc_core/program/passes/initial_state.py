"""Initial values of state, such as the zeros of an optimizer's moments.

`without_operands` rewrites `zeros_like(x)` and similar ops so that they do not read `x`. `initial_values` finds the
nodes that make the first version of state that is an output of the graph. Used by the executors that compile.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch

from ltc_core.graph.ir import Graph, Node, references
from ltc_core.graph.passes import origins

__all__ = ["initial_values", "without_operands"]

aten = torch.ops.aten

# Op that reads only the metadata of its operand -> the value it fills the result with.
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
    """The graph with `empty_like`, `zeros_like` and `ones_like` replaced by ops without operands.

    A random draw into `empty_like(x)` runs op by op; if it had to wait for a compiled `x`, it would split the graph.
    """
    return dataclasses.replace(graph, nodes=tuple(map(_without_operand, graph.nodes)))


def initial_values(graph: Graph) -> set[int]:
    """Positions of the nodes that read no value, and whose value later writes turn into an output."""
    versions = origins(graph.nodes, graph.outputs).values()
    firsts = {older[-1] for older in versions if older}
    return {
        at
        for at, node in enumerate(graph.nodes)
        if node.first in firsts and len(node.outs) == 1 and not references(node)
    }
