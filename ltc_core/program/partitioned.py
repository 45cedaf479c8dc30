"""A program made of subgraphs: it runs them one after the other on the data of a run.

A `SubgraphRunner` runs one subgraph: op by op, or as compiled code. Each backend has its own.
"""

from __future__ import annotations

import abc
from collections.abc import Callable, Generator, Mapping, Sequence
from typing import Any

import torch

from ltc_core.graph import collective
from ltc_core.graph.ir import Graph, Node
from ltc_core.graph.passes import origins
from ltc_core.program.failure import NodeFailure, Salvaged, SubgraphFailure
from ltc_core.program.plan import plan
from ltc_core.program.program import Program, Watch, run_to_end
from ltc_core.program.salvage import salvage
from ltc_core.program.scalar_inputs import same_scalar
from ltc_core.program.subgraph import Subgraph

__all__ = ["NodeRunner", "PartitionedProgram", "SubgraphRunner", "storage_of"]

# Runs a node on values and adds its results to them; it overwrites copies only.
NodeRunner = Callable[[Node, dict[int, Any]], None]


class SubgraphRunner(abc.ABC):
    """Runs one subgraph.

    Attributes:
        subgraph: the subgraph.
        waits: whether it blocks on a collective.
        is_native: whether it runs compiled code.
    """

    is_native = False

    def __init__(self, subgraph: Subgraph) -> None:
        self.subgraph = subgraph
        self.waits = collective.may_block(subgraph.nodes)

    @abc.abstractmethod
    def run(self, values: dict[int, Any], scalars: Sequence[Any]) -> None:
        """Run on the values of the whole graph, and add its outputs to them.

        Raises:
            SubgraphFailure: a node failed; node and values are numbered as in the subgraph.
        """

    def whole_node(self, node: Node | None) -> Node | None:
        """The node of the whole graph that a node of the subgraph stands for."""
        return None if node is None else self.subgraph.nodes[self.subgraph.graph.nodes.index(node)]

    def whole_numbers(self, values: Mapping[int, Any]) -> dict[int, Any]:
        """Values of the subgraph, with their numbers in the whole graph."""
        names = dict(zip(self.subgraph.graph.inputs, self.subgraph.inputs, strict=True))
        for own, whole in zip(self.subgraph.graph.nodes, self.subgraph.nodes, strict=True):
            names.update((own.first + i, whole.first + i) for i in range(len(own.outs)))
        return {names[i]: data for i, data in values.items()}


def storage_of(data: torch.Tensor) -> int:
    """Key of a tensor's memory: equal for tensors that share it."""
    return int(data.untyped_storage()._cdata)


