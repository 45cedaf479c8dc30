"""A device of PJRT: its tensors, and how they go there, come back and are copied.

Data are torch_xla tensors that stay on the device; data that only the host has are CPU tensors. Used by `launch`
and `executor`.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence

import torch

from ltc_core.errors import DeviceError, listed
from ltc_core.executors.hardware import hardware_kind
from ltc_core.executors.narrow_dtypes import StorageTypes
from ltc_core.executors.xla import library
from ltc_core.executors.xla.collectives import Collectives
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

# Held while something is traced: that changes state which all of the library's tensors share.
TRACING = threading.RLock()


class XlaDevice:
    """One device of this process.

    Attributes:
        library: torch_xla's.
        name: the device's name there.
        types: what a tensor of each dtype is stored as.
        collectives: how it reduces with others.

    Args:
        index: which of this process's.

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
        """Return the dtype that a tensor is stored as.

        Raises:
            DeviceError: XLA has no such type.
        """
        found = self.types.of(dtype)
        if found not in _DTYPES:
            raise DeviceError(
                f"a tensor of {dtype} cannot be on {settings.device_name}:{self.index}: XLA has no such type",
                got=f"{dtype}, expected one of {listed(sorted(map(str, _DTYPES)))}",
                where=where,
                next="convert it on the CPU, x.to(torch.float8_e5m2), or keep it there",
            )
        return found

    def send(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Copy CPU tensors, that nobody writes any more, to the device in one transfer."""
        found = self.library._xla_tensors_from_aten(list(tensors), [self.name] * len(tensors))
        return found  # type: ignore[no-any-return]

    def fetch(self, data: Sequence[Tensor]) -> list[Tensor]:
        """Return data as CPU tensors of the stored dtype, in one transfer. Cost: waits for what computes them."""
        there = [k for k, d in enumerate(data) if d.device.type != "cpu"]
        found = list(data)
        if there:
            copies = self.library._xla_get_cpu_tensors([data[k] for k in there])
            for k, copy in zip(there, copies, strict=True):
                found[k] = copy
        return found

    def copy(self, data: Tensor) -> Tensor:
        """Copy data where they are."""
        copied = data.clone()
        if copied.device.type != "cpu":
            with TRACING:
                self.library._xla_sync_multi([copied], [self.name], False, True)
        return copied

    def prepare_launch(self) -> None:
        """Make this the device of the thread's next launch."""
        # It runs on the calling thread's device, wherever its inputs are.
        self.library._xla_set_default_device(self.name)
        if self._runs_inline:
            # A launch on PJRT's CPU client waits for the run before, with Python's lock: better wait here, without.
            self.synchronize()

    def synchronize(self) -> None:
        """Wait until what was launched is done. Other threads of Python go on meanwhile."""
        self.library._xla_wait_device_ops(self._real_names)
