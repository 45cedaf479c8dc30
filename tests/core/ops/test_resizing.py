"""Tensors that are resized where they lie, by `resize_` or `out=`: what shares their memory follows as in eager."""

import gc
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

import ltc_core as ltc
from ltc_core.errors import UnsupportedOpError
from ltc_core.tensor import sharing
from tests.core.beside_eager import beside_eager

pytestmark = pytest.mark.filterwarnings("ignore:An output with one or more elements was resized")


def some(device: torch.device) -> Tensor:
    return torch.tensor([1, 0, 2, 3, 5], device=device)


def result_in_a_part(device: torch.device) -> Sequence[Tensor]:
    """A size that is known when the op is recorded."""
    memory = torch.zeros(8, device=device)
    part = memory[2:3]
    torch.add(torch.ones(4, device=device), 1, out=part)
    part.add_(1)
    return memory, part


def chosen_values_in_a_part(device: torch.device) -> Sequence[Tensor]:
    """A size that only the values tell."""
    memory = torch.zeros(6, dtype=torch.int64, device=device)
    part = memory[1:3]
    torch.masked_select(some(device), some(device) > 0, out=part)
    part.add_(1)
    return memory, part


def fewer_than_there_were(device: torch.device) -> Sequence[Tensor]:
    memory = torch.zeros(7, dtype=torch.int64, device=device)
    alias = memory.detach()
    torch.masked_select(some(device), some(device) > 0, out=memory)
    memory.add_(1)
    return memory, alias


def more_than_there_were(device: torch.device) -> Sequence[Tensor]:
    memory = torch.zeros(2, dtype=torch.int64, device=device)
    torch.masked_select(some(device), some(device) > 0, out=memory)
    memory.add_(1)
    return (memory,)


def an_empty_one(device: torch.device) -> Sequence[Tensor]:
    out = torch.empty(0, dtype=torch.int64, device=device)
    alias = out.detach()
    torch.nonzero(some(device).view(1, 5), out=out)
    return out, alias


def several_results(device: torch.device) -> Sequence[Tensor]:
    memory = torch.zeros(9, device=device)
    values, indices = memory[:1], torch.empty(0, dtype=torch.int64, device=device)
    torch.sort(torch.tensor([3.0, 1.0, 2.0], device=device), out=(values, indices))
    values.mul_(2)
    return memory, values, indices


PROGRAMS = (
    result_in_a_part, chosen_values_in_a_part, fewer_than_there_were, more_than_there_were, an_empty_one,
    several_results,
)  # fmt: skip


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda p: p.__name__)
def test_it_stays_a_part_of_its_memory(program: Callable[[torch.device], object]) -> None:
    for _ in range(4):  # followed from the second time on
        beside_eager(program)
        ltc.mark_step()


def test_what_grows_by_itself_keeps_its_values() -> None:
    t = torch.arange(4.0, device=ltc.lazy_device())
    t.resize_(6)
    assert t[:4].tolist() == [0, 1, 2, 3]


def test_shared_memory_does_not_grow() -> None:
    """In eager it would, under every tensor that lies there."""
    memory = torch.zeros(4, device=ltc.lazy_device())
    part = memory[2:]
    with pytest.raises(UnsupportedOpError, match="memory that other tensors share"):
        torch.arange(3.0, out=part)
    with pytest.raises(UnsupportedOpError, match=r"got: \[4\] -> \[6\]"):
        memory.resize_(6)
    assert memory.add_(1).tolist() == [1] * 4 and part.tolist() == [1] * 2
    del part
    assert memory.resize_(5)[:4].tolist() == [1] * 4


def test_an_operand_is_not_resized() -> None:
    for device in (torch.device("cpu"), ltc.lazy_device()):
        t, row = torch.ones(3, device=device), torch.ones(1, 3, device=device)
        for call in (
            lambda t=t, row=row: torch.sub(t, row, out=t),
            lambda t=t: torch.masked_select(t, t > 0, out=t),
        ):
            with pytest.raises(
                RuntimeError, match="doesn't match the broadcast shape|refer to a single memory"
            ):
                call()
        assert t.tolist() == [1.0] * 3


def test_in_inference_mode() -> None:
    with torch.inference_mode():
        out = torch.empty(0, dtype=torch.int64, device=ltc.lazy_device())
        torch.nonzero(some(out.device), out=out)
        assert out.tolist() == [[0], [2], [3], [4]]


@pytest.fixture
def frozen() -> Iterator[Callable[[], None]]:
    """`gc.freeze`, undone at the end of the test."""
    yield gc.freeze
    gc.unfreeze()


def test_shared_memory_that_is_frozen_does_not_grow(frozen: Callable[[], None]) -> None:
    """`gc.freeze()` hides its tensors from the collector."""
    memory = torch.zeros(4, device=ltc.lazy_device())
    part, alias = memory[2:], memory.detach()
    frozen()
    num_frozen = gc.get_freeze_count()
    for t in (memory, part, alias):
        with pytest.raises(UnsupportedOpError, match="memory that other tensors share"):
            t.resize_(6)
    assert gc.get_freeze_count() >= num_frozen
    del part, alias, t
    assert memory.resize_(5)[:4].tolist() == [0] * 4


def test_what_is_alone_grows_without_a_look_at_all_objects(monkeypatch: Any) -> None:
    monkeypatch.setattr(sharing, "alive", None)
    t = torch.zeros(4, device=ltc.lazy_device())
    t.resize_(6)
    part = torch.zeros(4, device=ltc.lazy_device())[2:].data
    assert part.resize_(6)[:2].tolist() == [0, 0]
