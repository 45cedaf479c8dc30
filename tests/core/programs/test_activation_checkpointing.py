"""Activation checkpointing: the same gradients, the same random draws, and no more syncs.

`torch.utils.checkpoint` saves the random state of every device before a segment and sets it again
to recompute it. On the device a state is a value of the graph: neither is a reason to wait.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint, checkpoint_sequential

import ltc_core as ltc
from tests.core.beside_eager import assert_same, beside_eager
from tests.core.counting import Counting

VARIANTS = {"reentrant": True, "not_reentrant": False}

pytestmark = pytest.mark.usefixtures("marked_steps")


class Net(nn.Module):
    """Three blocks with dropout, checkpointed as `wrap` says."""

    def __init__(self, wrap: Callable[[nn.Module, Tensor], Tensor]) -> None:
        super().__init__()
        self.wrap = wrap
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5), nn.Tanh()) for _ in range(3)
        )

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = self.wrap(block, x)
        return x.square().mean()


def plain(block: nn.Module, x: Tensor) -> Tensor:
    return block(x)  # type: ignore[no-any-return]


def checkpointed(use_reentrant: bool) -> Callable[[nn.Module, Tensor], Tensor]:
    return lambda block, x: checkpoint(block, x, use_reentrant=use_reentrant)


def gradients(device: torch.device, wrap: Callable[[nn.Module, Tensor], Tensor]) -> Any:
    torch.manual_seed(0)
    net = Net(wrap).to(device)
    x = torch.ones(4, 8, device=device, requires_grad=True)
    torch.manual_seed(1)
    loss = net(x)
    drawn_before = torch.rand(3, device=device)
    loss.backward()
    drawn_after = torch.rand(3, device=device)
    return loss.detach(), x.grad, [p.grad for p in net.parameters()], drawn_before, drawn_after


@pytest.mark.parametrize("variant", VARIANTS)
def test_gradients_and_draws_are_those_of_eager(variant: str) -> None:
    wrap = checkpointed(VARIANTS[variant])
    beside_eager(lambda device: gradients(device, wrap), rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize("variant", VARIANTS)
def test_gradients_and_draws_are_those_without_it(variant: str) -> None:
    device = ltc.lazy_device()
    expected = ltc.to_cpu(gradients(device, plain))
    assert_same(gradients(device, checkpointed(VARIANTS[variant])), expected)


@pytest.mark.parametrize("variant", VARIANTS)
def test_it_adds_no_sync(variant: str) -> None:
    counts = {}
    for name, wrap in {"plain": plain, variant: checkpointed(VARIANTS[variant])}.items():
        torch.manual_seed(0)
        device = ltc.lazy_device()
        net = Net(wrap).to(device)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        x = torch.ones(4, 8, device=device, requires_grad=True)
        steps = []
        for _ in range(4):
            with Counting() as counted:
                optimizer.zero_grad()
                net(x).backward()
                optimizer.step()
                ltc.mark_step()
            steps.append(counted)
        assert [s.syncs for s in steps] == [{"MarkStep": 1}] * 4, name
        assert [s.fallbacks for s in steps] == [{}] * 4, name
        assert sum(s.compiles for s in steps[2:]) == 0, name
        counts[name] = sum(steps[-1].ops.values())
    assert counts["plain"] < counts[variant]  # the segments were recomputed


def test_without_the_random_state_the_draws_are_others() -> None:
    device = ltc.lazy_device()
    kept = gradients(device, checkpointed(False))
    lost = gradients(
        device, lambda b, x: checkpoint(b, x, use_reentrant=False, preserve_rng_state=False)
    )
    assert lost[0].equal(kept[0]) and not lost[1].equal(kept[1])  # forward draws the same


@pytest.mark.parametrize("variant", VARIANTS)
def test_sequential_and_nested(variant: str) -> None:
    use_reentrant = VARIANTS[variant]

    def program(device: torch.device) -> Any:
        torch.manual_seed(0)
        layers = [nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.3)) for _ in range(4)]
        net = nn.Sequential(*layers).to(device)
        torch.manual_seed(1)  # building drew from the CPU's stream, which is another one
        x = torch.ones(2, 4, device=device, requires_grad=True)
        checkpoint_sequential(net, 2, x, use_reentrant=use_reentrant).sum().backward()

        def inner(t: Tensor) -> Tensor:
            return net[0](t).sin()

        def outer(t: Tensor) -> Tensor:
            return checkpoint(inner, t, use_reentrant=use_reentrant) * 2

        checkpoint(outer, x, use_reentrant=use_reentrant).sum().backward()
        return x.grad, [p.grad for p in net.parameters()]

    beside_eager(program, rtol=1e-6, atol=1e-7)


def test_a_cut_between_forward_and_backward() -> None:
    def program(device: torch.device) -> Any:
        torch.manual_seed(0)
        net = Net(checkpointed(False)).to(device)
        torch.manual_seed(1)
        x = torch.ones(4, 8, device=device, requires_grad=True)
        loss = net(x)
        if device.type != "cpu":
            ltc.mark_step()
        loss.backward()
        return loss, x.grad

    beside_eager(program, rtol=1e-6, atol=1e-8)
