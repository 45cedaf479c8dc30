"""How the samples of an epoch are dealt out to batches and processes: what a loader's position means elsewhere.

A position is a number of batches. It says which samples were used only if the order of the samples is known and does
not depend on the batch size; for another number of processes, only if they are dealt out in turn, as DistributedSampler
does. `dealing_of` says what a loader does, as a value for a checkpoint. Used by `ltc_dist.checkpoint.resplit`.
"""

from __future__ import annotations

from typing import Any

from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from ltc_dist.data.loader import MpDeviceLoader, ParallelLoader

__all__ = ["dealing_of"]

_KNOWN = (
    DistributedSampler,
    SequentialSampler,
    RandomSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)


def dealing_of(loader: Any) -> dict[str, Any]:
    """How a loader deals samples out.

    Returns:
        "order": what decides it, by name; "is_known": whether it is the same for each batch size; for samples that are
        dealt out in turn also "num_replicas" and "rank", and what decides the order of all: "num_samples", "shuffle",
        "seed".
    """
    while isinstance(loader, MpDeviceLoader | ParallelLoader):
        loader = loader._loader if isinstance(loader, MpDeviceLoader) else loader._cpu_loader
    kind = type(loader)
    if not isinstance(loader, DataLoader) or (
        kind.__iter__ is not DataLoader.__iter__
        or kind._get_iterator is not DataLoader._get_iterator
    ):
        return {"order": kind.__name__, "is_known": False}
    if isinstance(loader.dataset, IterableDataset):
        # Worker processes take turns by batches, so the batch size decides the order.
        return {"order": type(loader.dataset).__name__, "is_known": loader.num_workers == 0}
    if type(loader.batch_sampler) not in (BatchSampler, type(None)):
        return {"order": type(loader.batch_sampler).__name__, "is_known": False}
    sampler: Any = loader.sampler
    order = {"order": type(sampler).__name__, "is_known": _is_known(sampler)}
    if isinstance(sampler, DistributedSampler) and order["is_known"]:
        names = ("num_replicas", "rank", "shuffle", "seed")
        order |= {name: getattr(sampler, name) for name in names}
        order["num_samples"] = len(sampler.dataset)  # type: ignore[arg-type]
    return order


def _is_known(sampler: Any) -> bool:
    """Whether a sampler's order is that of one of PyTorch's; a subclass may have one of its own."""
    known = [kind for kind in _KNOWN if isinstance(sampler, kind)]
    if not known or type(sampler).__iter__ is not known[0].__iter__:
        return False
    if not isinstance(sampler, DistributedSampler):
        return True
    num_samples = len(sampler.dataset)  # type: ignore[arg-type]
    is_whole = abs(sampler.total_size - num_samples) < sampler.num_replicas
    return is_whole and sampler.total_size == sampler.num_samples * sampler.num_replicas
