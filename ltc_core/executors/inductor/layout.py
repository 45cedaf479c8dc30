"""The memory format of values between compiled subgraphs.

Convolutions get channels-last tensors (see `lower`). Values between subgraphs keep that format: in the recorded one
they would be converted at the end of a subgraph and back at the beginning of the next. Used by `partition`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch

from ltc_core.compile.schedule import Kind, Stage
from ltc_core.graph.ir import Graph, Node, TensorMeta, references

__all__ = ["keep_channels_last"]

aten = torch.ops.aten
_CONVOLUTIONS = (aten.convolution.default, aten.convolution_backward.default)


def keep_channels_last(graph: Graph, stage_of: Sequence[Stage]) -> Graph:
    """Make images between compiled subgraphs channels-last, if the graph has convolutions."""
    if not any(node.op in _CONVOLUTIONS for node in graph.nodes):
        return graph
    chosen = _handed_over(graph, stage_of)
    nodes = tuple(_with_images(node, chosen) if chosen else node for node in graph.nodes)
    return dataclasses.replace(graph, nodes=nodes)


def _handed_over(graph: Graph, stage_of: Sequence[Stage]) -> set[int]:
    """Find the values that go from compiled subgraphs to others, and nowhere else."""
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
