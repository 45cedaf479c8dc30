"""The null executor computes nothing: outputs are zeros of the right size. For counting ops, compiles and syncs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ltc_core.executors.base import Executor
from ltc_core.graph.ir import Graph, TensorMeta
from ltc_core.program.program import Program

__all__ = ["NullExecutor"]


class NullProgram(Program):
    def __init__(self, graph: Graph) -> None:
        metas = graph.metas()
        self.reuses = {}
        self._outputs = [metas[i] for i in graph.outputs]

    def run(self, inputs: Sequence[Any], scalars: Sequence[Any]) -> list[Any]:
        return [torch.zeros((), dtype=meta.dtype).expand(meta.size) for meta in self._outputs]


class NullExecutor(Executor):
    name = "null"

    def upload(self, tensor: torch.Tensor) -> Any:
        return tensor

    def copy(self, data: Any) -> Any:
        return data

    def view(self, data: Any, meta: TensorMeta) -> torch.Tensor:
        return data  # type: ignore[no-any-return]

    def compile(self, graph: Graph) -> NullProgram:
        return NullProgram(graph)
