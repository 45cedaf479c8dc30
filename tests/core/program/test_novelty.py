"""A script whose graphs do not come again: the numbers are eager's, and its causes are told now and then."""

import random

import pytest
import torch
from torch import nn

import ltc_core as ltc
from ltc_core import metrics
from ltc_core.program.novelty import novelty
from ltc_core.runtime import device_context, devices
from tests.core.counting import Counting


def losses(device: torch.device, steps: int, seed: int = 7) -> list[float]:
    """Trees of another form in each step, as parsers and searches make them."""
    torch.manual_seed(0)
    chosen = random.Random(seed)
    left, right = nn.Linear(4, 4).to(device), nn.Linear(4, 4).to(device)
    optimizer = torch.optim.SGD([*left.parameters(), *right.parameters()], 0.05)
    leaves = torch.randn(24, 4).to(device)

    def tree(low: int, high: int) -> torch.Tensor:
        if high - low == 1:
            return leaves[low:high]
        middle = chosen.randint(low + 1, high - 1)
        return torch.tanh(left(tree(low, middle)) + right(tree(middle, high)))

    found = []
    for _ in range(steps):
        loss = tree(0, chosen.randint(16, 24)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        found.append(loss.item())
    return found


def new_each_time() -> int:
    return metrics.counter_value("CompileCause.new_each_time") or 0


def test_another_tree_in_each_step() -> None:
    device, before = ltc.lazy_device(), new_each_time()
    with Counting() as counted:
        found = losses(device, 60)
    assert found == losses(torch.device("cpu"), 60)
    assert counted.compiles > 50 and novelty.is_rule
    causes = new_each_time() - before
    assert 30 <= causes < counted.compiles - 3
    assert "new each time, " in metrics.summary()


def test_a_graph_that_comes_again_ends_it() -> None:
    device = ltc.lazy_device()
    x = torch.ones(3, device=device)
    found = []
    for _ in range(8):
        for _ in range(100):
            novelty.note_new()
        y = (x * 17.5).cumsum(0) / 3
        ltc.mark_step()
        found.append(novelty.is_rule)
    assert found[-1] is False
    torch.testing.assert_close(y.cpu(), torch.tensor([17.5, 35.0, 52.5]) / 3)


def test_what_is_known_of_graphs_that_do_not_come_again_is_forgotten_sooner(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(device_context, "_STEPS_OF_NEW_GRAPHS", 2000)
    device = ltc.lazy_device()
    with Counting() as counted:
        losses(device, 40)
        assert "TrieForgotten" not in counted.so_far()
        for _ in range(128):
            novelty.note_new()
        losses(device, 20, seed=8)
        assert counted.so_far()["TrieForgotten"] >= 1
    assert devices.context(device.index).trace.steps < 4000
