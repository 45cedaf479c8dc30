"""A program that waits for other processes: the thread that cuts runs it up to there, the worker the rest."""

import threading
from collections.abc import Generator, Iterator
from typing import Any

import pytest
import torch

import ltc_core as ltc
from ltc_core.errors import LtcError
from ltc_core.executors.inductor.tiers import TieredProgram
from ltc_core.program.failure import NodeFailure, Salvaged
from ltc_core.runtime import devices
from ltc_core.runtime.launcher import Launcher
from ltc_core.runtime.placement import Placement


class Others:
    """What a program waits for."""

    def __init__(self) -> None:
        self.came = threading.Event()
        self.threads: list[str] = []
        self.error: Exception | None = None

    def run(self, program: TieredProgram, *data: Any) -> Generator[None, None, list[Any]]:
        self.threads.append(threading.current_thread().name)
        yield
        self.threads.append(threading.current_thread().name)
        assert self.came.wait(20)
        assert not torch.is_grad_enabled()
        if self.error is not None:
            raise self.error
        return program._reference.run(*data)


@pytest.fixture
def others(monkeypatch: pytest.MonkeyPatch) -> Iterator[Others]:
    ltc.wait_device_ops()
    found = Others()
    monkeypatch.setattr(Launcher, "placement", lambda *args: Placement.HERE)

    def run_in_steps(
        self: TieredProgram, inputs: Any, scalars: Any, watch: Any
    ) -> Generator[None, None, list[Any]]:
        return found.run(self, inputs, scalars)

    monkeypatch.setattr(TieredProgram, "run_in_steps", run_in_steps)
    yield found
    found.came.set()
    ltc.wait_device_ops()


def test_what_comes_next_is_recorded_while_it_waits(others: Others) -> None:
    x = torch.ones(3, device=ltc.lazy_device(), requires_grad=True)
    y = x * 2
    ltc.mark_step()
    z = y + x  # recorded; the program that makes y waits
    assert others.threads == ["MainThread", "ltc-worker-0"] or others.threads == ["MainThread"]
    others.came.set()
    devices.context(
        z.device.index
    ).worker.drain()  # else the next program may follow it in the worker
    assert z.tolist() == [3, 3, 3]
    assert others.threads == ["MainThread", "ltc-worker-0"] * 2


def test_programs_keep_their_order(others: Others) -> None:
    x = torch.zeros(3, device=ltc.lazy_device())
    threading.Timer(0.2, others.came.set).start()
    for k in range(5):
        x.add_(k)
        ltc.mark_step()
    assert x.tolist() == [10, 10, 10]


def test_what_fails_behind_the_wait_is_told_and_loses_nothing(others: Others) -> None:
    x = torch.ones(3, device=ltc.lazy_device())
    others.came.set()
    ltc.wait_device_ops()
    try:
        raise ValueError("a process has gone")
    except ValueError as cause:
        others.error = NodeFailure(None, Salvaged({}))
        others.error.__cause__ = cause
    y = x * 2
    ltc.mark_step()
    with pytest.raises(LtcError, match="a process has gone"):
        ltc.wait_device_ops()
    others.error = None
    with pytest.raises(LtcError, match="a process has gone"):
        y.tolist()
    assert x.tolist() == [1, 1, 1]
