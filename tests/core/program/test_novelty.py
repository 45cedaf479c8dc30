"""A script whose graphs do not come again: the numbers are eager's, and its causes are told now and then."""

import random

import torch
from torch import nn

import ltc_core as ltc
from ltc_core import metrics
from ltc_core.program.novelty import novelty
from tests.core.counting import Counting


def losses(device: torch.device, steps: int) -> list[float]:
    """Trees of another form in each step, as parsers and searches make them."""
    torch.manual_seed(0)
    chosen = random.Random(7)
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


def test_another_tree_in_each_step() -> None:
    device = ltc.lazy_device()
    with Counting() as counted:
        found = losses(device, 60)
    assert found == losses(torch.device("cpu"), 60)
    assert counted.compiles > 50 and novelty.is_rule
    causes = metrics.counter_value("CompileCause.new_each_time") or 0
    assert 30 <= causes < counted.compiles - 3
    assert "new each time, " in metrics.summary()


def test_a_graph_that_comes_again_ends_it() -> None:
    device = ltc.lazy_device()
    x = torch.ones(3, device=device)
    found = []
    for _ in range(3):
        for _ in range(100):
            novelty.note_new()
        y = (x * 17.5).cumsum(0) / 3
        ltc.mark_step()
        found.append(novelty.is_rule)
    assert found[-1] is False
    torch.testing.assert_close(y.cpu(), torch.tensor([17.5, 35.0, 52.5]) / 3)
