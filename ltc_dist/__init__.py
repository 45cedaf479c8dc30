"""ltc_dist: what a training script needs around `ltc_core`: processes, loaders, collectives.

    import ltc_dist as ltd

    def train(rank):
        device = ltd.lazy_device()
        model = Model().to(device)
        for data, target in ltd.MpDeviceLoader(loader, device):
            optimizer.zero_grad()
            loss_fn(model(data), target).backward()
            ltd.optimizer_step(optimizer)

    if __name__ == "__main__":
        ltd.spawn(train, nprocs=2)

It offers the names of `ltc_core` too.
"""

import ltc_dist.expected_name  # noqa: F401  names the device, before ltc_core registers it

# isort: split
from ltc_core import *  # noqa: F403
from ltc_core import __all__ as _core
from ltc_dist import setup as _setup
from ltc_dist.checkpoint import Checkpoint, Checkpointer, latest_checkpoint
from ltc_dist.checkpoint.saving import save as save  # type: ignore[assignment]
from ltc_dist.collectives.bucketized import (
    all_gather_bucketized,
    all_reduce_bucketized_gradients,
    reduce_scatter_bucketized,
)
from ltc_dist.collectives.ops import (
    all_gather,
    all_reduce,
    all_to_all,
    broadcast_master_param,
    collective_broadcast,
    collective_permute,
    reduce_scatter,
)
from ltc_dist.data.loader import MpDeviceLoader, ParallelLoader
from ltc_dist.fully_sharded.wrapper import FullyShardedDataParallel
from ltc_dist.job.host_collectives import do_on_ordinals, mesh_reduce, rendezvous
from ltc_dist.job.ranks import (
    get_local_ordinal,
    get_ordinal,
    is_master_ordinal,
    master_print,
    world_size,
)
from ltc_dist.processes.serial import MpModelWrapper, MpSerialExecutor
from ltc_dist.processes.spawn import spawn
from ltc_dist.train.rate import RateTracker
from ltc_dist.train.step import clip_grad_norm_, optimizer_step, reduce_gradients
from ltc_dist.train.sync_batch_norm import SyncBatchNorm
from ltc_dist.train.zero_redundancy_optimizer import ZeroRedundancyOptimizer

__all__ = [
    *_core,
    "Checkpoint",
    "Checkpointer",
    "FullyShardedDataParallel",
    "MpDeviceLoader",
    "MpModelWrapper",
    "MpSerialExecutor",
    "ParallelLoader",
    "RateTracker",
    "SyncBatchNorm",
    "ZeroRedundancyOptimizer",
    "all_gather",
    "all_gather_bucketized",
    "all_reduce",
    "all_reduce_bucketized_gradients",
    "all_to_all",
    "broadcast_master_param",
    "clip_grad_norm_",
    "collective_broadcast",
    "collective_permute",
    "do_on_ordinals",
    "get_local_ordinal",
    "get_ordinal",
    "is_master_ordinal",
    "latest_checkpoint",
    "master_print",
    "mesh_reduce",
    "optimizer_step",
    "reduce_gradients",
    "reduce_scatter",
    "reduce_scatter_bucketized",
    "rendezvous",
    "spawn",
    "world_size",
]

_setup.set_up()
