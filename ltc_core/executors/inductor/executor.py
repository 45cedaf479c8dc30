"""The inductor executor: graphs run op by op first, and are compiled by PyTorch's inductor if they recur.

`upload`, `view` and `copy` are those of the reference executor, because both tiers work on the same tensors. A compiled
graph is a `tiers.TieredProgram`.
"""

from __future__ import annotations

import torch

from ltc_core.executors.base import CPU
from ltc_core.executors.host_memory import keep_memory, release_kept
from ltc_core.executors.inductor.compiler.service import service
from ltc_core.executors.inductor.tier_report import refuse
from ltc_core.executors.inductor.tiers import TieredProgram
from ltc_core.executors.reference.executor import ReferenceExecutor
from ltc_core.graph.ir import Graph
from ltc_core.program.program import Program
from ltc_core.settings import settings

__all__ = ["InductorExecutor"]


class InductorExecutor(ReferenceExecutor):
    """Runs graphs as native code."""

    name = "inductor"

    def __init__(self, hardware: torch.device = CPU) -> None:
        super().__init__(hardware)
        if hardware.type == "cpu":
            keep_memory()

    @property
    def takes_dynamic_shapes(self) -> bool:
        # Who waits for the compiler at each new graph wants each of them compiled.
        return settings.compile != "sync" and super().takes_dynamic_shapes

    @property
    def compiles(self) -> bool:
        return settings.compile != "off" and self.hardware.type == "cpu" and not self.stores_narrow

    @property
    def is_compiling(self) -> bool:
        return settings.compile == "async" and service().is_busy

    def compile(self, graph: Graph) -> Program:
        program = self.interpret(graph)
        if self.stores_narrow:
            # Ops without a kernel for the narrow dtype run in float32; compiled code cannot do that.
            refuse(
                "no graph is compiled, all run op by op: LTC_USE_BF16 and LTC_DOWNCAST_BF16 change what is stored; "
                "torch.autocast gives compiled bfloat16",
                "use torch.autocast instead of these settings",
            )
            return program
        if self.hardware.type == "cuda":
            # Compiled programs of a GPU end the process without a word (torch 2.11, H200), so none is made.
            refuse(
                "no graph is compiled for a GPU yet: C++ calls its ops",
                "nothing: LTC_COMPILE has no effect on a GPU",
                is_printed=False,
            )
            return program
        return TieredProgram(graph, program, self.hardware)

    def empty_cache(self) -> None:
        super().empty_cache()
        release_kept()
