"""Every optimizer of torch.optim beside eager: default, foreach, fused and one by one; no syncs.

Learning rate schedules, parameter groups, weight decay by group, and gradients that are None.
"""

from typing import Any

import pytest
import torch
from torch import nn

import ltc_core as ltc
from tests.core.beside_eager import assert_same, beside_eager
from tests.core.counting import Counting

optim: Any = torch.optim
OPTIMIZERS: dict[str, tuple[Any, dict[str, Any]]] = {
    "sgd": (optim.SGD, {"lr": 0.05}),
    "nesterov": (optim.SGD, {"lr": 0.05, "momentum": 0.9, "nesterov": True, "weight_decay": 0.01}),
    "adam": (optim.Adam, {"lr": 0.01}),
    "amsgrad": (optim.Adam, {"lr": 0.01, "amsgrad": True, "weight_decay": 0.01}),
    "adamw": (optim.AdamW, {"lr": 0.01, "maximize": True}),
    "adadelta": (optim.Adadelta, {"lr": 1.0}),
    "adagrad": (optim.Adagrad, {"lr": 0.05}),
    "adamax": (optim.Adamax, {"lr": 0.01}),
    "asgd": (optim.ASGD, {"lr": 0.05}),
    "nadam": (optim.NAdam, {"lr": 0.01}),
    "radam": (optim.RAdam, {"lr": 0.01}),
    "rmsprop": (optim.RMSprop, {"lr": 0.01, "momentum": 0.5, "centered": True}),
    "rprop": (optim.Rprop, {"lr": 0.01}),
}
FUSED = ("sgd", "nesterov", "adam", "amsgrad", "adamw", "adagrad")
SCHEDULES: dict[str, Any] = {
    "step": lambda o: optim.lr_scheduler.StepLR(o, 2, 0.5),
    "cosine": lambda o: optim.lr_scheduler.CosineAnnealingLR(o, 6),
    "one_cycle": lambda o: optim.lr_scheduler.OneCycleLR(o, 0.1, total_steps=6),
    "warm_up": lambda o: optim.lr_scheduler.LinearLR(o, 0.1, total_iters=3),
    "exponential": lambda o: optim.lr_scheduler.ExponentialLR(o, 0.9),
    "lambda": lambda o: optim.lr_scheduler.LambdaLR(o, lambda step: 1 / (step + 1)),
}

pytestmark = pytest.mark.usefixtures("marked_steps")


def net(device: torch.device) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.LayerNorm(4), nn.Linear(4, 1)).to(device)


def train(model: nn.Module, optimizer: Any, device: torch.device, num_steps: int = 6) -> Any:
    losses = []
    for step in range(num_steps):
        x = (torch.arange(15.0).view(5, 3) / 10 - step / 5).to(device)
        loss = model(x).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if device.type != "cpu":
            ltc.mark_step()
        losses.append(loss.detach())
    return losses, [p.detach() for p in model.parameters()]


VARIANTS = [
    (name, variant)
    for name in OPTIMIZERS
    for variant in ("default", "foreach", "single", "fused")
    if variant != "fused" or name in FUSED
]


@pytest.mark.parametrize(("name", "variant"), VARIANTS)
def test_optimizer(name: str, variant: str) -> None:
    make, options = OPTIMIZERS[name]
    extra = {"foreach": {"foreach": True}, "single": {"foreach": False}, "fused": {"fused": True}}

    def program(device: torch.device) -> Any:
        model = net(device)
        optimizer = make(model.parameters(), **options, **extra.get(variant, {}))
        return train(model, optimizer, device)

    with Counting() as counted:
        beside_eager(program, rtol=1e-4, atol=1e-5, rounds=1)
    if name == "asgd":  # it reads its step from the device, there as here
        assert counted.fallbacks.keys() == {"_local_scalar_dense"}
        return
    assert counted.syncs == {"MarkStep": 6} and not counted.fallbacks


