"""A compiled program: the parts of a graph, one after the other, on the data of a run.

Compiled parts are launched through `launcher`; the others, and parts whose indices would read out of range, run on the
reference executor. Made by `tiers` when all its libraries are there.
"""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from typing import Any

import torch

from ltc_core import collective
from ltc_core.executors.base import NodeFailure
from ltc_core.executors.inductor.indices import find_bounds, hold
from ltc_core.executors.inductor.launcher import Model
from ltc_core.executors.inductor.number_rules import NUMBER_DTYPES, kinds
from ltc_core.executors.inductor.part import Part
from ltc_core.executors.reference import ReferenceProgram
from ltc_core.graph import Graph, Node
from ltc_core.passes import origins, plan

__all__ = ["Chain"]


class Chain:
    """Runs parts.

    Args:
        graph: the whole graph.
        parts: its parts, in order.
        models: the libraries of the compiled ones, by position, and which of a part's outputs each returns.
        hardware: PyTorch's device that has the data.
    """

    def __init__(
        self,
        graph: Graph,
        parts: Sequence[Part],
        models: Mapping[int, tuple[Model, Sequence[int]]],
        hardware: torch.device,
    ) -> None:
        self._inputs = tuple(graph.inputs)
        self._outputs = graph.outputs
        self._origins = origins(graph.nodes, graph.outputs)
        self._donated = graph.donated
        self._links = [
            _Compiled(part, hardware, *models[k]) if part.compiled else _Eager(part, hardware)
            for k, part in enumerate(parts)
        ]
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
        taken = {values[i].untyped_storage()._cdata for i in self._inputs if i not in self._donated}
        kept = {}
        for output, versions in self._origins.items():
            data = next((values[v] for v in (output, *versions) if v in values), None)
            if data is not None:
                storage = data.untyped_storage()._cdata
                kept[output] = data.clone() if storage in taken else data
                taken.add(storage)
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


class _Eager:
    """A part on the reference executor."""

    waits: bool

    def __init__(self, part: Part, hardware: torch.device) -> None:
        self.part = part
        self.waits = any(node.op in collective.FINISHES for node in part.nodes)
        self._program = ReferenceProgram(part.graph, plan(part.graph), None, hardware)

    def run(self, values: dict[int, Any], scalars: Sequence[Any]) -> None:
        part = self.part
        results = self._program.run(
            [values[i] for i in part.inputs], [scalars[k] for k in part.numbers]
        )
        values.update(zip(part.outputs, results, strict=True))

    def whole_node(self, node: Node | None) -> Node | None:
        return None if node is None else self.part.nodes[self.part.graph.nodes.index(node)]

    def whole_numbers(self, salvaged: Mapping[int, Any]) -> dict[int, Any]:
        """Name what a failed run left by its numbers in the whole graph."""
        names = dict(zip(self.part.graph.outputs, self.part.outputs, strict=True))
        return {names[i]: data for i, data in salvaged.items()}


class _Compiled(_Eager):
    """A part as a library."""

    waits = False

    def __init__(
        self, part: Part, hardware: torch.device, model: Model, returned: Sequence[int]
    ) -> None:
        self.part = part
        self._hardware = hardware
        self._model = model
        # A GPU looks at indices itself, as it does in eager; looking at them here would wait for it.
        self._bounds = find_bounds(part.graph)[0] if hardware.type == "cpu" else []
        self._reference: _Eager | None = None
        reuses = plan(part.graph).reuses
        names = dict(zip(part.graph.outputs, part.outputs, strict=True))
        sources = dict(zip(part.graph.inputs, part.inputs, strict=True))
        self._written = [(names[o], sources[i]) for o, i in reuses.items() if o not in returned]
        self._returned = [names[o] for o in returned]
        typed = list(zip(part.numbers, part.types, strict=True))
        self._vectors = [
            (NUMBER_DTYPES[kind], [k for k, t in typed if t is kind]) for kind in kinds(part.types)
        ]

    def run(self, values: dict[int, Any], scalars: Sequence[Any]) -> None:
        tensors = [values[i] for i in self.part.inputs]
        if not hold(self._bounds, tensors):
            self._run_by_reference(values, scalars)
            return
        for dtype, positions in self._vectors:
            tensors.append(
                torch.tensor([scalars[k] for k in positions], dtype=dtype, device=self._hardware)
            )
        try:
            results = self._model.run(tensors)
        except RuntimeError as error:
            raise NodeFailure(None, {}) from error
        values.update(zip(self._returned, results, strict=True))
        for output, source in self._written:
            values[output] = values[source]

    def _run_by_reference(self, values: dict[int, Any], scalars: Sequence[Any]) -> None:
        if self._reference is None:
            self._reference = _Eager(self.part, self._hardware)
        self._reference.run(values, scalars)
