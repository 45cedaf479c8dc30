"""`Backend`: what an executor that compiles says about a graph; `divide` makes the subgraphs of it.

In: a graph and the scalars of a run. Out: subgraphs that run one after the other, compiled or op by op.
"""

from __future__ import annotations

import abc
from collections.abc import Callable, Collection, Mapping, Sequence, Set
from typing import Any

from ltc_core.graph.ir import Graph
from ltc_core.program.schedule import Stage, schedule
from ltc_core.program.subgraph import Subgraph, subgraphs_of

__all__ = ["Backend", "Pass", "divide"]

Pass = Callable[[Graph], Graph]


class Backend(abc.ABC):
    """How one executor compiles graphs.

    Attributes:
        passes: what rewrites a graph before it is divided, in order.
    """

    passes: Sequence[Pass] = ()

    @abc.abstractmethod
    def refuses(self, graph: Graph, scalars: Sequence[Any]) -> Mapping[int, str]:
        """Positions of the nodes that are not compiled, each with the reason in words."""

    def laid_out(self, graph: Graph, stages: Sequence[Stage]) -> Graph:
        """The graph with other strides for values that go from one compiled subgraph to another."""
        return graph

    def has_no_view(self, graph: Graph) -> Set[int]:
        """Positions of views that compiled subgraphs cannot recompute."""
        return frozenset()


def divide(
    graph: Graph, backend: Backend, scalars: Sequence[Any], varied: frozenset[int]
) -> tuple[Graph, list[Subgraph]]:
    """The rewritten graph, and its subgraphs in the order in which they run.

    Args:
        scalars: the scalars of the last run.
        varied: positions of scalars that have changed between runs.
    """
    for rewrite in backend.passes:
        graph = rewrite(graph)
    refused: Collection[int] = backend.refuses(graph, scalars)
    stages = schedule(graph, set(refused))
    graph = backend.laid_out(graph, stages)
    return graph, subgraphs_of(graph, stages, scalars, varied, backend.has_no_view(graph))
