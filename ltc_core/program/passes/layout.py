"""The memory format of the values that one compiled subgraph passes to another.

Convolutions get channels-last tensors (`lower`). Values between compiled subgraphs keep that format: in the recorded
format they would be converted at the end of one subgraph and back at the start of the next. Called by `partition`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch

from ltc_core.graph.ir import Graph, Node, TensorMeta, references
from ltc_core.program.schedule import Kind, Stage

__all__ = ["keep_channels_last"]

aten = torch.ops.aten
_CONVOLUTIONS = (aten.convolution.default, aten.convolution_backward.default)


def keep_channels_last(graph: Graph, stage_of: Sequence[Stage]) -> Graph:
    """The graph with channels-last metas for the 4-d values between compiled subgraphs, if it has convolutions."""
    if not any(node.op in _CONVOLUTIONS for node in graph.nodes):
        return graph
    chosen = _handed_over(graph, stage_of)
    nodes = tuple(_with_images(node, chosen) if chosen else node for node in graph.nodes)
    return dataclasses.replace(graph, nodes=nodes)


def _handed_over(graph: Graph, stage_of: Sequence[Stage]) -> set[int]:
    """Values that only other compiled subgraphs read, and that nothing overwrites."""
    made_at: dict[int, Stage] = {}
    chosen: set[int] = set()
    others = set(graph.outputs)
    for node, stage in zip(graph.nodes, stage_of, strict=True):
        others.update(node.writes)
        for value in references(node):
            before = made_at.get(value, stage)
            if stage[1] is not Kind.COMPILED or before[1] is not Kind.COMPILED:
                others.add(value)
            elif before != stage:
                chosen.add(value)
        for i in range(len(node.outs)):
            made_at[node.first + i] = stage
    return chosen - others


def _with_images(node: Node, chosen: set[int]) -> Node:
    outs = tuple(
        _channels_last(meta) if node.first + i in chosen and meta is not None else meta
        for i, meta in enumerate(node.outs)
    )
    return node if outs == node.outs else dataclasses.replace(node, outs=outs)


def _channels_last(meta: TensorMeta) -> TensorMeta:
    if len(meta.size) != 4 or not meta.contiguous:
        return meta
    example = torch.empty(
        meta.size, dtype=meta.dtype, device="meta", memory_format=torch.channels_last
    )
    return TensorMeta.like(example)
