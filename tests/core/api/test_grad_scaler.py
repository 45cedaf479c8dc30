"""GradScaler: a step that overflows is skipped as in eager PyTorch, without a sync if the optimizer allows it."""

import copy
from typing import Any

import pytest
import torch
from torch import nn

import ltc_core as ltc
from ltc_core.api import syncfree
from ltc_core.api.grad_scaler import GradScaler
from tests.core.api.test_syncfree import contents, net
from tests.core.beside_eager import assert_same
from tests.core.counting import Counting

pytestmark = pytest.mark.usefixtures("marked_steps")

optim: Any = torch.optim
CPU, LAZY = torch.device("cpu"), ltc.lazy_device()
SCALING = {"init_scale": 16.0, "growth_interval": 3}
NUM_STEPS = 7
OVERFLOWS = {2: float("inf"), 5: float("nan")}
# Two steps grow the count, the third overflows; 3 and 4, then one that overflows again, then 6.
SCALES = [16.0, 16.0, 8.0, 8.0, 8.0, 4.0, 4.0]


def train(
    device: torch.device, make: Any, scaler: Any, options: dict[str, Any], clips: bool = False
) -> Any:
    """Give the scale after each step, and model and optimizer."""
    model = net(device)
    optimizer = make(model.parameters(), **options)
    scales = []
    for k in range(NUM_STEPS):
        x = (torch.arange(15.0).view(5, 3) / 10 - k / 5).to(device)
        optimizer.zero_grad()
        loss = model(x).square().mean() * OVERFLOWS.get(k, 1.0)
        scaler.scale(loss).backward()
        if clips:
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        scaler.step(optimizer)
        scaler.update()
        scales.append(scaler.scale(torch.ones((), device=device)))
        ltc.mark_step()
    return scales, model, optimizer


KINDS: list[tuple[str, dict[str, Any]]] = [
    ("SGD", {"lr": 0.1, "momentum": 0.9}),
    ("Adam", {"lr": 0.01}),
    ("AdamW", {"lr": 0.01, "weight_decay": 0.1}),
]


@pytest.mark.parametrize("clips", [False, True])
@pytest.mark.parametrize(("kind", "options"), KINDS)
def test_steps_are_skipped_as_in_eager_without_a_sync(
    kind: str, options: dict[str, Any], clips: bool
) -> None:
    eager, scaler = torch.amp.GradScaler("cpu", **SCALING), GradScaler(**SCALING)
    wanted, *expected = train(CPU, getattr(optim, kind), eager, options, clips)
    with Counting() as counted:
        scales, *found = train(LAZY, getattr(syncfree, kind), scaler, options, clips)
    assert counted.syncs == {"MarkStep": NUM_STEPS} and not counted.fallbacks
    assert counted.compiles <= 4  # the first steps, and those with another factor in the loss
    assert_same(contents(*found), contents(*expected), rtol=1e-4, atol=1e-6)
    assert [float(s) for s in scales] == [float(s) for s in wanted] == SCALES
    assert contents(*found)[2] == [5.0] * 4 * (kind != "SGD")
    assert scaler.state_dict() == eager.state_dict()


def test_pytorchs_fused_optimizers_wait_for_nothing_either() -> None:
    eager, scaler = torch.amp.GradScaler("cpu", **SCALING), GradScaler(**SCALING)
    _, *expected = train(CPU, optim.AdamW, eager, {"lr": 0.01})
    with Counting() as counted:
        _, *found = train(LAZY, optim.AdamW, scaler, {"lr": 0.01, "fused": True})
    assert counted.syncs == {"MarkStep": NUM_STEPS} and not counted.fallbacks
    assert_same(contents(*found), contents(*expected), rtol=1e-4, atol=1e-6)


def test_other_optimizers_wait_and_are_skipped() -> None:
    eager, scaler = torch.amp.GradScaler("cpu", **SCALING), GradScaler(**SCALING)
    _, *expected = train(CPU, optim.RMSprop, eager, {"lr": 0.01})
    with Counting() as counted:
        _, *found = train(LAZY, optim.RMSprop, scaler, {"lr": 0.01})
    assert counted.syncs["Item"] == NUM_STEPS
    assert [float(r["step"]) for r in found[1].state.values()] == [5.0] * 4
    assert_same(contents(*found), contents(*expected), rtol=1e-4, atol=1e-6)


def test_a_step_with_zero_gradients_waits_for_nothing() -> None:
    """What eager PyTorch does, if the gradients of those steps are zero."""
    scaler = GradScaler(**SCALING, use_zero_grad=True)
    model = net(CPU)
    optimizer = optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for k in range(NUM_STEPS):
        x = torch.arange(15.0).view(5, 3) / 10 - k / 5
        optimizer.zero_grad()
        (model(x).square().mean() * (k not in OVERFLOWS)).backward()
        optimizer.step()
    with Counting() as counted:
        _, *found = train(LAZY, optim.SGD, scaler, {"lr": 0.1, "momentum": 0.9})
    assert counted.syncs == {"MarkStep": NUM_STEPS} and not counted.fallbacks
    assert_same(contents(*found), contents(model, optimizer), rtol=1e-4, atol=1e-6)
    assert scaler.get_scale() == SCALES[-1]


def test_two_optimizers_and_one_that_overflows() -> None:
    good, bad = (torch.ones(2, device=LAZY).requires_grad_() for _ in range(2))
    optimizers = [syncfree.SGD([good], lr=1.0), syncfree.Adam([bad], lr=1.0)]
    scaler = GradScaler(init_scale=4.0)
    scaler.scale(good.sum() + bad.sum() * float("inf")).backward()
    for optimizer in optimizers:
        scaler.step(optimizer)
    scaler.update()
    assert good.tolist() == [0.0, 0.0] and bad.tolist() == [1.0, 1.0] and scaler.get_scale() == 2.0


def test_arguments_and_state() -> None:
    assert GradScaler().state_dict() == torch.amp.GradScaler("cpu").state_dict()
    scaler = GradScaler(8.0, 4.0, 0.25, 7)
    other = GradScaler()
    other.load_state_dict(scaler.state_dict())
    loss = other.scale(torch.ones((), device=LAZY))
    assert float(loss) == 8.0 and copy.deepcopy(other).get_scale() == 8.0
    assert (other.get_growth_factor(), other.get_backoff_factor(), other.get_growth_interval()) == (
        4.0, 0.25, 7,
    )  # fmt: skip


def test_disabled_it_passes_everything_through() -> None:
    scaler = GradScaler(enabled=False)
    weight = torch.ones(2, device=LAZY).requires_grad_()
    optimizer = syncfree.SGD([weight], lr=0.5)
    loss = weight.sum()
    assert scaler.scale(loss) is loss and not scaler.is_enabled() and scaler.get_scale() == 1.0
    loss.backward()
    scaler.step(optimizer)
    scaler.update()
    assert weight.tolist() == [0.5, 0.5]


def test_what_is_called_in_the_wrong_order_is_refused() -> None:
    weight = torch.ones(2, device=LAZY).requires_grad_()
    optimizer, scaler = syncfree.SGD([weight], lr=0.5), GradScaler()
    scaler.scale(weight.sum()).backward()
    scaler.step(optimizer)
    with pytest.raises(RuntimeError, match="already been called since the last update"):
        scaler.step(optimizer)
    with pytest.raises(RuntimeError, match="Closure use is not currently supported"):
        scaler.step(optimizer, closure=lambda: 0.0)
