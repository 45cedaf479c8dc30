"""The plan of a graph's memory: what is written in place, freed and copied.

`plan` decides which writes run in place, when each value can be freed, and which outputs must be copied because another
live value shares their memory. The programs of all executors follow it.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Sequence

import torch

from ltc_core.graph.ir import Graph, Node, references
from ltc_core.graph.passes import origins

__all__ = ["MemoryPlan", "plan"]

aten = torch.ops.aten

# Ops whose result may alias their first operand, although their schema does not say so.
_MAY_ALIAS = frozenset({aten._unsafe_view.default, aten.lift_fresh.default, aten.lift.default})


@dataclasses.dataclass(slots=True)
class MemoryPlan:
    """The result of `plan`.

    Attributes:
        in_place: for each node, for each of its writes, whether it overwrites the old value's memory.
        frees: for each node, the values that can be freed after it.
        copied: outputs that must be copied at the end.
        reuses: output -> donated input whose memory it overwrites.
        origins: output -> its earlier versions, newest first: the old value of the write that made it, and so on. After
            a failed run an output has the newest version that was computed, as in eager.
        peak_bytes: peak memory of the values of the graph, inputs and outputs not counted.
        roots: value -> the value that its memory was made for; equal for values that share memory.
    """

    in_place: list[tuple[bool, ...]]
    frees: list[tuple[int, ...]]
    copied: frozenset[int]
    reuses: dict[int, int]
    origins: dict[int, tuple[int, ...]]
    peak_bytes: int
    roots: dict[int, int]


class _Memory:
    """Which values share memory, at one point of the walk: value -> root, root -> values that may be live."""

    def __init__(self, graph: Graph, last_read: dict[int, int]) -> None:
        self.root = {i: i for i in graph.inputs}
        self.members: dict[int, list[int]] = {i: [i] for i in graph.inputs}
        self.fixed = {i for i in graph.inputs if i not in graph.donated}
        self._last_read = last_read

    def define(self, value: int, root: int) -> None:
        self.root[value] = root
        self.members.setdefault(root, []).append(value)

    def free_after(self, root: int, at: int) -> bool:
        """Whether node `at` may overwrite this memory: it is no input that is kept, and nothing reads it later."""
        if root in self.fixed:
            return False
        alive = [v for v in self.members[root] if self._last_read.get(v, -1) > at]
        self.members[root] = alive
        return not alive


def plan(graph: Graph) -> MemoryPlan:
    """Plan a graph's memory in one walk."""
    end = len(graph.nodes)
    reads = [references(node) for node in graph.nodes]
    last_read: dict[int, int] = {}
    for at, operands in enumerate(reads):
        for value in operands:
            last_read[value] = at
    for value in graph.outputs:
        last_read[value] = end
    memory = _Memory(graph, last_read)
    in_place = []
    for at, node in enumerate(graph.nodes):
        in_place.append(_place(node, at, reads[at], memory))
    copied, reuses = _finish(graph, memory)
    frees = _frees(graph, last_read)
    return MemoryPlan(
        in_place,
        frees,
        copied,
        reuses,
        origins(graph.nodes, graph.outputs),
        _peak(graph, memory, frees),
        memory.root,
    )


def _place(node: Node, at: int, operands: Sequence[int], memory: _Memory) -> tuple[bool, ...]:
    writes = node.writes
    plain = operands[len(writes) :]
    aliases = node.view or node.op in _MAY_ALIAS
    for i in range(len(node.outs) - len(writes)):
        value = node.first + i
        memory.define(value, memory.root[plain[0]] if aliases else value)
    if not writes:
        return ()
    decided = []
    read_too = {memory.root[other] for other in plain}
    num_writes = Counter(memory.root[old] for old in writes)
    for k, old in enumerate(writes):
        root = memory.root[old]
        is_alone = root not in read_too and num_writes[root] == 1
        reuse = is_alone and memory.free_after(root, at)
        decided.append(reuse)
        new = node.first_write + k
        memory.define(new, root if reuse else new)
    return tuple(decided)


def _finish(graph: Graph, memory: _Memory) -> tuple[frozenset[int], dict[int, int]]:
    copied = set()
    reuses = {}
    taken: set[int] = set()
    for value in graph.outputs:
        root = memory.root[value]
        if root in memory.fixed or root in taken:
            copied.add(value)
            continue
        taken.add(root)
        if root in graph.donated:
            reuses[value] = root
    return frozenset(copied), reuses


def _frees(graph: Graph, last_read: dict[int, int]) -> list[tuple[int, ...]]:
    frees: list[list[int]] = [[] for _ in graph.nodes]
    for value in graph.inputs:
        if value in last_read and last_read[value] < len(frees):
            frees[last_read[value]].append(value)
    for at, node in enumerate(graph.nodes):
        for i, meta in enumerate(node.outs):
            if meta is not None:
                when = last_read.get(node.first + i, at)
                if when < len(frees):
                    frees[when].append(node.first + i)
    return [tuple(f) for f in frees]


def _peak(graph: Graph, memory: _Memory, frees: list[tuple[int, ...]]) -> int:
    """Peak bytes of the values of the graph, by their metas; inputs and outputs are not counted."""
    held: dict[int, int] = {}
    users: dict[int, int] = {}
    kept = {memory.root[o] for o in graph.outputs} | set(graph.inputs)
    now = peak = 0
    for node, freed in zip(graph.nodes, frees, strict=True):
        for i, meta in enumerate(node.outs):
            root = memory.root.get(node.first + i)
            if meta is None or root is None or root in kept:
                continue
            users[root] = users.get(root, 0) + 1
            if root not in held:
                held[root] = meta.nbytes
                now += meta.nbytes
        peak = max(peak, now)
        for value in freed:
            root = memory.root[value]
            if root in users:
                users[root] -= 1
                if users[root] == 0 and root in held:
                    now -= held.pop(root)
    return peak
