"""A script that reads a value of a step goes on as soon as it is there, while the rest of the step still runs."""

import contextlib
import threading
from collections.abc import Iterator

import pytest
import torch
from torch import nn

import ltc_core as ltc
from ltc_core import errors
from ltc_core.executors.reference import replay
from ltc_core.runtime.devices import context
from ltc_core.runtime.launcher import Launcher
from ltc_core.runtime.placement import Placement
from ltc_core.settings import settings
from tests.core.custom_ops import Gate

pytestmark = pytest.mark.skipif(replay.extension.load() is None, reason="no C++ compiler")


@pytest.fixture(autouse=True)
def in_the_worker(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Each program runs in the worker, and in C++."""
    context(0).wait()
    monkeypatch.setattr(Launcher, "placement", lambda *args: Placement.WORKER)
    with settings.override(replay="always", steps="marked", streaming="never"):
        yield
    context(0).wait()


def step(gate: Gate, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """A value, and one that comes after a gate."""
    first = (x * 2).sum()
    rest = gate(x + 1) * 3
    ltc.mark_step()
    return first, rest


@contextlib.contextmanager
def opened_later(gate: Gate) -> Iterator[None]:
    """The script waits for a value before the gate is opened."""
    gate._open.clear()
    later = threading.Timer(0.05, gate._open.set)
    later.start()
    yield
    later.join()


def learned(gate: Gate, x: torch.Tensor) -> None:
    """The script has waited for the first value of some steps."""
    for _ in range(4):
        with opened_later(gate):
            first, _rest = step(gate, x)
            assert first.item() == 24
    context(0).wait()
    gate._open.clear()


def test_what_is_read_does_not_wait_for_the_rest() -> None:
    x = torch.full((3,), 4.0, device="ltc")
    with Gate() as gate:
        learned(gate, x)
        first, rest = step(gate, x)
        assert first.item() == 24
        assert not context(0).worker.is_idle
        again = (first + 1).item  # what is read may be an operand of what comes next
        gate._open.set()
        assert again() == 25 and rest.tolist() == [15.0] * 3


def test_the_next_step_is_recorded_and_handed_over_meanwhile() -> None:
    x = torch.full((3,), 4.0, device="ltc")
    with Gate() as gate:
        learned(gate, x)
        first, rest = step(gate, x)
        assert first.item() == 24
        second, last = step(gate, x + rest)
        threading.Timer(0.05, gate._open.set).start()
        assert second.item() == 2 * 3 * 19 and last.tolist() == [60.0] * 3
        assert first.item() == 24


def test_a_failure_after_what_was_read_leaves_it_as_it_was() -> None:
    x, table = torch.full((3,), 4.0, device="ltc"), torch.ones(3, 2, device="ltc")
    index = torch.tensor([1])
    for k in range(7):
        first = (x * 2).sum()
        row = table.index_select(0, (index + 50 * (k == 6)).to("ltc"))
        ltc.mark_step()
        assert first.item() == 24
        if k < 6:
            assert row.tolist() == [[1.0, 1.0]]
    with pytest.raises((errors.LtcError, IndexError), match="out of range"):
        row.cpu()
    assert first.item() == 24


def trained(device: str, steps: int = 30) -> list[float]:
    torch.manual_seed(0)
    net = nn.Sequential(
        nn.Linear(6, 16),
        nn.BatchNorm1d(16),
        nn.ReLU(),
        nn.Linear(16, 16),
        nn.Tanh(),
        nn.Linear(16, 3),
    ).to(device)
    optimizer = torch.optim.Adam(net.parameters(), lr=0.01)
    generator = torch.Generator().manual_seed(1)
    found = []
    for _ in range(steps):
        x = torch.randn(8, 6, generator=generator).to(device)
        y = torch.randint(0, 3, (8,), generator=generator).to(device)
        optimizer.zero_grad()
        logits = net(x)
        loss = nn.functional.cross_entropy(logits, y)
        loss.backward()
        norm = nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        optimizer.step()
        if device != "cpu":
            ltc.mark_step()
        hits = (logits.argmax(1) == y).sum()
        found += [loss.item(), float(hits.item()), norm.item()]
    return found


@pytest.mark.parametrize("streaming", ["never", "auto"])
def test_losses_are_those_of_eager(streaming: str) -> None:
    with settings.override(streaming=streaming):
        assert trained("ltc") == trained("cpu")


def test_all_that_is_read_of_a_step_is_watched() -> None:
    x = torch.full((3,), 4.0, device="ltc")
    with Gate() as gate:
        for _ in range(5):
            with opened_later(gate):
                first, rest = step(gate, x)
                assert first.item() == 24 and rest.tolist() == [15.0] * 3
        newest = context(0).compiler.newest
        assert newest is not None and sorted(newest.watched) == [0, 1]


@pytest.mark.usefixtures("checked_distributions")
def test_the_checks_of_distributions_are_known_when_a_read_ends() -> None:
    def step(scale: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        first = (x * 2).sum()
        rest = gate(torch.distributions.Normal(x, scale).log_prob(x)) * 3  # type: ignore[no-untyped-call]
        ltc.mark_step()
        return first, rest

    x, scale = torch.full((3,), 4.0, device="ltc"), torch.ones(3, device="ltc")
    wrong = -scale
    ltc.mark_step()
    with Gate() as gate:
        for _ in range(4):
            with opened_later(gate):
                first, _rest = step(scale)
                assert first.item() == 24
        context(0).wait()
        gate._open.clear()
        first, _rest = step(wrong)
        with pytest.raises(ValueError, match="Expected parameter scale of distribution Normal"):
            first.item()
        gate._open.set()
        context(0).wait()
