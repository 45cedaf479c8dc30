"""Walks over the nodes of a graph: which of them the outputs need, how many there are of each op, earlier versions.

`runtime.program_cache` prunes what a cut recorded.
"""

from __future__ import annotations

from collections.abc import Sequence

from ltc_core.graph.ir import Node, references

__all__ = ["count_ops", "origins", "prune"]


def prune(nodes: Sequence[Node], outputs: Sequence[int]) -> tuple[Node, ...]:
    """Keep the nodes that the outputs need. O(size of the graph)."""
    needed = set(outputs)
    kept = []
    for node in reversed(nodes):
        first = node.first
        if first in needed or any(
            map(needed.__contains__, range(first + 1, first + len(node.outs)))
        ):
            kept.append(node)
            needed.update(references(node))
    return tuple(reversed(kept))


def count_ops(nodes: Sequence[Node]) -> dict[str, int]:
    """Count the nodes by ATen name."""
    counts: dict[str, int] = {}
    for node in nodes:
        counts[node.op._opname] = counts.get(node.op._opname, 0) + 1
    return counts


def origins(nodes: Sequence[Node], values: Sequence[int]) -> dict[int, tuple[int, ...]]:
    """Earlier versions of each of `values`, newest first: the old value of the write that made it, and so on."""
    before = {node.first_write + k: old for node in nodes for k, old in enumerate(node.writes)}
    found = {}
    for value in values:
        chain = []
        version = value
        while version in before:
            version = before[version]
            chain.append(version)
        found[value] = tuple(chain)
    return found
