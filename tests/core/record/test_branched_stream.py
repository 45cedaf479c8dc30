"""Branches of a random stream: one for each part of a tensor, and the stream goes on alike whichever part is drawn."""

import pytest
import torch

import ltc_core as ltc
from ltc_core.record import random_state
from ltc_core.record.branched_stream import branched
from tests.core.counting import Counting

DEVICE = ltc.lazy_device()


def drawn(part: int) -> torch.Tensor:
    assert random_state.streams is not None
    with branched(random_state.streams.default(DEVICE.index), part):
        return torch.rand(1000, device=DEVICE)


def test_parts_differ_and_the_stream_goes_on_alike() -> None:
    found = []
    for part in (0, 1, 0):
        ltc.manual_seed(5)
        found.append((drawn(part), drawn(part), torch.rand(4, device=DEVICE)))
    (first, then, after), (other, _, after_other), (again, then_again, _) = found
    assert torch.equal(first, again) and torch.equal(then, then_again)
    assert torch.equal(after, after_other)
    both = torch.stack([first, then, other]).cpu()
    assert both.corrcoef().triu(1).abs().max() < 0.2
    assert (both.mean(1) - 0.5).abs().max() < 0.05


def test_nothing_is_read_and_a_saved_state_brings_the_branch_back() -> None:
    ltc.manual_seed(6)
    ltc.mark_step()
    with Counting() as counted:
        drawn(1)
        saved = ltc.get_rng_state()
        first = drawn(1)
        torch.rand(2, device=DEVICE)
        ltc.set_rng_state(saved)
        second = drawn(1)
    assert not counted.syncs
    assert torch.equal(first, second)


def test_an_error_in_the_block_leaves_the_stream() -> None:
    ltc.manual_seed(7)
    drawn(0)
    expected = torch.rand(3, device=DEVICE)
    ltc.manual_seed(7)
    assert random_state.streams is not None
    with pytest.raises(KeyError), branched(random_state.streams.default(DEVICE.index), 0):
        torch.rand(3, device=DEVICE)
        raise KeyError
    assert torch.equal(torch.rand(3, device=DEVICE), expected)
