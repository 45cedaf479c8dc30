"""torch.utils.data with tensors of the device: datasets, samplers, collation, splits, as with the CPU's."""

from typing import Any

import torch
from torch.utils.data import (
    BatchSampler,
    ConcatDataset,
    DataLoader,
    RandomSampler,
    SequentialSampler,
    StackDataset,
    Subset,
    TensorDataset,
    WeightedRandomSampler,
    default_collate,
    default_convert,
    random_split,
)

import ltc_core as ltc
from tests.core.beside_eager import assert_same


def tensors(device: Any) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.arange(24.0).view(12, 2).to(device), torch.arange(12).to(device)


def generator() -> torch.Generator:
    return torch.Generator().manual_seed(1)


def everything(device: Any) -> Any:
    x, y = tensors(device)
    whole = TensorDataset(x, y)
    parts = random_split(whole, [5, 7], generator=generator())
    shuffled = RandomSampler(whole, generator=generator())
    weighted = WeightedRandomSampler(range(1, 13), 6, generator=generator())
    by_batch = BatchSampler(SequentialSampler(whole), 5, drop_last=False)
    found: list[Any] = [
        list(DataLoader(whole, 5)),
        list(DataLoader(whole, 5, sampler=shuffled)),
        list(DataLoader(whole, 3, sampler=weighted)),
        list(DataLoader(whole, batch_sampler=by_batch)),
        list(DataLoader(ConcatDataset([parts[1], Subset(whole, [2, 0])]), 4)),
        list(DataLoader(StackDataset(a=x, b=y), 6)),
        default_collate([{"a": x[k], "b": (float(k), y[k])} for k in range(3)]),
        default_convert([x[0], {"n": 3}]),
    ]
    return found


def test_loaders_yield_tensors_of_the_device_as_they_do_of_the_cpu() -> None:
    device = ltc.lazy_device()
    for _ in range(3):  # what was recorded is followed
        found = everything(device)
        assert found[0][0][0].device == device and found[7][0].device == device
        assert_same(found, everything("cpu"))


def test_samplers_take_tensors_of_the_device() -> None:
    _, y = tensors(ltc.lazy_device())
    data = TensorDataset(y)
    assert [int(row[0]) for row in Subset(data, y[3:5].tolist())] == [3, 4]
    weights = torch.tensor([0.0, 1.0, 0.0], device=ltc.lazy_device())
    assert list(WeightedRandomSampler(weights, 4)) == [1] * 4
