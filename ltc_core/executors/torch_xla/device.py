"""A device of PJRT: uploads, fetches and copies of its data.

Data on the device are torch_xla tensors; data that stay on the host are CPU tensors. Used by `launch`.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence

import torch

from ltc_core.device.hardware import hardware_kind
from ltc_core.errors import DeviceError, listed
from ltc_core.executors.device_program import DeviceRuntime
from ltc_core.executors.torch_xla import library
from ltc_core.executors.torch_xla.collectives import Collectives
from ltc_core.graph.ir import Node
from ltc_core.program.passes.narrow_dtypes import StorageTypes
from ltc_core.settings import settings

__all__ = ["TRACING", "XlaDevice"]

Tensor = torch.Tensor

_DTYPES = frozenset(
    {
        torch.bool, torch.uint8, torch.uint16, torch.uint32, torch.uint64,
        torch.int8, torch.int16, torch.int32, torch.int64,
        torch.float8_e4m3fn, torch.float8_e5m2, torch.float16, torch.bfloat16, torch.float32,
        torch.complex64,
    }
)  # fmt: skip

# Held during a trace, which changes state that all tensors of the library share.
TRACING = threading.RLock()


class XlaDevice(DeviceRuntime):
    """One device of this process.

    Attributes:
        library: torch_xla's library.
        name: torch_xla's name of the device.
        types: the dtype in which a tensor of each dtype is stored.
        collectives: its collectives with other devices.

    Args:
        index: index of the device in this process.

    Raises:
        DeviceError: torch_xla cannot be loaded, or has no such device.
    """

    def __init__(self, index: int) -> None:
        self.library = library.load()
        found = self.library._xla_get_devices()
        if index >= len(found):
            raise DeviceError(
                f"{settings.device_name}:{index} has no device of PJRT",
                got=f"{len(found)} in this process: {listed(found)}",
                next="lower LTC_NUM_DEVICES, or start fewer processes",
            )
        self.index = index
        self.name = f"xla:{index}"
        self._real_names = self.library._xla_real_devices([self.name])  # such as ['TPU:0']
        self._runs_inline = hardware_kind() == "CPU"
        self.types = StorageTypes.for_xla()
        self.collectives = Collectives(self.library, self.name)

    def stored(self, dtype: torch.dtype, where: str = "") -> torch.dtype:
        found = self.types.of(dtype)
        if found not in _DTYPES:
            raise DeviceError(
                f"a tensor of {dtype} cannot be on {settings.device_name}:{self.index}: XLA has no such type",
                got=f"{dtype}, expected one of {listed(sorted(map(str, _DTYPES)))}",
                where=where,
                next="convert it on the CPU, x.to(torch.float8_e5m2), or keep it there",
            )
        return found

    def is_on_host(self, data: Tensor) -> bool:
        return data.device.type == "cpu"

    def reduces_in_graph(self, node: Node) -> bool:
        return self.collectives.reduces_in_graph(node)

    def send(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        found = self.library._xla_tensors_from_aten(list(tensors), [self.name] * len(tensors))
        return found  # type: ignore[no-any-return]

    def fetch(self, data: Sequence[Tensor]) -> list[Tensor]:
        there = [k for k, d in enumerate(data) if d.device.type != "cpu"]
        found = list(data)
        if there:
            copies = self.library._xla_get_cpu_tensors([data[k] for k in there])
            for k, copy in zip(there, copies, strict=True):
                found[k] = copy
        return found

    def copy(self, data: Tensor) -> Tensor:
        copied = data.clone()
        if copied.device.type != "cpu":
            with TRACING:
                self.library._xla_sync_multi([copied], [self.name], False, True)
        return copied

    def prepare_launch(self) -> None:
        """Make this the device of the thread's next launch."""
        # A launch runs on the default device of its thread, wherever its inputs are.
        self.library._xla_set_default_device(self.name)
        if self._runs_inline:
            # A launch on PJRT's CPU client waits for the previous run and holds the GIL; this wait releases it.
            self.synchronize()

    def synchronize(self) -> None:
        """Wait until all launched programs are done; the GIL is released meanwhile."""
        self.library._xla_wait_device_ops(self._real_names)
