"""What a loader says of how it deals samples out."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    TensorDataset,
)

import ltc_core as ltc
from ltc_dist.data.dealing import dealing_of
from ltc_dist.data.loader import MpDeviceLoader, ParallelLoader

TEN = TensorDataset(torch.arange(10))


class Backwards(SequentialSampler):
    def __iter__(self) -> Iterator[int]:
        return iter(range(9, -1, -1))


class Shards(DistributedSampler[int]):
    """Contiguous shards."""

    def __iter__(self) -> Iterator[int]:
        return iter(range(self.rank * self.num_samples, (self.rank + 1) * self.num_samples))


class Half(DistributedSampler[int]):
    """As PyTorch's, over half of the samples."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.total_size = self.total_size // 2


class OwnBatches(BatchSampler):
    pass


class Stream(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(10))


class OwnLoader(DataLoader[int]):
    def __iter__(self) -> Any:
        return super().__iter__()


IN_TURN = {
    "num_replicas": 2,
    "rank": 1,
    "shuffle": True,
    "seed": 5,
    "num_samples": 10,
}


@pytest.mark.parametrize(
    ("loader", "order", "is_known"),
    [
        (DataLoader(TEN, 2), "SequentialSampler", True),
        (DataLoader(TEN, 2, shuffle=True), "RandomSampler", True),
        (DataLoader(TEN, 2, sampler=Backwards(TEN)), "Backwards", False),
        (DataLoader(TEN, 2, sampler=[3, 1]), "list", False),
        (DataLoader(TEN, 2, sampler=Shards(TEN, 2, 1)), "Shards", False),
        (DataLoader(TEN, 2, sampler=Half(TEN, 2, 1)), "Half", False),
        (DataLoader(TEN, batch_sampler=OwnBatches(RandomSampler(TEN), 2, False)), "OwnBatches", False),
        (DataLoader(Stream(), 2), "Stream", True),
        (DataLoader(Stream(), 2, num_workers=1), "Stream", False),
        (OwnLoader(TEN, 2), "OwnLoader", False),
        ([1, 2], "list", False),
    ],
)  # fmt: skip
def test_an_order_is_known_if_it_is_one_of_pytorchs(
    loader: Any, order: str, is_known: bool
) -> None:
    assert dealing_of(loader) == {"order": order, "is_known": is_known}


def test_samples_dealt_out_in_turn_are_told_from_within_our_loaders() -> None:
    sampler = DistributedSampler(TEN, 2, 1, seed=5)
    expected = {"order": "DistributedSampler", "is_known": True, **IN_TURN}
    device = ltc.lazy_device()
    loader = MpDeviceLoader(DataLoader(TEN, 2, sampler=sampler), device)
    assert dealing_of(loader) == expected
    inner = ParallelLoader(loader._loader, [device])
    assert dealing_of(inner) == expected
    inner.close()
