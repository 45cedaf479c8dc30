"""In which order the nodes of a graph run, where some of them run op by op and the others are compiled.

A stage is a level and a kind. In a level come first eager nodes, then those that wait for other processes and eager
ones after them, then compiled ones. Used by `subgraph`.
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
    """Assign each node its stage. `eager` are the positions of those that run op by op.

    That is the first one it can have, with two exceptions. What only a later reduction needs comes after the start of
    the one before it, so as to run while that goes on. What needs nothing but inputs comes where it is used.
    """
    nodes = graph.nodes
    eager = _with_operands(nodes, eager)
    found: list[Stage] = [(0, Kind.EAGER)] * len(nodes)
    of_value: dict[int, Stage] = {}
    started = 0  # the level of the last start
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
    """Assign a node its first possible stage; for a compiled one no level before `first_level`."""
    stage = (first_level, Kind.COMPILED) if compiled else (0, Kind.EAGER)
    if node.op in collective.FINISHES:
        stage = 0, Kind.WAITING
    for value in references(node):
        before = of_value.get(value)
        if before is None:
            continue
        level, kind = before
        if kind is Kind.COMPILED and not compiled:  # what it makes is there in the next level only
            stage = max(stage, (level + 1, stage[1]))
        else:
            stage = max(stage, (level, max(kind, stage[1])))
    for i in range(len(node.outs)):
        of_value[node.first + i] = stage
    return stage


def _put_off(nodes: Sequence[Node], found: list[Stage]) -> None:
    """Move compiled nodes that read nothing computed before to where the first one that reads them is.

    Such as an optimizer's steps before it looks at a gradient: they are fused with those after.
    """
    if all(level == 0 for level, _ in found):
        return
    made: set[int] = set()  # by other nodes
    free = []
    for at, node in enumerate(nodes):
        if found[at][1] is Kind.COMPILED and not any(value in made for value in references(node)):
            free.append(at)
        else:
            made.update(range(node.first, node.first + len(node.outs)))
    last_level: dict[int, int] = {}  # at which a value must be there
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
    """Return the positions of the nodes: those the first start needs and it itself, what the second needs more, ...

    The last batch has what no start needs. Each is in the order of `nodes`.
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
    """Map each value to the position of the node that makes it."""
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
    """Add to the nodes that run op by op those of their operands that need nothing compiled."""
    maker = _makers(nodes)
    eager = set(chosen)
    free = set(eager)  # nodes that could run eagerly at the very beginning
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
