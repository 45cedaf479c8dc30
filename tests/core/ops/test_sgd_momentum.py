"""SGD with momentum on the device: eager's numbers, and a first step that is recorded like the others."""

from typing import Any

import pytest
import torch
from torch import nn

import ltc_core as ltc
from tests.core.beside_eager import beside_eager
from tests.core.counting import Counting

OPTIONS: dict[str, dict[str, Any]] = {
    "momentum": {"momentum": 0.9},
    "nesterov": {"momentum": 0.9, "nesterov": True, "weight_decay": 0.1},
    "maximize": {"momentum": 0.5, "maximize": True, "foreach": False},
    "dampened": {"momentum": 0.9, "dampening": 0.3},
    "plain": {},
}


class Loop:
    """Two layers, of which `num_layers` take part in a step."""

    def __init__(self, device: torch.device, **options: Any) -> None:
        torch.manual_seed(0)
        self.device = device
        self.layers = nn.ModuleList([nn.Linear(3, 3), nn.Linear(3, 3)]).to(device)
        self.optimizer = torch.optim.SGD(self.layers.parameters(), lr=0.01, **options)

    def step(self, num_layers: int = 2) -> None:
        x = torch.arange(6.0).view(2, 3).to(self.device)
        for layer in list(self.layers)[:num_layers]:
            x = layer(x)
        self.optimizer.zero_grad()
        x.square().mean().backward()
        self.optimizer.step()
        if self.device.type != "cpu":
            ltc.mark_step()

    @property
    def state(self) -> Any:
        return self.optimizer.state_dict()["state"]


@pytest.mark.parametrize("name", OPTIONS)
def test_parameters_and_state_are_eagers_after_each_step(name: str) -> None:
    def program(device: torch.device) -> Any:
        loop = Loop(device, **OPTIONS[name])
        found = []
        for num_layers in (1, 2, 2, 1):
            loop.step(num_layers)
            parameters = [p.detach().clone() for p in loop.layers.parameters()]
            found.append((parameters, {k: dict(v) for k, v in loop.state.items()}))
        return found

    beside_eager(program, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", ["momentum", "nesterov", "maximize"])
def test_the_first_step_has_the_ops_of_the_others(name: str) -> None:
    loop = Loop(ltc.lazy_device(), **OPTIONS[name])
    counts = []
    for _ in range(3):
        with Counting() as counted:
            loop.step()
        counts.append(counted.ops)
    assert counts[0].pop("zeros_like") == 4
    assert counts[0] == counts[1] == counts[2]


def test_a_momentum_that_was_loaded_is_kept() -> None:
    loop, other = Loop(ltc.lazy_device(), momentum=0.9), Loop(ltc.lazy_device(), momentum=0.9)
    loop.step()
    other.optimizer.load_state_dict(loop.optimizer.state_dict())
    with Counting() as counted:
        other.step()
    assert "zeros_like" not in counted.ops


def test_an_optimizer_of_ones_own_makes_its_state_itself() -> None:
    class Own(torch.optim.SGD):
        pass

    parameter = nn.Parameter(torch.ones(3, device=ltc.lazy_device()))
    optimizer = Own([parameter], lr=0.1, momentum=0.9)
    parameter.grad = torch.ones_like(parameter)
    with Counting() as counted:
        optimizer.step()
        ltc.mark_step()
    assert "zeros_like" not in counted.ops
    assert optimizer.state[parameter]["momentum_buffer"].tolist() == [1.0] * 3