class PartitionedProgram(Program):
    """Runs the subgraphs of a graph, in order.

    Args:
        graph: the whole graph.
        runners: the runners of its subgraphs, in order.
        memory_of: key of the memory of some data: equal for data that share memory.
        rest: makes, of the scalars of a run, what runs single nodes after a failure; None if there is no such thing.
        names: what the caller calls the outputs, for what is left after a failure: a pass may have renumbered them.
    """

    def __init__(
        self,
        graph: Graph,
        runners: Sequence[SubgraphRunner],
        memory_of: Callable[[Any], int] = storage_of,
        rest: Callable[[Sequence[Any]], NodeRunner] | None = None,
        names: Sequence[int] | None = None,
    ) -> None:
        self._inputs = tuple(graph.inputs)
        self._outputs = graph.outputs
        self._names = dict(zip(graph.outputs, names or graph.outputs, strict=True))
        self._origins = origins(graph.nodes, graph.outputs)
        self._donated = graph.donated
        self._runners = runners
        self._memory_of = memory_of
        self._rest_runner = rest
        self.reuses = plan(graph).reuses
        subgraphs = [runner.subgraph for runner in runners]
        self._constants = {k: v for subgraph in subgraphs for k, v in subgraph.constants.items()}
        self._frees = _frees(graph, subgraphs)

    @property
    def is_native(self) -> bool:
        """Whether any of it runs compiled code. Cost: 0.1 us."""
        for runner in self._runners:  # a loop: any() takes 0.8 us (`timeit`), and each launch asks
            if runner.is_native:
                return True
        return False

    @property
    def num_eager(self) -> int:
        """Number of its ops that do not run in compiled code."""
        return sum(len(runner.subgraph.nodes) for runner in self._runners if not runner.is_native)

    def fits(self, scalars: Sequence[Any]) -> bool:
        """Whether the scalars of this run have the values that the program was compiled for."""
        return all(same_scalar(scalars[k], v) for k, v in self._constants.items())

    def run(self, inputs: Sequence[Any], scalars: Sequence[Any]) -> list[Any]:
        return run_to_end(self.run_in_steps(inputs, scalars))

    def run_in_steps(
        self, inputs: Sequence[Any], scalars: Sequence[Any], watch: Watch | None = None
    ) -> Generator[None, None, list[Any]]:
        """Run; yield before each subgraph that blocks on a collective."""
        values = dict(zip(self._inputs, inputs, strict=True))
        for at, (runner, frees) in enumerate(zip(self._runners, self._frees, strict=True)):
            if runner.waits:
                yield
            try:
                runner.run(values, scalars)
            except SubgraphFailure as failure:
                self._note_failure(runner, failure, values)
                node = runner.whole_node(failure.node)
                failed = [node] if node is not None else runner.subgraph.nodes
                found = self._salvage(values, self._rest(at, node), failed, scalars)
                raise NodeFailure(node, found) from failure.__cause__
            for value in frees:
                del values[value]
        return [values[i] for i in self._outputs]

    @staticmethod
    def _note_failure(
        runner: SubgraphRunner, failure: SubgraphFailure, values: dict[int, Any]
    ) -> None:
        """Add the values that a failed runner left to `values`, and drop the inputs that it has overwritten."""
        there = runner.whole_numbers(failure.values)
        for number, value in zip(runner.subgraph.graph.inputs, runner.subgraph.inputs, strict=True):
            if number in runner.subgraph.graph.donated and value not in there:
                values.pop(value, None)
        values.update(there)

    def _rest(self, at: int, node: Node | None) -> list[Node]:
        """Nodes that have not run: those of the subgraph at this position, from `node` on, and of all later ones."""
        nodes = list(self._runners[at].subgraph.nodes)
        if node is not None:
            nodes = nodes[nodes.index(node) :]
        return nodes + [n for runner in self._runners[at + 1 :] for n in runner.subgraph.nodes]

    def _salvage(
        self,
        values: dict[int, Any],
        rest: list[Node],
        failed: Sequence[Node],
        scalars: Sequence[Any],
    ) -> Salvaged:
        taken = {self._memory_of(values[i]) for i in self._inputs if i not in self._donated}
        if self._rest_runner is None:
            found = salvage(self._origins, self._inputs, values, (), (), _never)
        else:
            run = self._rest_runner(scalars)
            firsts = [node.first for node in failed]
            found = salvage(self._origins, self._inputs, values, rest, firsts, run)
        for output, data in found.data.items():
            memory = self._memory_of(data)
            found.data[output] = data.clone() if memory in taken else data
            taken.add(memory)
        names = self._names
        return Salvaged(
            {names[output]: data for output, data in found.data.items()},
            frozenset(names[output] for output in found.older),
            {names[output]: cause for output, cause in found.causes.items()},
        )


def _never(node: Node, values: dict[int, Any]) -> None:
    raise AssertionError(node)


def _frees(graph: Graph, subgraphs: Sequence[Subgraph]) -> list[list[int]]:
    """For each subgraph, the values that can be freed after it."""
    kept = {*graph.inputs, *graph.outputs}
    frees: list[list[int]] = []
    for subgraph in reversed(subgraphs):
        gone = [v for v in dict.fromkeys((*subgraph.inputs, *subgraph.outputs)) if v not in kept]
        kept.update(gone)
        frees.append(gone)
    return frees[::-1]
