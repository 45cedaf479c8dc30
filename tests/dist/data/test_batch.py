"""Batches of every structure: what is moved, what stays what it is."""

from collections import OrderedDict, UserDict, defaultdict, namedtuple
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch.nn.utils.rnn import pack_sequence

import ltc_core as ltc
from ltc_dist.data.batch import num_bytes, to_device

Pair = namedtuple("Pair", ["data", "target"])


@dataclass(frozen=True)
class Sample:
    image: torch.Tensor
    name: str


class Encoding(UserDict[str, torch.Tensor]):
    """As tokenizers give them: with a method `to` that changes it in place."""

    def to(self, device: torch.device) -> "Encoding":
        self.data = {k: v.to(device) for k, v in self.data.items()}
        return self


def ones() -> torch.Tensor:
    return torch.ones(2, 3)


def is_there(t: torch.Tensor) -> bool:
    return t.device == ltc.lazy_device() and bool((t.cpu() == 1).all())


@pytest.mark.parametrize(
    ("batch", "tensors_of"),
    [
        (ones(), lambda b: [b]),
        ((ones(), ones()), list),
        ([ones(), [ones(), 3]], lambda b: [b[0], b[1][0]]),
        (Pair(ones(), "label"), lambda b: [b.data]),
        ({"x": ones(), "n": 7}, lambda b: [b["x"]]),
        (OrderedDict(x=ones()), lambda b: [b["x"]]),
        (defaultdict(list, x=ones()), lambda b: [b["x"]]),
        (Sample(ones(), "cat"), lambda b: [b.image]),
        (Encoding(ids=ones()), lambda b: [b["ids"]]),
    ],
)
def test_the_structure_stays(batch: Any, tensors_of: Any) -> None:
    assert num_bytes(batch) == 24 * len(tensors_of(batch))
    moved = to_device(batch, ltc.lazy_device())
    assert isinstance(moved, type(batch))
    assert all(map(is_there, tensors_of(moved)))


class Record:
    """An object without a method `to`, as some datasets give."""

    def __init__(self, x: torch.Tensor | None) -> None:
        self.x, self.more, self.name = x, {"y": [x]}, "a"
        self.others: list[Record] = []


def test_attributes_of_objects_are_moved() -> None:
    sample, other = Record(torch.ones(2)), Record(torch.ones(3))
    sample.others, other.others = [other], [sample]
    device = ltc.lazy_device()
    moved = to_device([sample], device)[0]
    assert type(moved) is Record and moved.name == "a" and moved.x.device == device
    assert moved.more["y"][0].device == device and sample.x is not None
    assert sample.x.device.type == "cpu"
    assert moved.others == [other] and num_bytes(sample) == 8  # x stands there twice
    without = Record(None)
    assert to_device(without, device) is without


def test_what_is_no_tensor_is_the_same_object() -> None:
    marker = object()
    batch = {"text": "abc", "none": None, "object": marker, "numbers": (1, 2.5), "type": int}
    moved = to_device(batch, ltc.lazy_device())
    assert moved == batch and moved["object"] is marker


def test_the_batch_of_the_loader_is_not_changed() -> None:
    batch = {"x": ones(), "sample": Sample(ones(), "cat")}
    to_device(batch, ltc.lazy_device())
    assert batch["x"].device.type == batch["sample"].image.device.type == "cpu"  # type: ignore[union-attr]


def test_a_default_factory_survives() -> None:
    moved = to_device(defaultdict(list, x=ones()), ltc.lazy_device())
    assert moved["new"] == []


def test_packed_sequences() -> None:
    packed = pack_sequence([ones(), ones()[:1]])
    moved = to_device(packed, ltc.lazy_device())
    assert is_there(moved.data) and num_bytes(packed) >= 36
