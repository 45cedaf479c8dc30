"""`torch_xla.distributed.xla_backend`: torch.distributed's backend 'xla', and its rendezvous xla:// and pjrt://.

The backend is gloo, on tensors of the device and of the CPU: see `ltc_core.api.c10d`.
"""

from __future__ import annotations

from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import torch.distributed

from ltc_core.settings import settings
from ltc_dist.job.ranks import ranks

__all__ = ["new_xla_process_group"]

dist: Any = torch.distributed  # the stubs of its types are incomplete

_BACKEND = "xla"
_SCHEMES = ("xla", "pjrt")


def _meet(
    url: str, timeout: timedelta = dist.default_pg_timeout, **kwargs: Any
) -> Iterator[tuple[Any, int, int]]:
    """Find the other processes as env:// does; a process that is alone needs no variables."""
    here = ranks()
    if here.world_size == 1:
        yield dist.HashStore(), 0, 1
        return
    yield from dist.rendezvous("env://", here.rank, here.world_size, timeout=timeout)


def new_xla_process_group(
    ranks: list[int] | None = None,
    timeout: timedelta = dist.default_pg_timeout,
    backend: str | None = None,
    pg_options: Any = None,
) -> Any:
    """Make a group of some processes; the same as `torch.distributed.new_group`."""
    return dist.new_group(ranks, timeout, backend, pg_options)


def _register() -> None:
    if dist.is_backend_available(_BACKEND):  # under another of its names
        return
    devices = [settings.device_name, "cpu"]
    dist.Backend.register_backend(_BACKEND, dist.ProcessGroupGloo, devices=devices)
    for scheme in _SCHEMES:
        dist.register_rendezvous_handler(scheme, _meet)


_register()
