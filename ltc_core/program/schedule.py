"""The order in which the nodes of a graph run, if some of them are compiled and the others run op by op.

In: a graph, and which of its nodes are eager (run op by op). Out: a stage, (level, kind), for each node; stages run in
ascending order. Within a level, eager nodes run first, then nodes that block on a collective and the eager nodes that
read their results, then compiled nodes. Called by the executors that compile; the stages go to `subgraph`.
"""

from __future__ import annotations

import enum
from collections.abc import Iterator, Sequence

from ltc_core.graph import collective
from ltc_core.graph.ir import Graph, Node, references

__all__ = ["Kind", "Stage", "schedule"]


class Kind(enum.IntEnum):
    EAGER = 0
    WAITING = 1
    COMPILED = 2


Stage = tuple[int, Kind]


def schedule(graph: Graph, eager: set[int]) -> list[Stage]:
    """Stage of each node. `eager` are the positions of the nodes that run op by op.

    A node gets the earliest stage that its operands allow, with two exceptions. Nodes that feed only all-reduce k+1 are
    scheduled after all-reduce k has started, so the two overlap. Compiled nodes that depend on inputs only are
    scheduled where they are used.
    """
    nodes = graph.nodes
    eager = _with_operands(nodes, eager)
    found: list[Stage] = [(0, Kind.EAGER)] * len(nodes)
    of_value: dict[int, Stage] = {}
    started = 0  # level of the last start of an all-reduce
    *with_starts, rest = _batches(nodes)
    for batch in with_starts:
        for at in batch:
            found[at] = _stage(nodes[at], at not in eager, started, of_value)
        started = found[batch[-1]][0]
    for at in rest:
        found[at] = _stage(nodes[at], at not in eager, 0, of_value)
    _put_off(nodes, found)
    return found


def _stage(node: Node, compiled: bool, first_level: int, of_value: dict[int, Stage]) -> Stage:
    """Earliest stage of a node; a compiled one gets `first_level` at least."""
    stage = (first_level, Kind.COMPILED) if compiled else (0, Kind.EAGER)
    if node.op in collective.FINISHES:
        stage = 0, Kind.WAITING
    for value in references(node):
        before = of_value.get(value)
        if before is None:
            continue
        level, kind = before
        if kind is Kind.COMPILED and not compiled:  # eager nodes read its results one level later
            stage = max(stage, (level + 1, stage[1]))
        else:
            stage = max(stage, (level, max(kind, stage[1])))
    for i in range(len(node.outs)):
        of_value[node.first + i] = stage
    return stage


def _put_off(nodes: Sequence[Node], found: list[Stage]) -> None:
    """Move compiled nodes that depend on inputs only to the level of their first reader.

    An example is the subgraph of an optimizer's step that reads no gradient: it is fused with the subgraph that does.
    """
    if all(level == 0 for level, _ in found):
        return
    made: set[int] = set()  # values of nodes that are not moved
    free = []
    for at, node in enumerate(nodes):
        if found[at][1] is Kind.COMPILED and not any(value in made for value in references(node)):
            free.append(at)
        else:
            made.update(range(node.first, node.first + len(node.outs)))
    last_level: dict[int, int] = {}  # value -> last level at which it can be computed
    of_free = set(free)
    for at in reversed(range(len(nodes))):
        node = nodes[at]
        level, kind = found[at]
        if at in of_free:
            readers = [
                last_level[v]
                for v in range(node.first, node.first + len(node.outs))
                if v in last_level
            ]
            level = min(readers, default=level)
            found[at] = level, kind
        for value in references(node):
            needed = level - (kind is not Kind.COMPILED)
            last_level[value] = min(last_level.get(value, needed), needed)


def _batches(nodes: Sequence[Node]) -> Iterator[list[int]]:
    """Positions of the nodes in batches, one for each start of an all-reduce: the start and what it depends on.

    A node is in the first batch that needs it; the last batch has the nodes that no start needs. Each batch is in the
    order of `nodes`.
    """
    maker = _makers(nodes)
    seen: set[int] = set()
    for at, node in enumerate(nodes):
        if node.op in collective.STARTS:
            batch = _needed(at, nodes, maker, seen)
            seen.update(batch)
            yield batch
    yield [at for at in range(len(nodes)) if at not in seen]


def _makers(nodes: Sequence[Node]) -> dict[int, int]:
    """Value -> position of the node that makes it."""
    return {node.first + i: at for at, node in enumerate(nodes) for i in range(len(node.outs))}


def _needed(start: int, nodes: Sequence[Node], maker: dict[int, int], seen: set[int]) -> list[int]:
    found = {start}
    stack = [start]
    while stack:
        for value in references(nodes[stack.pop()]):
            at = maker.get(value, -1)
            if at >= 0 and at not in seen and at not in found:
                found.add(at)
                stack.append(at)
    return sorted(found)


def _with_operands(nodes: Sequence[Node], chosen: set[int]) -> set[int]:
    """`chosen` and those of their operands that depend on no input and on no chosen node, such as `zeros`."""
    maker = _makers(nodes)
    eager = set(chosen)
    free = set(eager)  # `chosen`, and nodes that depend on no input and on no chosen node
    for at, node in enumerate(nodes):
        if all(v in maker and maker[v] in free - eager for v in references(node)):
            free.add(at)
    stack = list(eager)
    while stack:
        for value in references(nodes[stack.pop()]):
            at = maker.get(value, -1)
            if at in free and at not in eager:
                eager.add(at)
                stack.append(at)
    return eager
