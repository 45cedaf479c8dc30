"""`torch_xla.distributed.fsdp`: parameters that are divided over the processes."""

from ltc_dist.compat.torch_xla.distributed.fsdp.utils import checkpoint_module
from ltc_dist.fully_sharded.consolidate import (
    consolidate_sharded_model_checkpoints,
    consolidate_sharded_state_dicts,
)
from ltc_dist.fully_sharded.wrapper import FullyShardedDataParallel as XlaFullyShardedDataParallel

__all__ = [
    "XlaFullyShardedDataParallel",
    "checkpoint_module",
    "consolidate_sharded_model_checkpoints",
    "consolidate_sharded_state_dicts",
]
