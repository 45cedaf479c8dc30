"""The hardware that runs the graphs of a device: the CPU or one GPU, as LTC_DEVICE says.

Device `ltc:k` of a process computes on the GPU LTC_DEVICE_ORDINAL + k; each process of a host has an ordinal of its
own. Called once for each device, when `runtime.device_context` makes its executor.
"""

from __future__ import annotations

import os

import torch

from ltc_core.errors import DeviceError
from ltc_core.settings import settings

__all__ = ["check_gpu", "hardware", "hardware_kind"]


def hardware_kind() -> str:
    """Kind of the hardware, named as in PJRT: 'CPU', 'CUDA', 'TPU'."""
    if settings.device == "xla":
        return os.environ.get("PJRT_DEVICE", "").upper() or "CPU"
    return settings.device.upper()


def hardware(index: int) -> torch.device:
    """PyTorch device that device `index` computes on.

    Raises:
        DeviceError: there is no such GPU.
    """
    if settings.device != "cuda":
        return torch.device("cpu")
    check_gpu()
    count = torch.cuda.device_count()
    ordinal = settings.device_ordinal + index
    if ordinal >= count:
        raise DeviceError(
            f"{settings.device_name}:{index} has no GPU of its own",
            got=f"GPU {ordinal} wanted, {count} visible to PyTorch",
            next="start fewer processes, lower LTC_NUM_DEVICES, or show more GPUs with CUDA_VISIBLE_DEVICES",
        )
    return torch.device("cuda", ordinal)


def check_gpu() -> None:
    """Raise a `DeviceError` if PyTorch finds no GPU."""
    if not torch.cuda.is_available():
        raise DeviceError(
            "LTC_DEVICE=cuda, and PyTorch finds no GPU",
            got=f"torch {torch.__version__}, built for CUDA {torch.version.cuda or '(none)'}",
            next="install PyTorch's CUDA build and the driver, or unset LTC_DEVICE",
        )
