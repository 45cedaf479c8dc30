"""Scripts that never call `mark_step`: where their steps end, counted; losses are eager's."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import ltc_core as ltc
from ltc_core.runtime import devices, found_steps
from ltc_core.settings import settings
from tests.core.counting import Counting

STEPS = 12
LEARNED = 3  # steps until a script's habits are known


@pytest.fixture
def device() -> torch.device:
    return ltc.lazy_device()


@pytest.fixture(autouse=True)
def fresh_script(monkeypatch: pytest.MonkeyPatch, device: torch.device) -> Iterator[None]:
    """A process in which nothing is known of the script."""
    ltc.mark_step(wait=True)
    context = devices.context(device.index)
    monkeypatch.setattr(found_steps, "_script", found_steps._Script())
    before, context.steps = context.steps, found_steps.FoundSteps(context.trace, context.cut)
    yield
    ltc.mark_step(wait=True)
    context.steps = found_steps._of_device[device.index] = before


def batches(count: int = STEPS) -> DataLoader[tuple[torch.Tensor, ...]]:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(8 * count, 6, generator=generator)
    return DataLoader(TensorDataset(x, x.sum(1, keepdim=True)), batch_size=8)


def model(device: torch.device, width: int = 6, out: int = 1) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(width, 16), nn.Tanh(), nn.Linear(16, out)).to(device)


def adam(net: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adam(net.parameters(), lr=0.01)


def plain(device: torch.device) -> Iterator[torch.Tensor]:
    net = model(device)
    optimizer = adam(net)
    for x, y in batches():
        x, y = x.to(device), y.to(device)
        optimizer.zero_grad()
        loss = (net(x) - y).square().mean()
        loss.backward()
        optimizer.step()
        yield loss.detach()


def zeroed_at_the_end(device: torch.device) -> Iterator[torch.Tensor]:
    net = model(device)
    optimizer = adam(net)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 4)
    for x, y in batches():
        loss = (net(x.to(device)) - y.to(device)).square().mean()
        loss.backward()
        nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        yield loss.detach()


def accumulated(device: torch.device) -> Iterator[torch.Tensor]:
    net = model(device)
    optimizer = adam(net)
    for i, (x, y) in enumerate(batches(4 * STEPS)):
        loss = (net(x.to(device)) - y.to(device)).square().mean() / 4
        loss.backward()
        if i % 4 == 3:
            optimizer.step()
            optimizer.zero_grad()
            yield loss.detach()


def adversarial(device: torch.device) -> Iterator[torch.Tensor]:
    critic, maker = model(device, 1), model(device, 6)
    critic = model(device)
    maker = model(device, 6, 6)
    of_critic, of_maker = adam(critic), adam(maker)
    for x, _ in batches():
        x = x.to(device)
        made = maker(x.flip(0))
        worth = critic(made.detach()).mean() - critic(x).mean()
        of_critic.zero_grad()
        worth.backward()
        of_critic.step()
        of_maker.zero_grad()
        loss = -critic(made).mean()
        loss.backward()
        of_maker.step()
        yield loss.detach()


def with_an_average(device: torch.device) -> Iterator[torch.Tensor]:
    """Ops are recorded after the step: they belong to the next one."""
    net, mean = model(device), model(device)
    optimizer = adam(net)
    for x, y in batches():
        loss = (net(x.to(device)) - y.to(device)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        with torch.no_grad():
            for a, b in zip(mean.parameters(), net.parameters(), strict=True):
                a.lerp_(b, 0.1)
        yield loss.detach()


def in_data_on_the_device(device: torch.device) -> Iterator[torch.Tensor]:
    net = model(device)
    optimizer = adam(net)
    x = torch.ones(8, 6, device=device)
    for _ in range(STEPS):
        loss = net(x).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        yield loss.detach()


def evaluated(device: torch.device) -> Iterator[torch.Tensor]:
    net = model(device, 6, 3).eval()
    right = torch.zeros((), device=device, dtype=torch.long)
    with torch.no_grad():
        for x, y in batches():
            right += (net(x.to(device)).argmax(1) == (y[:, 0] > 0).long().to(device)).sum()
            yield right.clone()


def predicted(device: torch.device) -> Iterator[torch.Tensor]:
    """Gradients are off in the model alone, as in the loops of libraries."""
    net = model(device).eval()
    for x, _ in batches():
        x = x.to(device)
        with torch.inference_mode():
            yield net(x).sum().clone()


class Scaled(nn.Module):
    """A layer that uploads a constant in each call, as the caches of transformers do."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(4):
            x = self.layer(x).tanh() * 1.5
        return x * torch.tensor([1.0, 2, 3, 4, 5, 6], device=x.device)


def with_uploads(device: torch.device) -> Iterator[torch.Tensor]:
    torch.manual_seed(0)
    net = nn.Sequential(Scaled(), Scaled(), Scaled()).to(device).eval()
    with torch.no_grad():
        for x, _ in batches():
            yield net(x.to(device)).sum()


