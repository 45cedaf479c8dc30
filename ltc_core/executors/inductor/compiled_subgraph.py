"""Runs compiled subgraphs: libraries that PyTorch's compiler made, called through `launcher`.

`compiled_program` makes the program of a graph. Subgraphs that are not compiled, and in a run compiled ones whose
indices would be out of range, run op by op on the reference executor. Called by `tiers` when all libraries are built.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from ltc_core import metrics
from ltc_core.executors.inductor.first_run import shared_outputs, wrong_output
from ltc_core.executors.inductor.launcher import Mismatch, Model
from ltc_core.executors.inductor.tier_report import recorded_at, refuse
from ltc_core.executors.reference.eager_runner import EagerRunner
from ltc_core.executors.reference.program import rest_runner
from ltc_core.graph.ir import Graph
from ltc_core.program.failure import SubgraphFailure
from ltc_core.program.index_checks import find_bounds, in_bounds
from ltc_core.program.partitioned import PartitionedProgram, SubgraphRunner
from ltc_core.program.plan import plan
from ltc_core.program.scalar_inputs import SCALAR_DTYPES, kinds
from ltc_core.program.subgraph import Subgraph

__all__ = ["compiled_program"]

_log = logging.getLogger("ltc")
_REPORT_IT = "report this; until it is mended the step is slower, as these ops run op by op"


def compiled_program(
    graph: Graph,
    subgraphs: Sequence[Subgraph],
    models: Mapping[int, tuple[Model, Sequence[int]]],
    hardware: torch.device,
) -> PartitionedProgram:
    """Program of a graph.

    Args:
        graph: the whole graph.
        subgraphs: its subgraphs, in order.
        models: position of a compiled subgraph -> its library, and the outputs that the library returns.
        hardware: the PyTorch device of the data.
    """
    runners = [
        _CompiledRunner(subgraph, hardware, *models[k])
        if subgraph.compiled
        else EagerRunner(subgraph, hardware)
        for k, subgraph in enumerate(subgraphs)
    ]
    return PartitionedProgram(
        graph, runners, rest=lambda scalars: rest_runner(scalars, None, hardware)
    )


class _CompiledRunner(SubgraphRunner):
    """Runs a subgraph as a library."""

    is_native = True

    def __init__(
        self, subgraph: Subgraph, hardware: torch.device, model: Model, returned: Sequence[int]
    ) -> None:
        super().__init__(subgraph)
        self._hardware = hardware
        self._model = model
        self._metas = list(subgraph.graph.inputs.values())
        # A GPU kernel checks indices itself, as in eager; to check them here would synchronize.
        self._bounds = find_bounds(subgraph.graph)[0] if hardware.type == "cpu" else []
        self._reference: EagerRunner | None = None
        self._is_told = False
        self._is_checked = False
        reuses = plan(subgraph.graph).reuses
        names = dict(zip(subgraph.graph.outputs, subgraph.outputs, strict=True))
        sources = dict(zip(subgraph.graph.inputs, subgraph.inputs, strict=True))
        self._written = [(names[o], sources[i]) for o, i in reuses.items() if o not in returned]
        self._returned = [names[o] for o in returned]
        metas = subgraph.graph.metas()
        self._returned_metas = [metas[o] for o in returned]
        typed = list(zip(subgraph.scalars, subgraph.scalar_types, strict=True))
        self._vectors = [
            (SCALAR_DTYPES[kind], [k for k, t in typed if t is kind])
            for kind in kinds(subgraph.scalar_types)
        ]

    def run(self, values: dict[int, Any], scalars: Sequence[Any]) -> None:
        tensors = [values[i] for i in self.subgraph.inputs]
        if not self.is_native or not in_bounds(self._bounds, tensors):
            self._run_by_reference(values, scalars)
            return
        for dtype, positions in self._vectors:
            tensors.append(
                torch.tensor([scalars[k] for k in positions], dtype=dtype, device=self._hardware)
            )
        try:
            results = self._launch(tensors, values)
            if not self._is_checked:
                results = self._checked(results, tensors)
        except Mismatch as mismatch:  # of an op that ran before; nothing has been overwritten
            self.is_native = False
            metrics.count("CompileRefused")
            refuse(
                f"{self._name()} was compiled for other sizes, and its ops run one by one: {mismatch}",
                _REPORT_IT,
                is_printed=False,
            )
            self._run_by_reference(values, scalars)
            return
        except Exception as error:
            if self._written:  # inputs that the library may have overwritten are lost
                lost = {source for _, source in self._written}
                named = zip(self.subgraph.graph.inputs, self.subgraph.inputs, tensors, strict=False)
                there = {number: t for number, value, t in named if value not in lost}
                raise SubgraphFailure(None, there) from error
            self._run_by_reference(values, scalars)  # shows which op fails, and computes the others
            if not self._is_told:
                self._is_told = True
                refuse(
                    f"{self._name()} fails when it runs, and its ops run one by one: {error!r}",
                    _REPORT_IT,
                    is_printed=False,
                )
                _log.warning(
                    "a compiled program failed, and its ops ran one by one: %r; report this", error
                )
            return
        values.update(zip(self._returned, results, strict=True))
        for output, source in self._written:
            values[output] = values[source]

    def _checked(
        self, results: Sequence[torch.Tensor], tensors: Sequence[torch.Tensor]
    ) -> Sequence[torch.Tensor]:
        """Results of the first run, each in memory of its own; a library that shares memory is not run again.

        Raises:
            RuntimeError: a result has another dtype or size than planned, or an overwritten input's memory.
        """
        self._is_checked = True
        problem = wrong_output(results, self._returned_metas)
        shared = {} if problem else shared_outputs(results, tensors)
        if not problem and not shared:
            return results
        self.is_native = False  # its outputs are not what the plan counts on
        metrics.count("CompileRefused")
        written = {source for _, source in self._written}
        lost = [k for k, at in shared.items() if at is not None and self._source(at) in written]
        if lost:
            problem = f"output {lost[0]} is the memory of an input that was overwritten"
        why = problem or f"it returns shared memory (outputs {sorted(shared)})"
        refuse(
            f"{self._name()} did not pass the check of its first run, and its ops run one by one: {why}",
            _REPORT_IT,
            is_printed=False,
        )
        if problem:
            raise RuntimeError(f"a compiled program is wrong: {problem}")
        _log.warning(
            "a compiled program returns shared memory (outputs %s); its ops run one by one; report this",
            sorted(shared),
        )
        return [t.clone() if k in shared else t for k, t in enumerate(results)]

    def _name(self) -> str:
        nodes = self.subgraph.nodes
        return f"the library of a subgraph of {len(nodes)} ops{recorded_at(nodes)}"

    def _source(self, position: int) -> int:
        """The value that is the input at a position; -1 for a vector of scalars."""
        inputs = self.subgraph.inputs
        return inputs[position] if position < len(inputs) else -1

    def _launch(
        self, tensors: list[torch.Tensor], values: dict[int, Any]
    ) -> Sequence[torch.Tensor]:
        """Run the library. An operand with other strides than recorded, as eager ops may return, is copied."""
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
