"""What the graphs of a device run on: this machine's processor, or one of its GPUs, as LTC_DEVICE says.

Device `ltc:1` computes on the GPU after that of `ltc:0`; the processes of a host begin with one each, as
LTC_DEVICE_ORDINAL says. Asked once for each device, when `runtime.device_context` makes its executor.
"""

from __future__ import annotations

import os

import torch

from ltc_core.errors import DeviceError
from ltc_core.settings import settings

__all__ = ["hardware", "hardware_kind"]


def hardware_kind() -> str:
    """Name what the graphs run on, as PJRT does: 'CPU', 'CUDA', 'TPU'."""
    if settings.device == "xla":
        return os.environ.get("PJRT_DEVICE", "").upper() or "CPU"
    return settings.device.upper()


def hardware(index: int) -> torch.device:
    """Return PyTorch's device that the device `index` computes on.

    Raises:
        DeviceError: there is no such GPU.
    """
    if settings.device != "cuda":
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise DeviceError(
            "LTC_DEVICE=cuda, and PyTorch finds no GPU",
            got=f"torch {torch.__version__}, built for CUDA {torch.version.cuda or '(none)'}",
            next="install PyTorch's CUDA build and the driver, or unset LTC_DEVICE",
        )
    count = torch.cuda.device_count()
    ordinal = settings.device_ordinal + index
    if ordinal >= count:
        raise DeviceError(
            f"{settings.device_name}:{index} has no GPU of its own",
            got=f"GPU {ordinal} wanted, {count} visible to PyTorch",
            next="start fewer processes, lower LTC_NUM_DEVICES, or show more GPUs with CUDA_VISIBLE_DEVICES",
        )
    return torch.device("cuda", ordinal)
