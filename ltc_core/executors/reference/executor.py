"""The reference executor: ATen op by op, on the CPU or a GPU."""

from __future__ import annotations

from typing import Any

import torch

from ltc_core.executors.base import CPU, Executor
from ltc_core.executors.reference.program import ReferenceProgram
from ltc_core.graph.ir import Graph, TensorMeta
from ltc_core.program.passes.narrow_dtypes import StorageTypes
from ltc_core.program.plan import plan
from ltc_core.program.program import Program
from ltc_core.settings import settings

__all__ = ["ReferenceExecutor"]


class ReferenceExecutor(Executor):
    """ATen op by op, on the CPU or a GPU."""

    name = "reference"

    def __init__(self, hardware: torch.device = CPU) -> None:
        super().__init__(hardware)
        self._types = StorageTypes.from_settings()

    @property
    def stores_narrow(self) -> bool:
        """Whether tensors are stored in another dtype than they report."""
        return self._types is not None

    @property
    def keeps_host_tensors(self) -> bool:
        return self.hardware.type == "cpu" and not self.stores_narrow

    @property
    def takes_dynamic_shapes(self) -> bool:
        return settings.dynamic_shapes == "auto"

    def begin_thread(self) -> None:
        if (
            self.hardware.type == "cuda"
        ):  # else the first call of cuBLAS there warns that no context is current
            torch.cuda.set_device(self.hardware)

    def upload(self, tensor: torch.Tensor) -> Any:
        dtype = tensor.dtype if self._types is None else self._types.of(tensor.dtype)
        return tensor.detach().to(self.hardware, dtype, copy=True)

    def copy(self, data: Any) -> Any:
        return data.clone()

    def nbytes(self, meta: TensorMeta) -> int:
        dtype = meta.dtype if self._types is None else self._types.of(meta.dtype)
        return meta.numel * dtype.itemsize

    def view(self, data: Any, meta: TensorMeta) -> torch.Tensor:
        return data.to("cpu", meta.dtype)  # type: ignore[no-any-return]

    def compile(self, graph: Graph) -> Program:
        return self.interpret(graph)

    def interpret(self, graph: Graph) -> ReferenceProgram:
        """Program that runs a graph op by op."""
        if self._types is not None:
            graph = self._types.rewrite(graph)
        return ReferenceProgram(graph, plan(graph), self._types, self.hardware)

    @property
    def kind(self) -> str:
        if self.hardware.type == "cuda":
            return torch.cuda.get_device_name(self.hardware)
        return super().kind

    def synchronize(self) -> None:
        if self.hardware.type == "cuda":
            torch.cuda.synchronize(self.hardware)

    def empty_cache(self) -> None:
        if self.hardware.type == "cuda":
            torch.cuda.empty_cache()

    def memory_info(self) -> tuple[int, int]:
        if self.hardware.type == "cuda":
            return torch.cuda.mem_get_info(self.hardware)
        return super().memory_info()
