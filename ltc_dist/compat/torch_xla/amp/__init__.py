"""`torch_xla.amp`, and `lazy_tensor_core.amp`: `torch.autocast` for a device, and a `GradScaler`."""

from __future__ import annotations

from typing import Any

import torch

import ltc_core as ltc
from ltc_core.api.grad_scaler import GradScaler

__all__ = ["GradScaler", "autocast"]


class autocast(torch.autocast):
    """`torch.autocast` for the kind of a device; a context and a decorator.

    Takes `(device, enabled=True, dtype=None, cache_enabled=True)`, and as up to 1.13 the same without `device`.

    Args:
        device: such as `xm.xla_device()`, or its name.
        enabled: without it the block runs as it is.
        dtype: None for bfloat16.
        cache_enabled: whether a weight that is used twice is cast once.

    Source: `torch_xla.amp.autocast`, which does nothing on the CPU.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        names = ["device", "enabled", "dtype", "cache_enabled"]
        if args and isinstance(args[0], bool):
            names.remove("device")
        given = {**dict(zip(names, args, strict=False)), **kwargs}
        kind = torch.device(given.pop("device", ltc.settings.device_name)).type
        dtype = given.pop("dtype", None) or torch.bfloat16
        super().__init__(kind, dtype, **given)
