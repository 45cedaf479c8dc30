"""`torch._lazy` and `torch._lazy.closure`, over `ltc_core`."""

from __future__ import annotations

import torch

import ltc_core as ltc
from ltc_core import add_step_closure, save, sync_multi, to_cpu, wait_device_ops
from ltc_core.api.closures import run_step_closures
from ltc_core.api.verbs import DeviceLike

__all__ = [
    "add_step_closure",
    "get_tensor_id",
    "mark_step",
    "run_step_closures",
    "save",
    "sync_multi",
    "to_cpu",
    "wait_device_ops",
]


def mark_step(device: DeviceLike = "", wait: bool = False) -> None:
    """End the step, of one device if it is named; see `ltc_core.mark_step`."""
    ltc.mark_step(wait, device=device)


def get_tensor_id(tensor: torch.Tensor) -> int:
    """Number of a tensor, unique among live tensors."""
    return id(tensor)
