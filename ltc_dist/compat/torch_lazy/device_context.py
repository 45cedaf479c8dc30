"""`torch._lazy.device_context`: an object for each device, where scripts may keep attributes."""

from __future__ import annotations

import torch

import ltc_core as ltc
from ltc_core.api.verbs import DeviceLike

__all__ = ["DeviceContext", "get_device_context"]


class DeviceContext:
    """The attributes that are kept for a device."""

    def __init__(self, device: str) -> None:
        self.device = device


_contexts: dict[str, DeviceContext] = {}


def get_device_context(device: DeviceLike = None) -> DeviceContext:
    """Return the object of a device, by default the current one; always the same."""
    if device is None or str(device) == ltc.settings.device_name:
        device = ltc.lazy_device()
    name = str(torch.device(device))
    return _contexts.setdefault(name, DeviceContext(name))
