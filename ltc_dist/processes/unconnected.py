"""A warning for jobs whose processes exchange nothing.

The script does not average gradients, or a library does not know of the job. Each process then trains a model of its
own, and all may write the same files.

Begun by the launcher's `shim` and by `spawn` in each process, before the script.
"""

from __future__ import annotations

import sys
from typing import Any

import torch.distributed
from torch.optim.optimizer import register_optimizer_step_post_hook

from ltc_core.settings import settings
from ltc_dist.collectives.process_group import has_connected
from ltc_dist.job.ranks import ranks

__all__ = ["watch"]

_STEPS = 10  # by then a script has connected its processes

_count = 0


def watch() -> None:
    """Count the optimizers' steps of this process; called once in it. After some of them rank 0 warns."""
    register_optimizer_step_post_hook(_after_step)


def _after_step(optimizer: Any, args: Any, kwargs: Any) -> None:
    global _count
    _count += 1
    if _count != _STEPS:
        return
    here = ranks()
    if here.rank or here.world_size == 1 or here.threads or settings.spmd:
        return
    if has_connected() or torch.distributed.is_available() and torch.distributed.is_initialized():
        return
    print(
        f"ltc: {here.world_size} processes train each by itself: in {_STEPS} steps nothing was exchanged between them. "
        "Next: ltc_dist.optimizer_step(optimizer) in place of optimizer.step(), or DistributedDataParallel; "
        "if that is meant, ignore this",
        file=sys.stderr,
    )
