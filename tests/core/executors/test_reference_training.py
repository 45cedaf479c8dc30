"""Training on the reference executor: state stays where it is in memory, and a step that fails leaves eager's."""

import threading
from typing import Any

import pytest
import torch

import ltc_core as ltc
from ltc_core.runtime.devices import context
from ltc_core.runtime.worker import Job
from ltc_core.tensor.handles import base_of
from ltc_core.tensor.lazy_tensor import LazyTensor

# -- memory ----------------------------------------------------------------------------------------


def address(t: torch.Tensor) -> int:
    """Where the device holds a tensor."""
    assert isinstance(t, LazyTensor)
    buffer = base_of(t._h).value.buffer
    assert buffer is not None
    return int(buffer.take().untyped_storage().data_ptr())


class Training:
    """A small model with an optimizer; `state` are its parameters, buffers and optimizer state."""

    def __init__(self, optimizer: Any, **options: Any) -> None:
        torch.manual_seed(0)
        layers = (torch.nn.Linear(4, 8), torch.nn.BatchNorm1d(8), torch.nn.Linear(8, 2))
        self.net = torch.nn.Sequential(*layers).to(ltc.lazy_device())
        self.optimizer = optimizer(self.net.parameters(), **options)
        self.batch = torch.randn(6, 4).to(ltc.lazy_device())

    def step(self) -> None:
        self.optimizer.zero_grad()
        self.net(self.batch).pow(2).mean().backward()
        self.optimizer.step()
        ltc.mark_step(wait=True)

    def state(self) -> dict[str, torch.Tensor]:
        found = dict(self.net.state_dict())
        for k, values in enumerate(self.optimizer.state.values()):
            found.update({f"{k}.{name}": v for name, v in values.items()})
        return {name: v for name, v in found.items() if ltc.is_lazy_tensor(v)}


@pytest.mark.parametrize(
    ("optimizer", "options"),
    [
        (torch.optim.SGD, {"lr": 0.1}),
        (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9}),
        (torch.optim.AdamW, {"lr": 0.1}),
        (torch.optim.AdamW, {"lr": 0.1, "foreach": False}),
        (torch.optim.AdamW, {"lr": 0.1, "amsgrad": True, "fused": True}),
    ],
    ids=["sgd", "momentum", "adamw", "adamw without foreach", "fused adamw"],
)
def test_parameters_and_optimizer_state_stay_where_they_are(
    optimizer: Any, options: dict[str, Any]
) -> None:
    training = Training(optimizer, **options)
    training.step()  # makes the optimizer's state
    training.step()
    before = {name: address(t) for name, t in training.state().items()}
    values = {name: t.cpu() for name, t in training.state().items()}
    for _ in range(3):
        training.step()
    after = {name: address(t) for name, t in training.state().items()}
    assert after == before
    moved = {name for name, t in training.state().items() if not torch.equal(t.cpu(), values[name])}
    assert "0.weight" in moved
    assert moved >= {name for name in before if "running_mean" in name or "exp_avg" in name}


def test_a_step_needs_no_memory_beside_its_gradients() -> None:
    training = Training(torch.optim.AdamW, lr=0.1)
    training.step()
    training.step()
    memory = context(0).memory
    used = memory.used_bytes
    for _ in range(3):
        training.step()
    assert memory.used_bytes == used


def test_a_value_somebody_keeps_is_not_overwritten() -> None:
    """One copy when the step finds the old value held; none after that."""
    training = Training(torch.optim.SGD, lr=0.1)
    training.step()
    weight = training.net[0].weight
    kept, wanted = weight.detach().clone(), weight.detach().cpu()
    before = address(weight)
    training.step()
    assert address(kept) == before
    assert torch.equal(kept.cpu(), wanted)
    moved_to = address(weight)
    assert moved_to != before
    training.step()
    assert address(weight) == moved_to
    assert torch.equal(kept.cpu(), wanted)


# -- faults ----------------------------------------------------------------------------------------


def far_index() -> torch.Tensor:
    """Makes an indexing op fail while it runs: what eager says at once, the device finds out later."""
    return torch.tensor([99]).to(ltc.lazy_device())


