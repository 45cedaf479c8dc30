"""`torch_xla._internal.tpu`: how many devices there are. Libraries ask it before they use any."""

from __future__ import annotations

import ltc_core as ltc
from ltc_dist.compat.torch_xla.runtime import host_index as task_id
from ltc_dist.compat.torch_xla.runtime import local_device_count as num_available_devices

__all__ = [
    "num_available_chips",
    "num_available_devices",
    "num_local_processes",
    "task_id",
    "version",
]

num_available_chips = num_available_devices


def num_local_processes() -> int:
    """Return the processes that `xmp.spawn` starts."""
    return ltc.settings.num_devices


def version() -> int:
    """The newest TPU that has two devices a chip; the value has no effect here."""
    return 4
