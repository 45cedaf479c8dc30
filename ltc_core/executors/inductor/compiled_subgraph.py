"""A program whose subgraphs are compiled libraries, launched through `launcher`.

Subgraphs that are not compiled, and those with an index out of range in this run, run on the reference executor.
`tiers` makes the program when all its libraries are there.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from ltc_core.compile.scalar_inputs import NUMBER_DTYPES, kinds
from ltc_core.compile.subgraph import Subgraph
from ltc_core.executors.base import Stopped
from ltc_core.executors.inductor.index_checks import find_bounds, hold
from ltc_core.executors.inductor.launcher import Mismatch, Model
from ltc_core.executors.partitioned_program import EagerRunner, PartitionedProgram, SubgraphRunner
from ltc_core.graph.ir import Graph
from ltc_core.graph.passes import plan

__all__ = ["compiled_program"]

_log = logging.getLogger("ltc")


def compiled_program(
    graph: Graph,
    subgraphs: Sequence[Subgraph],
    models: Mapping[int, tuple[Model, Sequence[int]]],
    hardware: torch.device,
) -> PartitionedProgram:
    """The program of a graph's subgraphs.

    Args:
        graph: the whole graph.
        subgraphs: its subgraphs, in order.
        models: the libraries of the compiled ones, by position, and which of a subgraph's outputs each returns.
        hardware: PyTorch's device that has the data.
    """
    links = [
        _CompiledRunner(subgraph, hardware, *models[k])
        if subgraph.compiled
        else EagerRunner(subgraph, hardware)
        for k, subgraph in enumerate(subgraphs)
    ]
    return PartitionedProgram(graph, links, hardware=hardware)


class _CompiledRunner(SubgraphRunner):
    """Runs a compiled subgraph."""

    def __init__(
        self, subgraph: Subgraph, hardware: torch.device, model: Model, returned: Sequence[int]
    ) -> None:
        super().__init__(subgraph)
        self._hardware = hardware
        self._model = model
        self._metas = list(subgraph.graph.inputs.values())
        # A GPU looks at indices itself, as it does in eager; looking at them here would wait for it.
        self._bounds = find_bounds(subgraph.graph)[0] if hardware.type == "cpu" else []
        self._reference: EagerRunner | None = None
        self._is_told = False
        reuses = plan(subgraph.graph).reuses
        names = dict(zip(subgraph.graph.outputs, subgraph.outputs, strict=True))
        sources = dict(zip(subgraph.graph.inputs, subgraph.inputs, strict=True))
        self._written = [(names[o], sources[i]) for o, i in reuses.items() if o not in returned]
        self._returned = [names[o] for o in returned]
        typed = list(zip(subgraph.scalars, subgraph.scalar_types, strict=True))
        self._vectors = [
            (NUMBER_DTYPES[kind], [k for k, t in typed if t is kind])
            for kind in kinds(subgraph.scalar_types)
        ]

    def run(self, values: dict[int, Any], scalars: Sequence[Any]) -> None:
        tensors = [values[i] for i in self.subgraph.inputs]
        if not hold(self._bounds, tensors):
            self._run_by_reference(values, scalars)
            return
        for dtype, positions in self._vectors:
            tensors.append(
                torch.tensor([scalars[k] for k in positions], dtype=dtype, device=self._hardware)
            )
        try:
            results = self._launch(tensors, values)
        except Mismatch:
            raise
        except Exception as error:
            if self._written:  # maybe half of it is: lost, as nobody can tell
                lost = {source for _, source in self._written}
                named = zip(self.subgraph.graph.inputs, self.subgraph.inputs, tensors, strict=False)
                there = {number: t for number, value, t in named if value not in lost}
                raise Stopped(None, there) from error
            self._run_by_reference(values, scalars)  # which op failed, and what the others give
            if not self._is_told:
                self._is_told = True
                _log.warning(
                    "a compiled program failed, and its ops ran one by one: %r; report this", error
                )
            return
        values.update(zip(self._returned, results, strict=True))
        for output, source in self._written:
            values[output] = values[source]

    def _launch(
        self, tensors: list[torch.Tensor], values: dict[int, Any]
    ) -> Sequence[torch.Tensor]:
        """Run the library. Operands with other strides than recorded, which ops run one by one may give, are copied."""
        while True:
            try:
                return self._model.run(tensors)
            except Mismatch as mismatch:
                at = mismatch.position
                expected = self._metas[at] if at < len(self._metas) else None
                if not (expected and mismatch.is_of_strides(expected)):
                    raise
                tensors[at] = values[self.subgraph.inputs[at]] = expected.laid_out(tensors[at])

    def _run_by_reference(self, values: dict[int, Any], scalars: Sequence[Any]) -> None:
        if self._reference is None:
            self._reference = EagerRunner(self.subgraph, self._hardware)
        self._reference.run(values, scalars)
