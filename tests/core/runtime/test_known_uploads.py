"""Uploads of small tensors that C++ makes where they end no step: Python's values, steps and counters."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import ltc_core as ltc
from ltc_core import metrics, profiler
from ltc_core.executors.reference import replay
from ltc_core.record import fast_path
from tests.core.runtime.left_to_python import left_to_python

pytestmark = pytest.mark.skipif(
    replay.extension.load() is None or fast_path.extension.load() is None, reason="no C++ compiler"
)


@pytest.fixture(autouse=True)
def in_python() -> Iterator[list[int]]:
    """The bytes of the uploads that Python makes."""
    with left_to_python("upload", lambda tensor, meta: meta.nbytes) as found:
        yield found


def moved(host: torch.Tensor) -> torch.Tensor:
    return host.to("ltc")


def made(host: torch.Tensor) -> torch.Tensor:
    return torch.tensor(host.tolist(), device="ltc")


def score(uploaded: torch.Tensor, host: torch.Tensor) -> float:
    host.fill_(-1.0)  # the caller's memory
    return (uploaded * 2).sum().item()


@pytest.mark.parametrize("way", [moved, made])
def test_an_upload_after_a_read_needs_no_python(
    way: Callable[[torch.Tensor], torch.Tensor], in_python: list[int]
) -> None:
    for step in range(60):
        host = torch.tensor([float(step), 1.0, 2.0])
        assert score(way(host), host) == 2 * (step + 3)
    assert len(in_python) < 20


def test_memory_is_written_without_python(in_python: list[int]) -> None:
    kept = torch.zeros(3, device="ltc")
    view = kept[1:]
    for step in range(60):
        version = kept._version
        kept.copy_(torch.full((3,), float(step)))
        assert kept._version == version + 1
        assert (view + kept[:2]).sum().item() == 4 * step
    assert len(in_python) < 20


@pytest.mark.parametrize(
    "host",
    [
        torch.arange(6.0).view(2, 3).t(),
        torch.arange(3),
        torch.ones(1).expand(3),
        torch.ones(3, dtype=torch.complex64).conj(),
        torch.tensor(2.5),
    ],
    ids=["transposed", "int64", "expanded", "conjugate", "number"],
)
def test_other_tensors_than_packed_ones(host: torch.Tensor) -> None:
    for _ in range(40):
        there = torch.zeros(host.shape, device="ltc")
        if not host.is_complex():
            assert there.copy_(host).sum().item() == host.sum().item()
        moved = host.to("ltc")
        assert moved.cpu().stride() == host.clone().stride() and moved.dtype == host.dtype
        assert (moved * 2).sum().item() == (host * 2).sum().item()


def test_counters_are_those_of_python() -> None:
    def counted(on: bool) -> tuple[Any, ...]:
        was_on = fast_path.enable(on)
        try:
            metrics.clear_all()
            for step in range(50):
                assert (torch.full((4,), float(step)).to("ltc") + 1).sum().item() == 4 * (step + 1)
            count, total, _ = metrics.metric_data("OutboundData")
            return (
                metrics.counter_value("CreateDataHandles"),
                count,
                total,
                metrics.metric_data("TransferToDeviceTime")[0],
            )
        finally:
            fast_path.enable(was_on)

    assert counted(True) == counted(False) == (50, 50, 50 * 16, 50)


def test_a_loop_that_reads_no_more_has_steps(in_python: list[int]) -> None:
    """Its uploads are noted again: a loop that trains nothing and reads nothing ends a step at each."""
    weight = torch.ones(4, 4, device="ltc")

    def step() -> torch.Tensor:
        x = torch.ones(4).to("ltc")
        for _ in range(10):
            x = (x @ weight).tanh()
        return x

    for _ in range(40):
        step().sum().item()
    assert len(in_python) < 20
    before = metrics.counter_value("FoundStep") or 0
    kept = [step() for _ in range(30)]
    assert 26 <= (metrics.counter_value("FoundStep") or 0) - before <= 30
    assert all(x.equal(kept[0]) for x in kept)


def test_in_inference_mode_and_out_of_it(in_python: list[int]) -> None:
    weight = torch.zeros(3, device="ltc")
    for step in range(40):
        given = torch.full((3,), float(step))
        with torch.inference_mode(step % 2 == 1):
            weight.copy_(given)
            fresh = given.to("ltc")
        assert fresh.is_inference() == (step % 2 == 1)
        weight.add_(1)
        assert weight.sum().item() == 3 * (step + 1.0) and fresh.sum().item() == 3 * step


class Training:
    """A model, and a step of it whose loss nobody reads. Counts the steps that were found."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.model = torch.nn.Sequential(
            torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 2)
        ).to("ltc")
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)

    def step(self) -> None:
        x, y = torch.randn(8, 4).to("ltc"), torch.randint(2, (8,)).to("ltc")
        self.optimizer.zero_grad()
        torch.nn.functional.cross_entropy(self.model(x), y).backward()
        self.optimizer.step()

    def evaluate(self) -> torch.Tensor:
        with torch.no_grad():
            return self.model(torch.ones(8, 4).to("ltc")).softmax(1).log().mul(2).add(1).sum()


def num_found() -> int:
    return metrics.counter_value("FoundStep") or 0


def test_the_batches_of_a_script_that_marks_its_steps(in_python: list[int]) -> None:
    training = Training()
    in_python.clear()
    for _ in range(40):
        training.step()
        ltc.mark_step()
    assert len(in_python) < 12


def test_the_batches_of_a_script_that_trains_and_marks_nothing(in_python: list[int]) -> None:
    training = Training()
    in_python.clear()
    before = num_found()
    for _ in range(40):
        training.step()
    assert len(in_python) < 12
    assert 38 <= num_found() - before <= 40


def test_an_evaluation_after_it_has_steps() -> None:
    training = Training()
    for _ in range(5):
        training.step()
    before = num_found()
    kept = [training.evaluate() for _ in range(20)]
    assert 17 <= num_found() - before <= 20
    assert all(x.equal(kept[0]) for x in kept)


def test_python_makes_those_that_a_timeline_shows(in_python: list[int], tmp_path: Path) -> None:
    training = Training()
    for _ in range(10):
        training.step()
        ltc.mark_step()
    in_python.clear()
    with profiler.timeline(tmp_path / "trace.json"):
        training.step()
        ltc.mark_step()
    assert len(in_python) == 2