@pytest.mark.parametrize("name", SCHEDULES)
def test_schedules_are_no_reason_to_compile(name: str) -> None:
    counts = []

    def program(device: torch.device) -> Any:
        model = net(device)
        optimizer = optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        schedule = SCHEDULES[name](optimizer)
        losses, rates = [], []
        for _ in range(6):
            with Counting() as counted:
                losses += train(model, optimizer, device, 1)[0]
            schedule.step()
            rates.append(schedule.get_last_lr())
            counts.append(counted.compiles)
        return losses, rates

    beside_eager(program, rtol=1e-5, atol=1e-6, rounds=1)
    assert counts[-4:] == [0, 0, 0, 0]


def test_a_plateau_schedule_reads_the_loss() -> None:
    def program(device: torch.device) -> Any:
        model = net(device)
        optimizer = optim.SGD(model.parameters(), lr=0.5)
        schedule = optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, factor=0.5)
        rates = []
        for _ in range(5):
            losses, _ = train(model, optimizer, device, 1)
            schedule.step(losses[0] * 0 + 1)
            rates.append(optimizer.param_groups[0]["lr"])
        return rates

    beside_eager(program, rounds=1)


def test_groups_and_missing_gradients() -> None:
    def program(device: torch.device) -> Any:
        model = net(device)
        decayed = [p for p in model.parameters() if p.dim() > 1]
        others = [p for p in model.parameters() if p.dim() < 2]
        optimizer = optim.AdamW(
            [{"params": decayed, "weight_decay": 0.1}, {"params": others, "lr": 0.001}], lr=0.01
        )
        unused = nn.Parameter(torch.ones(2, device=device))
        optimizer.add_param_group({"params": [unused], "lr": 1.0})
        return train(model, optimizer, device), unused

    beside_eager(program, rtol=1e-5, atol=1e-6, rounds=1)


def test_lbfgs_with_a_closure() -> None:
    def program(device: torch.device) -> Any:
        model = net(device)
        optimizer = optim.LBFGS(
            model.parameters(), lr=0.5, max_iter=4, line_search_fn="strong_wolfe"
        )
        x = (torch.arange(15.0).view(5, 3) / 10).to(device)

        def closure() -> torch.Tensor:
            optimizer.zero_grad()
            loss = (model(x) - 1).square().mean()
            loss.backward()
            return loss

        return [optimizer.step(closure).detach() for _ in range(2)]

    beside_eager(program, rtol=1e-3, atol=1e-4, rounds=1)


@pytest.mark.parametrize("options", [{}, {"capturable": True}])
def test_a_learning_rate_that_is_a_tensor(options: dict[str, Any]) -> None:
    """With `capturable`, which eager lacks on the CPU, the step count is on the device as well."""
    eager, lazy = torch.device("cpu"), ltc.lazy_device()
    model, expected = net(lazy), net(eager)
    rate = torch.tensor(0.01, device=lazy)
    optimizer = optim.Adam(model.parameters(), lr=rate, foreach=False, **options)
    with Counting() as counted:
        found = train(model, optimizer, lazy)
    reads = {} if options else {"_local_scalar_dense": 36}  # PyTorch reads the rate for each tensor
    assert counted.fallbacks == reads
    wanted = train(expected, optim.Adam(expected.parameters(), lr=0.01), eager)
    assert_same(found, wanted, rtol=1e-4, atol=1e-5)


def test_hooks_of_an_optimizer() -> None:
    def program(device: torch.device) -> Any:
        model = net(device)
        optimizer = optim.SGD(model.parameters(), lr=0.1)
        norms: list[torch.Tensor] = []

        def clip(optimizer: Any, args: Any, kwargs: Any) -> None:
            norms.append(nn.utils.clip_grad_norm_(model.parameters(), 0.1))

        optimizer.register_step_pre_hook(clip)
        return train(model, optimizer, device), norms

    beside_eager(program, rtol=1e-5, atol=1e-6, rounds=1)


def test_sparse_gradients_are_refused_in_words() -> None:
    index = torch.tensor([[1]], device=ltc.lazy_device())
    for layer in (nn.Embedding(5, 2, sparse=True), nn.EmbeddingBag(5, 2, sparse=True)):
        table = layer.to(ltc.lazy_device())
        with pytest.raises(
            NotImplementedError,
            match=r"sparse_coo.*cannot hold[\s\S]*Next: .*sparse=False in a layer",
        ):
            table(index).sum().backward()
