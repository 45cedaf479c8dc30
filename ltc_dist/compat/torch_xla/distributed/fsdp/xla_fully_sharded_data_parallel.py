"""`torch_xla.distributed.fsdp.xla_fully_sharded_data_parallel`: the wrapper, as scripts look into it."""

from __future__ import annotations

from typing import Any

from ltc_dist.compat.torch_xla.distributed.fsdp.xla_flatten_params_wrapper import (
    XlaFlattenParamsWrapper,
)
from ltc_dist.fully_sharded.wrapper import FullyShardedDataParallel

__all__ = ["XlaFullyShardedDataParallel"]


class XlaFullyShardedDataParallel(FullyShardedDataParallel):
    """`ltc_dist.FullyShardedDataParallel`, whose `module.module` is the module that was wrapped."""

    @property
    def module(self) -> Any:
        return XlaFlattenParamsWrapper(self._fsdp_wrapped_module)
