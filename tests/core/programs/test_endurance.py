"""Large numbers: a million tensors, a graph of 100,000 ops, a loop that never marks its steps.

Each grows nothing that is not given back.
"""

import gc
import inspect
import re
import warnings
from collections.abc import Iterator

import psutil
import pytest
import torch
from torch import nn

import ltc_core as ltc
from ltc_core.runtime import devices
from ltc_core.runtime.unbounded_loop import LoopWatch
from ltc_core.settings import settings
from tests.core.counting import Counting

pytestmark = pytest.mark.usefixtures("marked_steps")

MIB = 1 << 20


def resident_bytes() -> int:
    gc.collect()
    return int(psutil.Process().memory_info().rss)


@pytest.fixture
def device() -> torch.device:
    return ltc.lazy_device()


def test_a_million_tensors_leave_nothing(device: torch.device) -> None:
    x = torch.ones(4, device=device)

    def drop(count: int) -> None:
        for _ in range(count // 1000):
            for _ in range(1000):
                x + 1
            ltc.mark_step()

    drop(100_000)
    before, held = resident_bytes(), ltc.get_memory_info()["bytes_used"]
    drop(1_000_000)
    assert resident_bytes() - before < 20 * MIB
    assert ltc.get_memory_info()["bytes_used"] == held


def test_tensors_that_are_never_cut_leave_nothing(device: torch.device) -> None:
    """Made and dropped without a single mark_step: the size limit cuts them."""
    x = torch.ones(4, device=device)

    def drop(count: int) -> None:
        for _ in range(count):
            x + 1

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # once a process: it may have come before
        drop(100_000)
        before = resident_bytes()
        drop(500_000)
    assert resident_bytes() - before < 20 * MIB


def test_uploads_leave_nothing(device: torch.device) -> None:
    host = torch.ones(25_000)
    for _ in range(100):
        host.to(device)
    before = resident_bytes()
    for _ in range(3000):
        host.to(device)  # 286 MiB in all
    assert resident_bytes() - before < 30 * MIB


def test_a_graph_of_100_000_ops(device: torch.device) -> None:
    num_ops = 100_000
    with settings.override(trim_graph_size=10 * num_ops, max_graph_size=10 * num_ops):
        ltc.mark_step()  # the limit counts from a cut on
        x = torch.zeros((), device=device)
        ltc.mark_step()
        with Counting() as counted:
            for _ in range(num_ops):
                x = x + 1
            ltc.mark_step(wait=True)
    assert x.item() == num_ops
    assert counted.ops == {"add": num_ops} and counted.syncs == {"MarkStep": 1}


def test_a_graph_of_100_000_ops_that_are_all_alive(device: torch.device) -> None:
    num_ops = 100_000
    with settings.override(trim_graph_size=10 * num_ops, max_graph_size=10 * num_ops):
        ltc.mark_step()
        x = torch.zeros((), device=device)
        kept = [x + i for i in range(num_ops)]
        ltc.mark_step(wait=True)
    assert kept[0].item() == 0 and kept[-1].item() == num_ops - 1
    assert sum(t.item() for t in kept[::1000]) == sum(range(0, num_ops, 1000))


def test_a_deep_backward(device: torch.device) -> None:
    num_ops = 20_000
    with settings.override(trim_graph_size=10 * num_ops, max_graph_size=10 * num_ops):
        x = torch.ones((), device=device, requires_grad=True)
        y = x
        for _ in range(num_ops):
            y = y * 1.0001
        y.backward()
        assert x.grad is not None
        assert x.grad.item() == pytest.approx(1.0001**num_ops, rel=1e-2)


@pytest.fixture
def fresh_watch(device: torch.device) -> Iterator[None]:
    """Let the device warn anew, of loops of 500 ops: a process is told once."""
    context = devices.context(device.index)

    def renew() -> None:
        ltc.mark_step()
        context.watch = LoopWatch(context.trace, lambda: context.cut("GraphLimit"))
        context.trace.limit = context.trace.first_limit

    with settings.override(trim_graph_size=500):
        renew()
        yield
    renew()


@pytest.mark.usefixtures("fresh_watch")
def test_a_loop_that_forgets_mark_step_is_told_once(device: torch.device) -> None:
    """It is cut at the head of the loop, so that all its pieces are the same graph."""
    with warnings.catch_warnings(record=True) as caught, Counting() as counted:
        warnings.simplefilter("always")
        loss = forgetful_loop(device, num_steps=200)
    told = [str(w.message) for w in caught if "step boundary" in str(w.message)]
    assert len(told) == 1
    source, start = inspect.getsourcelines(forgetful_loop)
    head = next(i for i, text in enumerate(source) if "for _ in range" in text)
    place = re.search(r"(\S+):(\d+) in forgetful_loop", told[0])
    assert place is not None, told
    assert place[1].endswith("test_endurance.py")
    assert start + head <= int(place[2]) < start + len(source)
    assert "pytest" not in told[0].replace("pytest-of", "")
    assert "call mark_step() once in each iteration" in told[0]
    assert counted.syncs.get("GraphLimit", 0) > 3
    assert counted.compiles <= 4
    assert loss.item() < 10


def forgetful_loop(device: torch.device, num_steps: int) -> torch.Tensor:
    model = nn.Linear(4, 4).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for _ in range(num_steps):
        optimizer.zero_grad()
        loss = model(torch.ones(2, 4, device=device)).square().sum()
        loss.backward()
        optimizer.step()
    return loss
