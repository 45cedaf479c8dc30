"""`torch_xla._internal.tpu`: how many devices there are. Libraries ask it before they use any."""

from __future__ import annotations

import ltc_core as ltc
from ltc_dist.ranks import ranks

__all__ = [
    "num_available_chips",
    "num_available_devices",
    "num_local_processes",
    "task_id",
    "version",
]


def num_available_devices() -> int:
    """Give the devices of this host, whatever they compute on."""
    return len(ltc.get_lazy_supported_devices()) * ranks().local_world_size


num_available_chips = num_available_devices


def num_local_processes() -> int:
    """Give the processes that `xmp.spawn` starts."""
    return ltc.settings.num_devices


def task_id() -> int:
    """Give which host this is, if all have as many processes."""
    here = ranks()
    return here.rank // here.local_world_size


def version() -> int:
    """Give the newest TPU that has two devices a chip, which decides nothing here."""
    return 4
