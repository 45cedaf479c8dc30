"""Tensors of which each process has written parts: they are put together, or what lacks is told."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from ltc_core.errors import CheckpointError, CheckpointFormatError
from ltc_core.serialization.directory import StoredTensor
from ltc_dist.checkpoint.mesh_parts import Divider, put_together

WHOLE = torch.arange(12.0).view(4, 3)
LISTED = [{"shape": [2], "kind": torch.zeros(0)}, {"shape": [4, 3], "kind": torch.zeros(0)}]
TREE = {"model": {"a": {"__divided_tensor__": 1}, "b": 3}, "same": [{"__divided_tensor__": 1}]}


def stored(values: torch.Tensor) -> StoredTensor:
    return StoredTensor(tuple(values.shape), values.dtype, lambda: values)


def part(begin: int, end: int, values: torch.Tensor = WHOLE) -> tuple[str, dict[str, Any]]:
    of_rows = stored(values[begin:end])
    return "rank_00000", {"tensor": 1, "offsets": [begin, 0], "values": of_rows}


def read(*parts: tuple[str, dict[str, Any]], listed: list[dict[str, Any]] = LISTED) -> Any:
    def found(numbers: set[int]) -> Iterator[tuple[str, dict[str, Any]]]:
        assert numbers == {1}
        return iter(parts)

    return put_together(TREE, listed, found)


def test_parts_are_put_together_once_for_all_places() -> None:
    tree = read(part(2, 4), part(0, 2))
    assert torch.equal(tree["model"]["a"], WHOLE) and tree["model"]["b"] == 3
    assert tree["same"][0] is tree["model"]["a"]


def test_a_parameter_stays_one() -> None:
    kind = torch.nn.Parameter(torch.zeros(0), requires_grad=False)
    found = read(part(0, 4), listed=[LISTED[0], {"shape": [4, 3], "kind": kind}])["model"]["a"]
    assert isinstance(found, torch.nn.Parameter) and not found.requires_grad
    assert torch.equal(found, WHOLE)


def test_a_part_that_lacks_is_told() -> None:
    with pytest.raises(CheckpointError, match=r"of shape \[4, 3\] is not there as a whole"):
        read(part(0, 3))


@pytest.mark.parametrize("begin", [2, -1])
def test_a_part_that_does_not_fit_is_told(begin: int) -> None:
    with pytest.raises(CheckpointFormatError, match="rank_00000/index.json: a part does not fit"):
        read(("rank_00000", {"tensor": 1, "offsets": [begin, 0], "values": stored(WHOLE[:3])}))
    with pytest.raises(CheckpointFormatError, match="does not fit"):
        read(part(0, 4, WHOLE.double()))


@pytest.mark.parametrize(
    "listed", [LISTED[:1], [LISTED[0], {"shape": [4, -3], "kind": torch.zeros(0)}], [LISTED[0], {}]]
)
def test_a_tensor_that_is_not_described_is_told(listed: list[dict[str, Any]]) -> None:
    with pytest.raises(CheckpointFormatError, match="does not describe a divided tensor"):
        read(part(0, 4), listed=listed)


def test_what_each_process_has_stays_whole() -> None:
    weight = torch.ones(3, device="ltc") * 2
    divider = Divider(writes_rest=True)
    tree = divider.rest_of({"a": weight, "b": weight, "c": torch.zeros(1), "d": "text"})
    assert tree["a"].device.type == "cpu" and tree["a"].tolist() == [2.0, 2.0, 2.0]
    assert tree["a"].data_ptr() == tree["b"].data_ptr() and tree["d"] == "text"
    assert divider.tensors == [] and divider.parts == []


def test_who_writes_no_whole_tensors_copies_none(monkeypatch: pytest.MonkeyPatch) -> None:
    weight = torch.ones(3, device="ltc") * 2
    divider = Divider(writes_rest=False)
    monkeypatch.setattr(divider, "_copies", None)
    assert divider.rest_of({"a": weight, "d": "text"}) == {"a": None, "d": "text"}
    assert divider.tensors == [] and divider.parts == []
