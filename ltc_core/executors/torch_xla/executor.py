"""The XLA executor: graphs on a TPU, or on any other device of PJRT, through torch_xla's library.

`executors.device_program` divides a graph; a subgraph is traced at its first run and then launched as a program
(`launch`). Made by `executors.make`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ltc_core.executors.base import Executor
from ltc_core.executors.device_program import DeviceProgram
from ltc_core.executors.torch_xla.launch import XlaRuntime
from ltc_core.graph.ir import Graph, TensorMeta
from ltc_core.program.program import Program

__all__ = ["XlaExecutor"]

Tensor = torch.Tensor


class XlaExecutor(Executor):
    """Runs graphs on one device of PJRT.

    Args:
        index: index of the device in this process.

    Raises:
        DeviceError: torch_xla cannot be loaded, or has no such device.
    """

    name = "torch_xla"

    def __init__(self, index: int) -> None:
        self.xla = XlaRuntime(index)
        super().__init__(torch.device("xla", index))

    def upload(self, tensor: Tensor) -> Any:
        return self.upload_all([tensor])[0]

    def upload_all(self, tensors: Sequence[Tensor]) -> list[Any]:
        # Copies, because the caller may overwrite the tensors before the transfer has read them.
        stored = self.xla.stored
        return self.xla.send([t.detach().to(stored(t.dtype), copy=True) for t in tensors])

    def copy(self, data: Any) -> Any:
        return self.xla.copy(data)

    def view(self, data: Any, meta: TensorMeta) -> Tensor:
        return self.xla.fetch([data])[0].to(meta.dtype)

    def nbytes(self, meta: TensorMeta) -> int:
        return self.xla.types.stored_meta(meta).nbytes

    def compile(self, graph: Graph) -> Program:
        return DeviceProgram(graph, self.xla)

    def synchronize(self) -> None:
        self.xla.synchronize()

    def memory_info(self) -> tuple[int, int]:
        try:
            found = self.xla.library._xla_memory_info(self.xla.name)
        except RuntimeError:  # PJRT's CPU client does not report it
            return super().memory_info()
        return found["bytes_limit"] - found["bytes_used"], found["bytes_limit"]

    @property
    def kind(self) -> str:
        return str(self.xla.library._xla_device_kind(self.xla.name))
