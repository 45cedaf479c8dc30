"""A compiled program: the parts of a graph, one after the other, on the data of a run.

How a part runs is its `Link`. Parts that are not compiled run on the reference executor: `EagerLink`. What compiled
ones do is the executor's own; `inductor.chain` and `torch_xla` have a link each.
"""

from __future__ import annotations

import abc
from collections.abc import Callable, Generator, Mapping, Sequence
from typing import Any

import torch

from ltc_core import collective
from ltc_core.executors.base import NodeFailure
from ltc_core.executors.part import Part
from ltc_core.executors.reference import ReferenceProgram
from ltc_core.graph import Graph, Node
from ltc_core.passes import origins, plan

__all__ = ["Chain", "EagerLink", "Link", "storage_of"]


class Link(abc.ABC):
    """How a part runs.

    Attributes:
        part: the part.
        waits: whether it waits for other processes.
    """

    waits = False

    def __init__(self, part: Part) -> None:
        self.part = part

    @abc.abstractmethod
    def run(self, values: dict[int, Any], scalars: Sequence[Any]) -> None:
        """Run on the values of the whole graph, and add to them what it makes.

        Raises:
            NodeFailure: in the part's own numbers.
        """

    def whole_node(self, node: Node | None) -> Node | None:
        """Give a node of the part as it is in the whole graph."""
        return None if node is None else self.part.nodes[self.part.graph.nodes.index(node)]

    def whole_numbers(self, salvaged: Mapping[int, Any]) -> dict[int, Any]:
        """Name what a failed run left by its numbers in the whole graph."""
        names = dict(zip(self.part.graph.outputs, self.part.outputs, strict=True))
        return {names[i]: data for i, data in salvaged.items()}


def storage_of(data: torch.Tensor) -> int:
    """Give what tensors that share memory have in common."""
    return int(data.untyped_storage()._cdata)


class Chain:
    """Runs parts.

    Args:
        graph: the whole graph.
        links: how its parts run, in order.
        memory_of: gives what data that share memory have in common.
    """

    def __init__(
        self,
        graph: Graph,
        links: Sequence[Link],
        memory_of: Callable[[Any], int] = storage_of,
    ) -> None:
        self._inputs = tuple(graph.inputs)
        self._outputs = graph.outputs
        self._origins = origins(graph.nodes, graph.outputs)
        self._donated = graph.donated
        self._links = links
        self._memory_of = memory_of
        parts = [link.part for link in links]
        self._constants = {k: v for part in parts for k, v in part.constants.items()}
        self._frees = _frees(graph, parts)

    def fits(self, scalars: Sequence[Any]) -> bool:
        """Tell whether this run has the numbers that the program was compiled for."""
        return all(_same(scalars[k], v) for k, v in self._constants.items())

    def run_in_steps(
        self, inputs: Sequence[Any], scalars: Sequence[Any]
    ) -> Generator[None, None, list[Any]]:
        """Run; yield before each part that waits for other processes."""
        values = dict(zip(self._inputs, inputs, strict=True))
        for link, frees in zip(self._links, self._frees, strict=True):
            if link.waits:
                yield
            try:
                link.run(values, scalars)
            except NodeFailure as failure:
                values.update(link.whole_numbers(failure.salvaged))
                node = link.whole_node(failure.node)
                raise NodeFailure(node, self._salvage(values)) from failure.__cause__
            for value in frees:
                del values[value]
        return [values[i] for i in self._outputs]

    def _salvage(self, values: Mapping[int, Any]) -> dict[int, Any]:
        """Find the newest version of each output there is."""
        memory_of = self._memory_of
        taken = {memory_of(values[i]) for i in self._inputs if i not in self._donated}
        kept = {}
        for output, versions in self._origins.items():
            data = next((values[v] for v in (output, *versions) if v in values), None)
            if data is not None:
                memory = memory_of(data)
                kept[output] = data.clone() if memory in taken else data
                taken.add(memory)
        return kept


def _frees(graph: Graph, parts: Sequence[Part]) -> list[list[int]]:
    """List, for each part, what nobody reads after it."""
    kept = {*graph.inputs, *graph.outputs}
    frees: list[list[int]] = []
    for part in reversed(parts):
        gone = [v for v in dict.fromkeys((*part.inputs, *part.outputs)) if v not in kept]
        kept.update(gone)
        frees.append(gone)
    return frees[::-1]


def _same(a: Any, b: Any) -> bool:
    return type(a) is type(b) and (a == b or (a != a and b != b))


class EagerLink(Link):
    """A part on the reference executor."""

    def __init__(self, part: Part, hardware: torch.device) -> None:
        super().__init__(part)
        self.waits = any(node.op in collective.FINISHES for node in part.nodes)
        self._program = ReferenceProgram(part.graph, plan(part.graph), None, hardware)

    def run(self, values: dict[int, Any], scalars: Sequence[Any]) -> None:
        part = self.part
        results = self._program.run(
            [values[i] for i in part.inputs], [scalars[k] for k in part.numbers]
        )
        values.update(zip(part.outputs, results, strict=True))
