"""DTensor on this device: its random numbers, and attention.

PyTorch's tracker of random numbers takes the state of every device for that of a GPU: it moves an offset in it to where
a part of the tensor begins. Here each part gets a branch of the stream (`record.branched_stream`). Ranks that hold
copies of a part draw equal numbers, ranks with different parts different ones, and all go on alike.
"""

from __future__ import annotations

import contextlib
from typing import Any

import torch
import torch.distributed as dist

import ltc_core as ltc
from ltc_core.record import random_state
from ltc_core.record.branched_stream import branched
from ltc_core.settings import settings

__all__ = ["change_package", "change_random"]

aten = torch.ops.aten


def change_package(module: Any) -> None:
    """Register shardings for the attention kernel of a CPU: replicated, sharded by batch, sharded by heads."""
    from torch.distributed.tensor.experimental import register_sharding

    ways = (module.Replicate(), module.Shard(0), module.Shard(1))

    @register_sharding(aten._scaled_dot_product_flash_attention_for_cpu.default)  # type: ignore[untyped-decorator]
    def forward(*args: Any, **kwargs: Any) -> Any:
        return [([way] * 2, [way] * 3) for way in ways]

    @register_sharding(aten._scaled_dot_product_flash_attention_for_cpu_backward.default)  # type: ignore[untyped-decorator]
    def backward(*args: Any, **kwargs: Any) -> Any:
        return [([way] * 3, [way] * 6) for way in ways]


def change_random(module: Any) -> None:
    """Change `torch.distributed.tensor._random`."""
    tracker = module.OffsetBasedRNGTracker
    begin, region = tracker.__init__, tracker._distribute_region

    def __init__(self: Any, device_mesh: Any, run_state_sync: bool = True) -> None:
        is_ours = device_mesh.device_type == settings.device_name
        begin(self, device_mesh, run_state_sync and not is_ours)
        if is_ours and run_state_sync:
            _share_state(module.logger)

    @contextlib.contextmanager
    def _distribute_region(self: Any, spec: Any, generator: torch.Generator | None = None) -> Any:
        if spec.mesh.device_type != settings.device_name:
            with region(self, spec, generator):
                yield
            return
        with branched(_stream(generator), _part(spec)):
            yield

    tracker.__init__, tracker._distribute_region = __init__, _distribute_region


def _share_state(logger: Any) -> None:
    """Broadcast the random state of rank 0. A rank whose state was another one logs a warning, as PyTorch's does."""
    own = ltc.get_rng_state().cpu()
    shared = own.clone()
    dist.broadcast(shared, 0)
    if not torch.equal(own, shared):
        logger.warning(
            "DTensor gives every rank the random state of rank 0. Call torch.manual_seed() with one seed on all ranks."
        )
        ltc.set_rng_state(shared)


def _stream(generator: torch.Generator | None) -> random_state.Stream:
    assert random_state.streams is not None
    if generator is None:
        return random_state.streams.default(ltc.lazy_device().index)
    return random_state.stream_of(generator)


def _part(spec: Any) -> int:
    """Number of this process's part of a tensor; copies of one part have one number."""
    coordinates = spec.mesh.get_coordinate()
    found = 0
    for dim, placement in enumerate(spec.placements):
        if not (placement.is_replicate() or placement.is_partial()):
            found = found * spec.mesh.size(dim) + coordinates[dim]
    return found
