"""What a failure leaves: the node that failed, and the data that do not depend on it.

A run of instructions stops with `SubgraphFailure`. `salvage` computes what is left of the outputs, and a `Program` ends
with `NodeFailure`, which carries it to the launch.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from ltc_core.graph.ir import Node

__all__ = ["Cause", "NodeFailure", "Salvaged", "SubgraphFailure"]

# A failed node, and the exception it raised.
Cause = tuple[Node, BaseException]


@dataclasses.dataclass(slots=True)
class Salvaged:
    """What is left of a graph's outputs after an op failed, or after an input was lost.

    Attributes:
        data: output -> its data, for the outputs that are not lost.
        older: the outputs in `data` that have an earlier version than the graph was to make.
        causes: lost output -> the failure that it is lost to, if that is not the first one.
    """

    data: dict[int, Any]
    older: frozenset[int] = frozenset()
    causes: dict[int, Cause] = dataclasses.field(default_factory=dict)


class SubgraphFailure(Exception):
    """A node of a subgraph failed.

    Attributes:
        node: the node; None if it may be any node of the subgraph.
        values: number -> data, for all values alive at the failure; the results of the failed node are not among them.
    """

    def __init__(self, node: Node | None, values: dict[int, Any]) -> None:
        super().__init__(str(node))
        self.node = node
        self.values = values


class NodeFailure(Exception):
    """A node failed while a program ran.

    Attributes:
        node: the node; None if the program does not know which one.
        left: what is left of the outputs.
    """

    def __init__(self, node: Node | None, left: Salvaged) -> None:
        super().__init__(str(node))
        self.node = node
        self.left = left