def trained_with_uploads(device: torch.device) -> Iterator[torch.Tensor]:
    torch.manual_seed(0)
    net = nn.Sequential(Scaled(), Scaled(), Scaled()).to(device)
    optimizer = adam(net)
    for x, _ in batches():
        loss = net(x.to(device)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        yield loss.detach()


def attacked(device: torch.device) -> Iterator[torch.Tensor]:
    """Gradients that no optimizer uses, and a value that is read, before batches that are only evaluated."""
    net = model(device)
    for _ in range(2):
        net(torch.ones(2, 6).to(device)).sum().backward()
    print(net(torch.ones(2, 6).to(device)).sum().item())
    yield from predicted(device)


TRAINED = [
    plain, zeroed_at_the_end, accumulated, adversarial, with_an_average, in_data_on_the_device, trained_with_uploads,
]  # fmt: skip
EVALUATED = [evaluated, predicted, attacked, with_uploads]
Script = Callable[[torch.device], Iterator[torch.Tensor]]


@pytest.mark.parametrize("script", TRAINED + EVALUATED, ids=lambda f: f.__name__)
def test_a_step_is_one_cut(script: Script, device: torch.device) -> None:
    steps = script(device)
    found = list(itertools.islice(steps, LEARNED))
    with Counting() as counted:
        found += steps
    reason = "Upload" if script in EVALUATED else "OptimizerStep"
    assert counted.syncs in [{reason: STEPS - LEARNED}, {reason: STEPS - LEARNED - 1}]
    assert counted.compiles <= 2
    ended = counted.grown("FoundStep")
    assert ended in (STEPS - LEARNED, STEPS - LEARNED - 1)
    expected = torch.stack(list(script(torch.device("cpu"))))
    torch.testing.assert_close(torch.stack(found).cpu(), expected)


@pytest.mark.parametrize("script", TRAINED, ids=lambda f: f.__name__)
def test_a_loss_that_is_read_after_the_step_ends_it(script: Script, device: torch.device) -> None:
    """As before the steps were looked for: one cut, and the caller waits for it."""
    with Counting() as counted:
        found = [loss.item() for loss in script(device)]
    if script is with_an_average:  # an op comes before the read
        assert counted.syncs == {"Item": 1, "OptimizerStep": STEPS - 1}
    else:
        assert counted.syncs == {"Item": STEPS}
    torch.testing.assert_close(found, [x.item() for x in script(torch.device("cpu"))])


@pytest.mark.parametrize("script", TRAINED, ids=lambda f: f.__name__)
def test_a_script_that_marks_its_steps_is_left_alone(script: Script, device: torch.device) -> None:
    steps = script(device)
    for _ in range(LEARNED):
        next(steps)
        ltc.mark_step()
    with Counting() as counted:
        for _ in steps:
            ltc.mark_step()
    assert counted.syncs == {"MarkStep": STEPS - LEARNED}


def test_marks_may_come_after_several_steps_of_a_critic(
    device: torch.device, capfd: pytest.CaptureFixture[str]
) -> None:
    critic, generator = model(device), model(device)
    of_critic, of_generator = adam(critic), adam(generator)

    def iteration() -> None:
        for k, (net, optimizer) in enumerate(
            [(critic, of_critic)] * 3 + [(generator, of_generator)]
        ):
            optimizer.zero_grad()
            net(torch.full((8, 6), float(k), device=device)).square().mean().backward()
            optimizer.step()

    for _ in range(5):
        iteration()
        ltc.mark_step()
    with Counting() as counted:
        for _ in range(6):
            iteration()
            ltc.mark_step()
    assert counted.syncs == {"MarkStep": 6}
    for _ in range(12):  # and no mark any more
        iteration()
    with Counting() as counted:
        for _ in range(6):
            iteration()
    assert counted.syncs.get("OptimizerStep", 0) >= 12


def test_a_mark_each_epoch_leaves_steps_to_be_found(device: torch.device) -> None:
    for _ in range(4):
        list(plain(device))
        ltc.mark_step()
    with Counting() as counted:
        list(plain(device))
        ltc.mark_step()
    assert counted.syncs["OptimizerStep"] >= STEPS - 1


def test_a_marked_loop_may_be_followed_by_one_that_is_not(device: torch.device) -> None:
    for _ in plain(device):
        ltc.mark_step()
    list(plain(device))
    with Counting() as counted:
        list(plain(device))
    assert counted.syncs == {"OptimizerStep": STEPS}


def test_it_is_said_once(device: torch.device, capfd: pytest.CaptureFixture[str]) -> None:
    list(plain(device))
    list(accumulated(device))
    [line] = capfd.readouterr().err.splitlines()
    assert line.startswith("ltc: each optimizer.step() ends a step (tests/") and "in plain" in line


@pytest.mark.parametrize("script", [evaluated, plain], ids=lambda f: f.__name__)
def test_nothing_is_said_where_nothing_changes(
    script: Script, device: torch.device, capfd: pytest.CaptureFixture[str]
) -> None:
    """Each step is marked, or ends where its loss is read."""
    for _ in range(2):
        for loss in script(device):
            loss.item()
        for _ in script(device):
            ltc.mark_step()
    assert capfd.readouterr().err == ""


def test_an_optimizer_without_gradients_ends_nothing(device: torch.device) -> None:
    optimizer = adam(model(device))
    for _ in range(3):
        optimizer.step()
    with Counting() as counted:
        x = torch.ones(3, device=device) + 1
        x = x * 2
        assert x.tolist() == [4, 4, 4]
    assert sum(counted.syncs.values()) == 1


@pytest.mark.parametrize("script", [plain, evaluated], ids=lambda f: f.__name__)
def test_none_are_looked_for_if_that_is_asked(script: Script, device: torch.device) -> None:
    with settings.override(steps="marked"), Counting() as counted:
        list(script(device))
    assert counted.syncs == {}
