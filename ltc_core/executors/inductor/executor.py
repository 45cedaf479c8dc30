"""The inductor executor: the reference executor, and PyTorch's compiler for graphs that come back.

`place`, `view` and `copy` are the reference executor's: both tiers work on the same tensors.
"""

from __future__ import annotations

import torch

from ltc_core.executors.base import CPU, Program
from ltc_core.executors.host_memory import give_back, keep_memory
from ltc_core.executors.inductor.tiers import TieredProgram, say_once
from ltc_core.executors.reference import ReferenceExecutor
from ltc_core.graph.ir import Graph

__all__ = ["InductorExecutor"]


class InductorExecutor(ReferenceExecutor):
    """Whole graphs as native code."""

    name = "inductor"

    def __init__(self, hardware: torch.device = CPU) -> None:
        super().__init__(hardware)
        if hardware.type == "cpu":
            keep_memory()

    def compile(self, graph: Graph) -> Program:
        program = self.interpret(graph)
        if (
            self.stores_narrow
        ):  # ops without a narrow kernel run wide, which compiled code cannot be told
            say_once(
                "no graph is compiled, all run op by op: LTC_USE_BF16 and LTC_DOWNCAST_BF16 change what is stored; "
                "torch.autocast gives compiled bfloat16"
            )
            return program
        return TieredProgram(graph, program, self.hardware)

    def empty_cache(self) -> None:
        super().empty_cache()
        give_back()
