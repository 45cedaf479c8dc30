"""`torch_xla.distributed.fsdp.xla_flatten_params_wrapper`: what stands between the wrapper and the module there.

Parameters are flattened by `XlaFullyShardedDataParallel(flatten_parameters=True)`.
"""

from __future__ import annotations

from typing import Any

from torch import nn

from ltc_dist.fully_sharded.transparent import Transparent

__all__ = ["XlaFlattenParamsWrapper"]


class XlaFlattenParamsWrapper(Transparent):
    """Has the attributes and the forward of a module. It is made when it is asked for, and is part of no other."""

    HELD = "_fpw_module"

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self._fpw_module = module

    @property
    def module(self) -> nn.Module:
        return self._fpw_module

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self._fpw_module(*args, **kwargs)