def test_a_step_that_fails_in_the_middle_leaves_eagers_state() -> None:
    device = ltc.lazy_device()
    first, second, third = (torch.full((3,), 1.0).to(device) for _ in range(3))
    far = far_index()
    ltc.mark_step(wait=True)
    first.add_(1)
    first.mul_(5)
    second.add_(1)
    lost = first.index_select(0, far)
    second.mul_(5)
    third.add_(lost)
    with pytest.raises(IndexError, match="index out of range"):
        ltc.mark_step(wait=True)
    assert [float(t[0]) for t in (first, second, third)] == [10.0, 2.0, 1.0]
    with pytest.raises(IndexError, match="index out of range"):
        lost.cpu()
    for t in (first, second, third):
        t.add_(1)
    ltc.mark_step(wait=True)
    assert [float(t[0]) for t in (first, second, third)] == [11.0, 3.0, 2.0]


def test_what_does_not_depend_on_the_fault_is_there() -> None:
    device = ltc.lazy_device()
    x = torch.ones(3).to(device)
    total = (x * 2).sum()
    lost = x.index_select(0, far_index())
    after = x + 1
    with pytest.raises(IndexError):
        ltc.mark_step(wait=True)
    assert float(total) == 6
    assert after.tolist() == [2.0] * 3
    with pytest.raises(IndexError, match="index_select.* failed while its graph ran"):
        lost.cpu()


def test_a_value_kept_beside_a_failed_update_stays_its_own() -> None:
    """A fault leaves both at one value; they must not share its memory when training goes on."""
    w = torch.ones(3).to(ltc.lazy_device())
    far = far_index()
    ltc.mark_step(wait=True)
    kept = w.clone()
    w.add_(w.index_select(0, far))
    with pytest.raises(IndexError):
        ltc.mark_step(wait=True)
    w.mul_(2)
    ltc.mark_step(wait=True)
    assert kept.tolist() == [1.0] * 3
    assert w.tolist() == [2.0] * 3


@pytest.mark.parametrize("fail_at", [0, 2])
@pytest.mark.parametrize(
    ("optimizer", "options"),
    [(torch.optim.SGD, {"lr": 0.1}), (torch.optim.AdamW, {"lr": 0.1})],
    ids=["sgd", "adamw"],
)
def test_training_goes_on_after_a_failed_step(
    optimizer: Any, options: dict[str, Any], fail_at: int
) -> None:
    """The failed step changed no parameter: the others give the losses of a run without it."""
    training = Training(optimizer, **options)
    weight = training.net[0].weight
    for k in range(4):
        before = weight.detach().cpu()
        if k == fail_at:
            good, training.batch = training.batch, training.batch[:, :4] + far_index_zeros()
            with pytest.raises(IndexError):
                training.step()
            training.batch = good
            assert torch.equal(weight.detach().cpu(), before)
        else:
            training.step()
            assert not torch.equal(weight.detach().cpu(), before)
            assert bool(torch.isfinite(weight).all())


def far_index_zeros() -> torch.Tensor:
    return torch.zeros(6, 4).to(ltc.lazy_device()).index_select(0, far_index())


def test_a_statistic_lost_in_a_failed_step_costs_no_parameter() -> None:
    """It raises where it is read, and what was read with it goes on."""
    w = torch.ones(3).to(ltc.lazy_device())
    total = w.index_select(0, far_index())
    with pytest.raises(IndexError):
        ltc.mark_step(wait=True)
    w.add_(1)
    with pytest.raises(IndexError):
        total += w[0]
    w.add_(1)
    ltc.mark_step(wait=True)
    assert w.tolist() == [3.0] * 3


def test_a_statistic_lost_while_the_next_step_was_recorded_costs_no_parameter() -> None:
    """The next step was handed over before anybody knew that one of its inputs would be lost."""
    w, v = torch.ones(3).to(ltc.lazy_device()), torch.ones(3).to(ltc.lazy_device())
    far = far_index()
    ltc.mark_step(wait=True)
    busy = threading.Event()
    context(0).worker.submit(Job(lambda: busy.wait(20) and None))
    total = w.index_select(0, far)
    ltc.mark_step()
    w.add_(1)
    v.add_(total[0])
    ltc.mark_step()
    v.mul_(3)
    ltc.mark_step()
    busy.set()
    with pytest.raises(IndexError):
        ltc.wait_device_ops()
    assert (w.tolist(), v.tolist()) in (([1.0] * 3, [3.0] * 3), ([2.0] * 3, [3.0] * 3))
    w.add_(1)
    ltc.mark_step(wait=True)


def test_an_error_is_told_once() -> None:
    w = torch.ones(3).to(ltc.lazy_device())
    total = w.index_select(0, far_index())
    ltc.sync_multi([w], wait=False)
    context(0).worker.drain()
    with pytest.raises(IndexError):
        total + w[0]
    w.add_(1)
    ltc.mark_step(wait=True)
    assert w.tolist() == [2.0] * 3
