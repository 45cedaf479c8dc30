"""Walking a tree of containers, and that the plain save keeps each kind of them."""

import dataclasses
import threading
from collections import OrderedDict, UserDict, defaultdict, namedtuple
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn

from ltc_core.serialization.plain import save
from ltc_core.serialization.tree import leaves, map_leaves, map_tensors, tensors_of

Point = namedtuple("Point", ["x", "y"])


@pytest.fixture(params=["cpu", "lazy"])
def device(request: pytest.FixtureRequest) -> torch.device:
    if request.param == "cpu":
        return torch.device("cpu")
    import ltc_core

    return ltc_core.lazy_device()


class Pair(NamedTuple):
    first: Any
    second: Any = None


@dataclasses.dataclass
class State:
    weight: Any
    step: int = 0


@dataclasses.dataclass(frozen=True, slots=True)
class Frozen:
    weight: Any


class Needy(dict):  # type: ignore[type-arg]
    def __init__(self, needed: Any) -> None:
        super().__init__()
        self.needed = needed


class MyTuple(tuple):  # type: ignore[type-arg]
    def __new__(cls, first: Any, second: Any) -> "MyTuple":
        return super().__new__(cls, (first, second))

    def __getnewargs__(self) -> Any:
        return tuple(self)


def negative(tensor: torch.Tensor) -> torch.Tensor:
    return -tensor


ONE = torch.ones(2)
CONTAINERS: list[Any] = [
    {"a": ONE},
    OrderedDict(a=ONE),
    defaultdict(list, a=[ONE]),
    [ONE, 1],
    (ONE, "x"),
    Point(ONE, 1),
    Pair(ONE),
    ONE.reshape(1, 2).max(0),
    UserDict(a=ONE),
    State(ONE, 3),
    Frozen(ONE),
    MyTuple(ONE, 2),
    [((ONE,), {"b": [State([ONE])]})],
]


def type_tree(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return type(value)
    if isinstance(value, dict | UserDict):
        return type(value), {k: type_tree(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return type(value), [type_tree(v) for v in value]
    if dataclasses.is_dataclass(value):
        fields = [getattr(value, f.name) for f in dataclasses.fields(value)]
        return type(value), [type_tree(v) for v in fields]
    return value


@pytest.mark.parametrize("tree", CONTAINERS, ids=lambda tree: type(tree).__name__)
def test_map_tensors_keeps_types_and_leaves_its_input(tree: Any) -> None:
    before = type_tree(tree), [t.clone() for t in tensors_of(tree)]
    mapped = map_tensors(negative, tree)
    assert type_tree(mapped) == type_tree(tree) == before[0]
    assert [(-t).tolist() for t in tensors_of(mapped)] == [t.tolist() for t in before[1]]
    assert all(a.equal(b) for a, b in zip(tensors_of(tree), before[1], strict=True))


def test_map_tensors_keeps_what_did_not_change() -> None:
    tree = {"same": [1, (2, {3})], "other": [ONE]}
    mapped = map_tensors(negative, tree)
    assert mapped is not tree and mapped["same"] is tree["same"]
    assert map_tensors(lambda tensor: tensor, tree) is tree


def test_map_tensors_maps_a_shared_object_once() -> None:
    part = [ONE]
    mapped = map_tensors(negative, {"a": part, "b": part, "c": (ONE,)})
    assert mapped["a"] is mapped["b"] and mapped["a"][0] is mapped["c"][0]
    assert tensors_of({"a": part, "b": part, "c": (ONE,)}) == [ONE]


def test_map_tensors_follows_cycles() -> None:
    tree: list[Any] = [ONE]
    tree.append({"again": (tree,)})
    mapped = map_tensors(negative, tree)
    assert mapped[1]["again"][0] is mapped and mapped is not tree
    outer = (tree,)
    tree.append(outer)
    mapped_outer = map_tensors(negative, outer)
    assert mapped_outer[0][2] is mapped_outer


def test_map_tensors_keeps_attributes_of_containers() -> None:
    state = nn.BatchNorm1d(2).state_dict()
    assert map_tensors(negative, state)._metadata == state._metadata
    needy = Needy(ONE)
    needy["x"] = ONE
    mapped = map_tensors(negative, needy)
    assert type(mapped) is Needy and mapped["x"].equal(-ONE)


def is_text(value: Any) -> bool:
    return isinstance(value, str)


class Holder:
    def __init__(self, **attributes: Any) -> None:
        vars(self).update(attributes)


def test_leaves_of_another_class() -> None:
    assert map_leaves(is_text, len, {"a": ["xy", (ONE, "z")]})["a"][1] == (ONE, 1)


def test_keys_are_walked_on_request() -> None:
    tree = {"a": "bc", 1: {"d": 2}}
    assert leaves(is_text, tree) == ["bc"]
    assert leaves(is_text, tree, keys=True) == ["a", "bc", "d"]
    assert map_leaves(is_text, str.upper, tree, keys=True) == {"A": "BC", 1: {"D": 2}}


def test_a_mapping_without_attributes_is_made_anew() -> None:
    tree = MappingProxyType({"a": "b"})
    assert map_leaves(is_text, str.upper, tree) == {"a": "B"} and tree["a"] == "b"
    assert map_leaves(is_text, lambda t: t, tree) is tree


def test_attributes_of_objects_are_walked_to_a_depth() -> None:
    inner = Holder(b="two", lock=threading.Lock())
    outer = Holder(a=["one"], inner=inner)
    inner.outer = outer
    assert leaves(is_text, [outer]) == []
    assert leaves(is_text, [outer], objects=1) == ["one"]
    (mapped,) = map_leaves(is_text, str.upper, [outer], objects=1)
    assert mapped is not outer and mapped.a == ["ONE"] and mapped.inner is inner
    mapped = map_leaves(is_text, str.upper, outer, objects=9)
    assert mapped.inner.b == "TWO" and mapped.inner.outer is mapped and outer.a == ["one"]


def test_an_object_without_leaves_is_not_copied() -> None:
    """One that refuses to be copied may stand in a batch."""
    with open(__file__) as file:
        tree = [file, Holder(file=file)]
        assert map_leaves(torch.is_tensor, negative, tree, objects=1) is tree


@pytest.mark.parametrize("tree", CONTAINERS, ids=lambda tree: type(tree).__name__)
def test_save_keeps_structure(tree: Any, device: torch.device, tmp_path: Path) -> None:
    there = map_tensors(lambda tensor: tensor.to(device), tree)
    save(there, tmp_path / "c.pt")
    loaded = torch.load(tmp_path / "c.pt", weights_only=False)
    assert type_tree(loaded) == type_tree(tree)
    for got, want in zip(tensors_of(loaded), tensors_of(tree), strict=True):
        assert got.device.type == "cpu" and got.equal(want)
