"""The JAX executor: graphs on XLA, on a CPU, a GPU or a TPU, with today's PyTorch.

`executors.device_program` divides a graph; a subgraph becomes a program before its first run (`launch`). Made by
`executors.make`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import torch

from ltc_core.executors.base import CPU, Executor
from ltc_core.executors.device_program import DeviceProgram
from ltc_core.executors.jax.device import JaxDevice
from ltc_core.graph.ir import Graph, TensorMeta
from ltc_core.program.program import Program

__all__ = ["JaxExecutor"]

Tensor = torch.Tensor


class JaxExecutor(Executor):
    """Runs graphs on one device of JAX.

    Args:
        index: index of the device in this process.

    Raises:
        DeviceError: JAX cannot be loaded, or has no such device.
    """

    name = "jax"

    def __init__(self, index: int) -> None:
        self.runtime = JaxDevice(index)
        super().__init__(CPU)

    def upload(self, tensor: Tensor) -> Any:
        return self.upload_all([tensor])[0]

    def upload_all(self, tensors: Sequence[Tensor]) -> list[Any]:
        # Copies, because the caller may overwrite the tensors.
        stored = self.runtime.stored
        return self.runtime.send([t.detach().to(stored(t.dtype), copy=True) for t in tensors])

    def copy(self, data: Any) -> Any:
        return self.runtime.copy(data)

    def view(self, data: Any, meta: TensorMeta) -> Tensor:
        return self.runtime.fetch([data])[0].to(meta.dtype)

    def nbytes(self, meta: TensorMeta) -> int:
        return self.runtime.types.stored_meta(meta).nbytes

    def compile(self, graph: Graph) -> Program:
        return DeviceProgram(graph, self.runtime)

    def synchronize(self) -> None:
        jax.effects_barrier()

    def memory_info(self) -> tuple[int, int]:
        found = self.runtime.device.memory_stats()
        if not found or "bytes_limit" not in found:  # a CPU does not report it
            return super().memory_info()
        return found["bytes_limit"] - found["bytes_in_use"], found["bytes_limit"]

    @property
    def kind(self) -> str:
        return str(self.runtime.device.device_kind)
