"""The XLA executor: graphs on a TPU, or on any other device of PJRT, through torch_xla's library.

`executors.device_program` divides a graph; a subgraph is traced at its first run and then launched as a program
(`launch`). Made by `executors.make`.
"""

from __future__ import annotations

import torch

from ltc_core.executors.device_program import DeviceExecutor
from ltc_core.executors.torch_xla.launch import XlaRuntime

__all__ = ["XlaExecutor"]


class XlaExecutor(DeviceExecutor):
    """Runs graphs on one device of PJRT.

    Args:
        index: index of the device in this process.

    Raises:
        DeviceError: torch_xla cannot be loaded, or has no such device.
    """

    name = "torch_xla"

    def __init__(self, index: int) -> None:
        self.xla = XlaRuntime(index)
        super().__init__(self.xla, torch.device("xla", index))

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
