"""`torch_xla.utils.dlpack`: tensors of the device for and from other libraries. Data are copied, not shared."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils.dlpack import DLDeviceType

from ltc_dist.compat.torch_xla.core import xla_model

__all__ = ["from_dlpack", "to_dlpack"]


def to_dlpack(xla_tensor: torch.Tensor) -> Any:
    """Return a DLPack capsule of a copy on the CPU. Cost: waits for the tensor's value."""
    return torch.utils.dlpack.to_dlpack(xla_tensor.detach().cpu())  # type: ignore[attr-defined]


def from_dlpack(ext_tensor: Any) -> torch.Tensor:
    """Copy a capsule, or what has `__dlpack__`, to the device.

    Raises:
        ValueError: it is not in the memory of the CPU.
    """
    if hasattr(ext_tensor, "__dlpack_device__"):
        kind, _ = ext_tensor.__dlpack_device__()
        if kind != DLDeviceType.kDLCPU:
            raise ValueError("PyTorch/XLA DLPack implementation currently only supports CPU.")
    return torch.utils.dlpack.from_dlpack(ext_tensor).to(xla_model.xla_device())
