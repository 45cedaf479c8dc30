"""The functions of `torch_xla._XLAC` that scripts call."""

from __future__ import annotations

from collections.abc import Sequence

import torch

import ltc_core as ltc
from ltc_dist.compat import xla_model

__all__ = [
    "_get_xla_tensors_text",
    "_xla_get_default_device",
    "_xla_get_devices",
    "_xla_metrics_report",
    "_xla_real_devices",
    "_xla_step_marker",
    "_xla_sync_multi",
]


def _xla_metrics_report() -> str:
    return ltc.metrics.metrics_report()


def _xla_get_default_device() -> str:
    return str(ltc.lazy_device())


def _xla_get_devices() -> list[str]:
    return ltc.get_lazy_supported_devices()


def _xla_real_devices(devices: Sequence[str] | None = None) -> list[str]:
    return xla_model.xla_real_devices(devices)


def _xla_sync_multi(
    tensors: Sequence[torch.Tensor],
    devices: Sequence[str] = (),
    wait: bool = True,
    sync_data: bool = True,
) -> None:
    ltc.sync_multi(tensors, devices, wait)


def _xla_step_marker(device: str = "", devices: Sequence[str] = (), wait: bool = False) -> None:
    ltc.mark_step(wait, device=device)


def _get_xla_tensors_text(tensors: Sequence[torch.Tensor]) -> str:
    return ltc.dump_ir(tensors)
