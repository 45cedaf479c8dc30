"""ignite: `device` of its `distributed` is the device of this process, with one process and in a job of gloo.

What ignite derives from it follows: models, optimizers, loaders, collectives, metrics. Processes are joined
by PyTorch's process group, so a model of several processes is wrapped in DistributedDataParallel.
"""

from __future__ import annotations

import functools
from typing import Any

import torch

from ltc_core.settings import settings
from ltc_dist.libraries.telling import tell

__all__ = ["change_job", "change_single"]


def change_single(module: Any) -> None:
    """Replace the method by which a process without a process group chooses its device."""
    _change_device(module._SerialModel)


def change_job(module: Any) -> None:
    """Replace the method by which a process of a job chooses its device: with gloo, the backend of processors."""
    if module.has_native_dist_support:
        _change_device(module._NativeDistModel)


def _change_device(model: Any) -> None:
    choose = model.device

    @functools.wraps(choose)
    def device(self: Any) -> torch.device:
        if self.backend() not in (None, "gloo"):
            return choose(self)  # type: ignore[no-any-return]
        tell("idist.device() of ignite", "torch.device('cpu') in its place chooses", "is")
        return torch.device(settings.device_name, torch.accelerator.current_device_index())

    model.device = device
