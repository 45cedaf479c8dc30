"""`torch_xla.distributed.fsdp`: parameters that are divided over the processes."""

from ltc_dist.compat.torch_xla.distributed.fsdp.utils import checkpoint_module
from ltc_dist.compat.torch_xla.distributed.fsdp.xla_fully_sharded_data_parallel import (
    XlaFullyShardedDataParallel,
)
from ltc_dist.fully_sharded.consolidate import (
    consolidate_sharded_model_checkpoints,
    consolidate_sharded_state_dicts,
)

__all__ = [
    "XlaFullyShardedDataParallel",
    "checkpoint_module",
    "consolidate_sharded_model_checkpoints",
    "consolidate_sharded_state_dicts",
]
