"""Optimizers that skip steps on the device: beside eager PyTorch that leaves those steps out, and without a sync."""

import copy
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import nn

import ltc_core as ltc
from ltc_core.api import syncfree
from tests.core.beside_eager import assert_same
from tests.core.counting import Counting

pytestmark = pytest.mark.usefixtures("marked_steps")

optim: Any = torch.optim
CPU, LAZY = torch.device("cpu"), ltc.lazy_device()
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "sgd": ("SGD", {"lr": 0.05}),
    "momentum": ("SGD", {"lr": 0.05, "momentum": 0.9, "weight_decay": 0.01}),
    "dampened": ("SGD", {"lr": 0.05, "momentum": 0.9, "dampening": 0.3, "maximize": True}),
    "nesterov": ("SGD", {"lr": 0.05, "momentum": 0.9, "nesterov": True}),
    "adam": ("Adam", {"lr": 0.01, "weight_decay": 0.1}),
    "amsgrad": ("Adam", {"lr": 0.01, "amsgrad": True}),
    "adamw": ("AdamW", {"lr": 0.01}),
}
INF = float("inf")


def net(device: torch.device) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1)).to(device)


def step(model: nn.Module, optimizer: Any, k: int, factor: float = 1.0, **how: Any) -> None:
    device = next(model.parameters()).device
    x = (torch.arange(15.0).view(5, 3) / 10 - k / 5).to(device)
    optimizer.zero_grad()
    (model(x).square().mean() * factor).backward()
    optimizer.step(**how)
    ltc.mark_step()


def contents(model: nn.Module, optimizer: Any) -> Any:
    """Parameters and state; a step count that PyTorch does not have is left out."""
    rows = [optimizer.state.get(p, {}) for p in model.parameters()]
    kept = ("exp_avg", "exp_avg_sq", "max_exp_avg_sq", "momentum_buffer")
    state = [{k: row[k] for k in kept if row.get(k) is not None} for row in rows]
    steps = [float(row["step"]) for row in rows if "exp_avg" in row]
    return [p.detach() for p in model.parameters()], state, steps


@pytest.mark.parametrize("skipped", [(1,), (0, 1), ()], ids=str)
@pytest.mark.parametrize("name", KINDS)
def test_a_skipped_step_leaves_all_as_it_was(name: str, skipped: Sequence[int]) -> None:
    kind, options = KINDS[name]
    expected, found = net(CPU), net(LAZY)
    eager = getattr(optim, kind)(expected.parameters(), **options)
    lazy = getattr(syncfree, kind)(found.parameters(), **options)
    with Counting() as counted:
        for k in range(5):
            if k not in skipped:
                step(expected, eager, k)
            overflows = k in skipped
            flag = torch.full((), float(overflows), device=LAZY)
            step(found, lazy, k, INF if overflows else 1.0, found_inf=flag)
    assert counted.syncs == {"MarkStep": 5} and not counted.fallbacks
    assert counted.compiles <= 3
    assert_same(contents(found, lazy), contents(expected, eager), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("name", ["momentum", "dampened", "adamw"])
@pytest.mark.parametrize(
    "flag", [torch.tensor(2), torch.tensor([0.0, 0.5]), torch.tensor(True), 1.0], ids=str
)
def test_anything_but_zero_skips(name: str, flag: Any) -> None:
    kind, options = KINDS[name]
    model = net(LAZY)
    optimizer = getattr(syncfree, kind)(model.parameters(), **options)
    step(model, optimizer, 0)
    before = ltc.to_cpu(contents(model, optimizer))
    step(model, optimizer, 1, float("nan"), found_inf=flag)
    assert_same(contents(model, optimizer), before)


@pytest.mark.parametrize("name", KINDS)
def test_a_schedule_a_closure_and_no_flag(name: str) -> None:
    kind, options = KINDS[name]
    counts = []

    def program(module: Any, device: torch.device) -> Any:
        model = net(device)
        optimizer = getattr(module, kind)(model.parameters(), **options)
        unused = nn.Parameter(torch.ones(2, device=device))
        optimizer.add_param_group({"params": [unused], "lr": 1.0})
        schedule = optim.lr_scheduler.LambdaLR(optimizer, lambda k: 1 / (k + 1))
        x = (torch.arange(15.0).view(5, 3) / 10).to(device)

        def closure() -> torch.Tensor:
            optimizer.zero_grad()
            loss = (model(x) - 1).square().mean()
            loss.backward()
            return loss.detach()

        losses = []
        for _ in range(6):
            with Counting() as counted:
                losses.append(optimizer.step(closure))
                schedule.step()
                ltc.mark_step()
            counts.append(counted.compiles)
        return losses, contents(model, optimizer), schedule.get_last_lr()

    expected, found = program(optim, CPU), program(syncfree, LAZY)
    assert_same(found, expected, rtol=1e-4, atol=1e-6)
    assert counts[-3:] == [0, 0, 0]


@pytest.mark.parametrize("name", ["nesterov", "adam"])
def test_a_learning_rate_on_the_device(name: str) -> None:
    kind, options = KINDS[name]
    expected, found = net(CPU), net(LAZY)
    eager = getattr(optim, kind)(expected.parameters(), **options)
    rate = {"lr": torch.tensor(options["lr"], device=LAZY)}
    lazy = getattr(syncfree, kind)(found.parameters(), **{**options, **rate})
    with Counting() as counted:
        for k in range(3):
            step(expected, eager, k)
            step(found, lazy, k, found_inf=torch.zeros((), device=LAZY))
    assert counted.syncs == {"MarkStep": 3} and not counted.fallbacks
    assert_same(contents(found, lazy), contents(expected, eager), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("name", ["dampened", "adam", "adamw"])
def test_it_goes_on_with_the_state_of_pytorchs(name: str) -> None:
    kind, options = KINDS[name]
    expected, found = net(CPU), net(LAZY)
    eager = getattr(optim, kind)(expected.parameters(), **options)
    for k in range(2):
        step(expected, eager, k)
    found.load_state_dict(expected.state_dict())
    lazy = getattr(syncfree, kind)(found.parameters(), **options)
    lazy.load_state_dict(eager.state_dict())
    with Counting() as counted:
        for k in range(2, 4):
            step(expected, eager, k)
            step(found, lazy, k, found_inf=torch.zeros((), device=LAZY))
    assert counted.syncs == {"MarkStep": 2} and not counted.fallbacks
    assert_same(contents(found, lazy), contents(expected, eager), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("kind", ["SGD", "Adam", "AdamW"])
def test_hooks_run_once(kind: str) -> None:
    getattr(optim, kind)(net(CPU).parameters(), lr=0.1)  # its class has hooks from now on
    model = net(LAZY)
    optimizer = getattr(syncfree, kind)(model.parameters(), lr=0.1, foreach=True)
    calls = []
    optimizer.register_step_pre_hook(lambda *_: calls.append("before"))
    optimizer.register_step_post_hook(lambda *_: calls.append("after"))
    step(model, optimizer, 0)
    step(model, optimizer, 1, found_inf=0)
    assert calls == ["before", "after"] * 2


def test_on_the_cpu_too() -> None:
    for kind in ("SGD", "Adam", "AdamW"):
        model = net(CPU)
        optimizer = getattr(syncfree, kind)(model.parameters(), lr=0.1)
        before = copy.deepcopy(contents(model, optimizer)[0])
        step(model, optimizer, 0, INF, found_inf=torch.tensor(1))
        assert_same(contents(model, optimizer)[0], before)
        step(model, optimizer, 1, found_inf=torch.tensor(0))
        assert not torch.equal(contents(model, optimizer)[0][0], before[0])
