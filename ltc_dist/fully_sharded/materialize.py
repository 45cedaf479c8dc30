"""Memory and values for modules that were made on the meta device."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

from ltc_core.errors import DeviceError

__all__ = ["materialize"]


def materialize(module: nn.Module, init: Callable[[nn.Module], None] | None) -> None:
    """Allocate the tensors that are on the meta device, on the CPU, and initialize them.

    Args:
        init: called with each module that has such tensors; None for its `reset_parameters`.

    Raises:
        DeviceError: a module has no `reset_parameters`.
    """
    for each in module.modules():
        own = [*each.parameters(recurse=False), *each.buffers(recurse=False)]
        if not any(t.is_meta for t in own):
            continue
        if init is not None:
            init(each)
            continue
        if not callable(reset := getattr(each, "reset_parameters", None)):
            raise DeviceError(
                f"a {type(each).__name__} is on the meta device and cannot be given values",
                got="it has no reset_parameters",
                next="give param_init_fn, or make the module on the CPU",
            )
        each.to_empty(device="cpu", recurse=False)
        with torch.no_grad():
            reset()
