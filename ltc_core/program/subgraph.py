"""Subgraphs of a graph: each is compiled as a whole, or runs op by op.

A subgraph has a canonical form: values and scalars are numbered from zero, and scalars that are not inputs are
constants. So equal subgraphs of different programs have the same text, and share compiled code. `schedule` decides
which nodes go together; `subgraphs_of` makes the subgraphs for an executor that compiles.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Mapping, Sequence, Set
from typing import Any

import torch

from ltc_core.graph.arguments import map_leaves
from ltc_core.graph.ir import Graph, Node, Ref, Scalar, TensorMeta, references
from ltc_core.graph.passes import prune
from ltc_core.program.scalar_inputs import takes_scalar
from ltc_core.program.schedule import Kind, Stage

__all__ = ["Subgraph", "of_node", "subgraphs_of"]


@dataclasses.dataclass(frozen=True)
class Subgraph:
    """Some nodes of a graph, in canonical form.

    Attributes:
        compiled: whether it is compiled; else it runs op by op.
        graph: its nodes, renumbered; the inputs are its values 0, 1, ...
        inputs: the values of the whole graph that are its inputs.
        outputs: the values of the whole graph that are its outputs.
        nodes: its nodes with the numbers of the whole graph.
        scalars: for each `Scalar` of it, the position among the scalars of a run.
        scalar_types: the Python types of these scalars.
        constants: position of a run's scalar -> its value in the compiled code; another value needs another program.
    """

    compiled: bool
    graph: Graph
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    nodes: tuple[Node, ...]
    scalars: tuple[int, ...]
    scalar_types: tuple[type, ...]
    constants: Mapping[int, Any]

    def text(self) -> str:
        """Text of everything that its compiled code depends on. Cost: about 5 us a node."""
        kinds = " ".join(kind.__name__ for kind in self.scalar_types)
        return "\n".join((kinds, *_graph_rows(self.graph)))


def _graph_rows(graph: Graph) -> list[str]:
    rows = [f"{i} {_meta_text(meta)}" for i, meta in graph.inputs.items()]
    rows += [_node_text(node) for node in graph.nodes]
    rows.append(f"{graph.outputs} {sorted(graph.donated)}")
    return rows


def _meta_text(meta: TensorMeta | None) -> str:
    if meta is None:
        return "-"
    return f"{meta.dtype}{tuple(meta.size)}{meta.stride}{meta.offset}"


def _node_text(node: Node) -> str:
    outs = " ".join(map(_meta_text, node.outs))
    return (
        f"{node.first} {node.op} {node.args} {sorted(node.kwargs.items())} {node.writes} "
        f"{node.result} {node.uses_default_dtype} {outs}"
    )


def subgraphs_of(
    graph: Graph,
    stage_of: Sequence[Stage],
    scalars: Sequence[Any],
    varied: frozenset[int],
    refused: Set[int] = frozenset(),
) -> list[Subgraph]:
    """Subgraphs of a graph, one for each stage, in the order in which they run.

    A subgraph recomputes the views that it reads and another subgraph makes, so they are not passed between subgraphs.

    Args:
        stage_of: the stage of each node.
        scalars: the scalars of the last run.
        varied: positions of scalars that have changed between runs.
        refused: positions of nodes that the compiler refused; compiled subgraphs do not recompute the views among them.
    """
    order = sorted(range(len(stage_of)), key=stage_of.__getitem__)
    groups = [
        (kind is Kind.COMPILED, [graph.nodes[at] for at in chosen])
        for (_, kind), chosen in itertools.groupby(order, key=stage_of.__getitem__)
    ]
    metas = graph.metas()
    maker = {node.first + i: node for node in graph.nodes for i in range(len(node.outs))}
    firsts = {graph.nodes[at].first for at in refused}
    views = [
        _views_of_others(nodes, maker, firsts if compiled else frozenset())
        for compiled, nodes in groups
    ]
    needed_later = set(graph.outputs)
    wanted: list[set[int]] = []
    for (_, nodes), more in zip(reversed(groups), reversed(views), strict=True):
        wanted.append(set(needed_later))
        needed_later.update(_read([*more, *nodes]))
    wanted.reverse()
    subgraphs = []
    unseen = set(graph.outputs)
    for (compiled, nodes), more, later in zip(groups, views, wanted, strict=True):
        made = {node.first + i for node in nodes for i, m in enumerate(node.outs) if m is not None}
        outputs = sorted(made & later)
        unseen -= set(outputs)
        canonical = _Canonical(graph, metas, later, varied, scalars)
        subgraph = canonical.subgraph(compiled, [*more, *nodes], outputs)
        if subgraph is not None:
            subgraphs.append(subgraph)
    if unseen:  # outputs of the graph that are inputs of it
        subgraphs.append(_Canonical(graph, metas, set(), varied, scalars).passing(sorted(unseen)))
    return subgraphs


def of_node(subgraph: Subgraph, node: Node, metas: Mapping[int, TensorMeta]) -> Subgraph:
    """A node of `subgraph`, whose values have `metas`, as a subgraph of its own with all its results as outputs."""
    outputs = [node.first + i for i, meta in enumerate(node.outs) if meta is not None]
    examples = [
        kind() for kind in subgraph.scalar_types
    ]  # its scalars stay inputs: only their types count
    canonical = _Canonical(subgraph.graph, metas, set(metas), frozenset(), examples)
    alone = canonical.subgraph(False, [node], outputs)
    assert alone is not None
    return alone


def _views_of_others(
    nodes: Sequence[Node], maker: Mapping[int, Node], refused: Set[int]
) -> list[Node]:
    """Views of other stages that `nodes` read, and the views those read; without those whose value is in `refused`."""
    here = {node.first for node in nodes}
    found: dict[int, Node] = {}
    stack = list(nodes)
    while stack:
        for value in references(stack.pop()):
            node = maker.get(value)
            if node is None or not node.view or node.first in refused:
                continue
            if node.first not in here | found.keys():
                found[node.first] = node
                stack.append(node)
    return [node for node in dict.fromkeys(maker.values()) if node.first in found]


def _read(nodes: Sequence[Node]) -> set[int]:
    """Values that `nodes` read and do not make."""
    made = {node.first + i for node in nodes for i in range(len(node.outs))}
    return {value for node in nodes for value in references(node)} - made


class _Canonical:
    """Renumbers the values and scalars of one subgraph from zero."""

    def __init__(
        self,
        graph: Graph,
        metas: Mapping[int, TensorMeta],
        later: set[int],
        varied: frozenset[int],
        scalars: Sequence[Any],
    ) -> None:
        self._graph = graph
        self._metas = metas
        self._later = later
        self._varied = varied
        self._scalars = scalars
        self._values: dict[int, int] = {}
        self._positions: dict[int, int] = {}
        self._constants: dict[int, Any] = {}

    def subgraph(
        self, compiled: bool, nodes: Sequence[Node], outputs: Sequence[int]
    ) -> Subgraph | None:
        nodes = prune(nodes, outputs)
        if not nodes:
            return None
        made = {node.first + i for node in nodes for i in range(len(node.outs))}
        read = dict.fromkeys(v for node in nodes for v in references(node) if v not in made)
        for value in read:
            self._values[value] = len(self._values)
        renumbered = tuple(self._node(node, compiled) for node in nodes)
        graph = Graph(
            renumbered,
            {self._values[v]: self._metas[v] for v in read},
            tuple(self._values[v] for v in outputs),
            frozenset(self._values[v] for v in read if self._is_donated(v)),
        )
        positions = tuple(self._positions)
        return Subgraph(
            compiled,
            graph,
            tuple(read),
            tuple(outputs),
            tuple(nodes),
            positions,
            tuple(type(self._scalars[i]) for i in positions),
            self._constants,
        )

    def passing(self, values: Sequence[int]) -> Subgraph:
        """Subgraph without nodes: it returns its inputs."""
        inputs = {k: self._metas[v] for k, v in enumerate(values)}
        donated = frozenset(k for k, v in enumerate(values) if self._is_donated(v))
        graph = Graph((), inputs, tuple(inputs), donated)
        return Subgraph(False, graph, tuple(values), tuple(values), (), (), (), {})

    def _is_donated(self, value: int) -> bool:
        if value in self._later:
            return False
        return value not in self._graph.inputs or value in self._graph.donated

    def _node(self, node: Node, compiled: bool) -> Node:
        first = len(self._values)
        for i in range(len(node.outs)):
            self._values[node.first + i] = first + i
        item = functools.partial(self._item, op=node.op, compiled=compiled)
        args = map_leaves(item, node.args)
        kwargs = {k: map_leaves(item, a) for k, a in node.kwargs.items()}
        writes = tuple(self._values[w] for w in node.writes)
        return dataclasses.replace(node, args=args, kwargs=kwargs, first=first, writes=writes)

    def _item(self, item: Any, op: torch._ops.OpOverload, compiled: bool) -> Any:
        kind = type(item)
        if kind is Ref:
            return Ref(self._values[item])
        if kind is Scalar:
            return self._number(int(item), op, compiled)
        return item

    def _number(self, position: int, op: torch._ops.OpOverload, compiled: bool) -> Any:
        value = self._scalars[position]
        if compiled and not takes_scalar(op, value, position in self._varied):
            self._constants[position] = value
            return value
        return Scalar(self._positions.setdefault(position, len(self._positions)))
