"""Runs a subgraph op by op, between compiled ones."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ltc_core.executors.reference.program import ReferenceProgram
from ltc_core.program.partitioned import SubgraphRunner
from ltc_core.program.plan import plan
from ltc_core.program.subgraph import Subgraph

__all__ = ["EagerRunner"]


class EagerRunner(SubgraphRunner):
    """Runs a subgraph op by op on the reference executor."""

    def __init__(self, subgraph: Subgraph, hardware: torch.device) -> None:
        super().__init__(subgraph)
        self._program = ReferenceProgram(subgraph.graph, plan(subgraph.graph), None, hardware)

    def run(self, values: dict[int, Any], scalars: Sequence[Any]) -> None:
        subgraph = self.subgraph
        results = self._program.run_or_stop(
            [values[i] for i in subgraph.inputs], [scalars[k] for k in subgraph.scalars]
        )
        values.update(zip(subgraph.outputs, results, strict=True))
