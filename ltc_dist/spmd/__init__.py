"""Sharding by annotation: one process, many devices, and a script that looks as if there were one.

`Mesh` arranges the devices, `mark_sharding` says how a tensor is divided over them; XLA divides everything else and
inserts the collectives. It needs LTC_EXECUTOR=jax; with any other executor a mesh has one device, and marks nothing.
"""

from ltc_dist.spmd.distribute import xla_distribute_module, xla_distribute_tensor
from ltc_dist.spmd.fully_sharded import SpmdFullyShardedDataParallel
from ltc_dist.spmd.manual import (
    disable_manual_sharding,
    enable_manual_sharding,
    mark_manual_sharding,
)
from ltc_dist.spmd.manual_collectives import (
    all_gather,
    all_reduce,
    all_to_all,
    permute,
    reduce_scatter,
)
from ltc_dist.spmd.mesh import (
    HybridMesh,
    Mesh,
    get_1d_mesh,
    get_global_mesh,
    num_devices,
    set_global_mesh,
)
from ltc_dist.spmd.processes import use_spmd
from ltc_dist.spmd.sharding import (
    MarkShardingFunction,
    Shard,
    ShardingSpec,
    apply_backward_optimization_barrier,
    clear_sharding,
    is_manual,
    local_shards,
    mark_sharding,
    mark_sharding_with_gradients,
    sharding_of,
)

__all__ = [
    "HybridMesh",
    "MarkShardingFunction",
    "Mesh",
    "Shard",
    "ShardingSpec",
    "SpmdFullyShardedDataParallel",
    "all_gather",
    "all_reduce",
    "all_to_all",
    "apply_backward_optimization_barrier",
    "clear_sharding",
    "disable_manual_sharding",
    "enable_manual_sharding",
    "get_1d_mesh",
    "get_global_mesh",
    "is_manual",
    "local_shards",
    "mark_manual_sharding",
    "mark_sharding",
    "mark_sharding_with_gradients",
    "num_devices",
    "permute",
    "reduce_scatter",
    "set_global_mesh",
    "sharding_of",
    "use_spmd",
    "xla_distribute_module",
    "xla_distribute_tensor",
]
