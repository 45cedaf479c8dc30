"""Whole parameters, as modules find them, and their gradients: the same training as eager's, in one process."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from ltc_dist import FullyShardedDataParallel as Sharded
from ltc_dist.fully_sharded.consolidate import consolidate_sharded_state_dicts

pytestmark = pytest.mark.usefixtures("marked_steps")


class Penalized(nn.Module):
    """Asks for its own parameters in forward."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.layer(x.to(next(self.parameters()).dtype))
        return x + sum(p.square().sum() for name, p in self.named_parameters() if "weight" in name)


def penalized() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 3), Penalized())


class Sharing(nn.Module):
    """Has one layer in three places."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(3, 3)
        self.second = self.first
        self.last = nn.Sequential(self.first, nn.Tanh())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.second(self.first(x).tanh()))  # type: ignore[no-any-return]


def whole(model: nn.Module) -> Any:
    return Sharded(model)


def by_policy(model: nn.Module) -> Any:
    return Sharded(
        model, auto_wrap_policy=lambda module, recurse, _: recurse or isinstance(module, nn.Linear)
    )


def each(model: Any) -> Any:
    for k, layer in enumerate(model):
        model[k] = Sharded(layer)
    return Sharded(model)


def losses(model: Any, device: str) -> list[float]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    found = []
    for _ in range(3):
        loss = model(torch.linspace(-1, 1, 12).view(4, 3).to(device)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.item())
    return found


@pytest.mark.parametrize("wrap", [whole, each])
def test_parameters_in_forward(wrap: Callable[[nn.Module], Any]) -> None:
    torch.manual_seed(0)
    plain = penalized()
    torch.manual_seed(0)
    model = wrap(penalized())
    assert losses(model, "ltc") == pytest.approx(losses(plain, "cpu"), rel=1e-5)
    outside = {name for name, _ in model.named_parameters()}
    assert len(outside) == 4 and all("_fsdp_shard" in name for name in outside)


@pytest.mark.parametrize("wrap", [whole, by_policy])
def test_a_module_in_several_places(wrap: Callable[[nn.Module], Any]) -> None:
    torch.manual_seed(0)
    plain = Sharing()
    torch.manual_seed(0)
    model = wrap(Sharing())
    assert len(list(model.parameters())) == 2
    assert losses(model, "ltc") == pytest.approx(losses(plain, "cpu"), rel=1e-5)
    found = consolidate_sharded_state_dicts([model.state_dict()], model.get_shard_metadata())
    expected = plain.state_dict()
    assert found.keys() == expected.keys()
    torch.testing.assert_close({name: value.cpu() for name, value in found.items()}, dict(expected))


def test_flat_parameters_keep_their_dtypes() -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2).bfloat16(), nn.Linear(2, 2))
    model[2].requires_grad_(False)
    expected = {name: p.detach().clone() for name, p in model.named_parameters()}
    flat: Any = Sharded(model, flatten_parameters=True)
    assert [p.dtype for p in flat.parameters()] == [torch.float32, torch.bfloat16, torch.float32]
    found = consolidate_sharded_state_dicts([flat.state_dict()], flat.get_shard_metadata())
    assert found.keys() == expected.keys()
    torch.testing.assert_close({name: found[name].cpu() for name in expected}, expected)


class Choosing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(3, 3) for _ in range(2))

    def forward(self, x: torch.Tensor, which: int) -> torch.Tensor:
        return self.layers[which](x)  # type: ignore[no-any-return]


@pytest.mark.parametrize("wrap", [whole, by_policy])
def test_a_unit_that_takes_no_part_in_the_last_backward(wrap: Callable[[nn.Module], Any]) -> None:
    torch.manual_seed(0)
    plain = Choosing()
    torch.manual_seed(0)
    model = wrap(Choosing())
    x = torch.linspace(-1, 1, 12).view(4, 3)
    for which in (0, 1):
        plain(x, which).square().mean().backward()
    with model.no_sync():
        model(x.to("ltc"), 0).square().mean().backward()
    model(x.to("ltc"), 1).square().mean().backward()
    for shard, parameter in zip(model.parameters(), plain.parameters(), strict=True):
        assert shard.grad is not None and parameter.grad is not None
        found = shard.grad.cpu()[: parameter.numel()].view(parameter.shape)
        torch.testing.assert_close(found, parameter.grad)
