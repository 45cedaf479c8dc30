"""`ltm`: `lazy_tensor_core.core.lazy_model`, which has most names of `xm` and some of its own."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch.distributed

import ltc_core as ltc
from ltc_core import is_lazy_tensor, lazy_device, lazy_device_hw
from ltc_core.api.verbs import DeviceLike
from ltc_dist.compat.torch_xla.core import xla_model
from ltc_dist.compat.torch_xla.core.xla_model import *  # noqa: F403
from ltc_dist.compat.torch_xla.core.xla_model import ToXlaTensorArena as ToLazyTensorArena
from ltc_dist.compat.torch_xla.core.xla_model import (
    get_xla_supported_devices as get_lazy_supported_devices,
)
from ltc_dist.compat.torch_xla.core.xla_model import parse_xla_device as parse_lazy_device
from ltc_dist.compat.torch_xla.core.xla_model import xla_real_devices as lazy_real_devices
from ltc_dist.compat.torch_xla.core.xla_model import (
    xla_replication_devices as lazy_replication_devices,
)

__all__ = [
    *(name for name in xla_model.__all__ if "xla" not in name.lower() and name != "mark_step"),
    "LazyProcessGroup",
    "ToLazyTensorArena",
    "create_lazy_process_group",
    "get_lazy_supported_devices",
    "is_lazy_tensor",
    "lazy_device",
    "lazy_device_hw",
    "lazy_real_devices",
    "lazy_replication_devices",
    "mark_step",
    "parse_lazy_device",
    "set_noop_execution_mode",
]

LazyProcessGroup: Any = torch.distributed.ProcessGroupGloo


def create_lazy_process_group(store: Any, rank: int, size: int, timeout: timedelta) -> Any:
    """Connect processes, for `torch.distributed.Backend.register_backend`."""
    return LazyProcessGroup(store, rank, size, timeout)


def mark_step(  # type: ignore[no-redef]
    device: DeviceLike = None, wait: bool = False, **kwargs: Any
) -> None:
    """End the step, of one device if it is named."""
    ltc.mark_step(wait, device=device)


def set_noop_execution_mode(flag: bool) -> None:
    """Refused if true: nothing would be computed. LTC_EXECUTOR=null measures recording alone."""
    if flag:
        raise ltc.errors.LtcError(
            "set_noop_execution_mode cannot be changed in a running program",
            got=repr(flag),
            next="start it with LTC_EXECUTOR=null",
        )
