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

import os as _os

import ltc_dist.expected_name  # for `compat`, before ltc_core registers the device

# isort: split
from ltc_core import *  # noqa: F403
from ltc_core import __all__ as _core
from ltc_core import source as _source
from ltc_dist.bucketized import (
    all_gather_bucketized,
    all_reduce_bucketized_gradients,
    reduce_scatter_bucketized,
)
from ltc_dist.checkpoint import Checkpoint, Checkpointer, latest_checkpoint
from ltc_dist.collectives import (
    all_gather,
    all_reduce,
    all_to_all,
    broadcast_master_param,
    collective_broadcast,
    collective_permute,
    reduce_scatter,
)
from ltc_dist.host import do_on_ordinals, mesh_reduce, rendezvous
from ltc_dist.multiprocessing import MpModelWrapper, MpSerialExecutor, spawn
from ltc_dist.parallel_loader import MpDeviceLoader, ParallelLoader
from ltc_dist.ranks import (
    get_local_ordinal,
    get_ordinal,
    is_master_ordinal,
    master_print,
    world_size,
)
from ltc_dist.rate import RateTracker
from ltc_dist.saving import save as save  # type: ignore[assignment]
from ltc_dist.step import clip_grad_norm_, optimizer_step, reduce_gradients
from ltc_dist.sync_batch_norm import SyncBatchNorm
from ltc_dist.zero_redundancy_optimizer import ZeroRedundancyOptimizer

_source.skip_frames_of(_os.path.dirname(__file__))
if settings.compat:  # noqa: F405
    import ltc_dist.compat  # noqa: F401

__all__ = [
    *_core,
    "Checkpoint",
    "Checkpointer",
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
