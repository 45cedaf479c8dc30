"""Finalizers that record ops: Python may collect garbage while an op is recorded, and they run there."""

import gc
from collections.abc import Iterator
from typing import Any

import pytest
import torch

import ltc_core as ltc
from ltc_core.record import fast_path
from tests.core import child


class Garbage:
    """An object in a cycle, whose finalizer records ops on a tensor and keeps their result."""

    def __init__(self, t: torch.Tensor, results: list[torch.Tensor]) -> None:
        self.me, self.t, self.results = self, t, results

    def __del__(self) -> None:
        self.results.append((self.t * 2 + 1).sum())


def steps(device: Any, results: list[torch.Tensor]) -> list[torch.Tensor]:
    x, weight = torch.ones(4, 4, device=device), torch.eye(4, device=device)
    found = []
    for _ in range(3):
        for k in range(12):
            Garbage(x, results)
            x = torch.tanh(x @ weight) + k
            part = x.view(-1)[1:5]
            part.mul_(0.5)
            found.append(x.sum() + part.sum())
        ltc.mark_step()
    return [t.cpu() for t in found]


def run(threshold: int) -> tuple[list[float], list[float]]:
    """What the steps compute, and what the finalizers compute, with a collection after so many new objects."""
    gc.set_threshold(threshold, 1000, 1000)
    results: list[torch.Tensor] = []
    found = steps(ltc.lazy_device(), results)
    gc.collect()
    return [t.item() for t in found], sorted(t.item() for t in results)


@pytest.fixture
def thresholds() -> Iterator[None]:
    """The collector's thresholds are as before when the test ends."""
    before = gc.get_threshold()
    yield
    gc.set_threshold(*before)


@pytest.mark.parametrize("is_fast", [True, False], ids=["c++", "python"])
def test_what_they_record_leaves_the_op_right(is_fast: bool, thresholds: None) -> None:
    """Each threshold collects at other places within ops."""
    was_fast = fast_path.enable(is_fast)
    try:
        wanted = run(100_000)  # collects between steps only
        assert len(wanted[1]) == 36
        for threshold in range(2, 40):
            assert run(threshold) == wanted
    finally:
        fast_path.enable(was_fast)
    assert gc.isenabled()


IN_THE_WORKER = """
import threading, time
from ltc_core.runtime.devices import context
from ltc_core.runtime.worker import Job

t, results, is_full = torch.ones(4, device=device), [], threading.Event()

def job():  # as a program that runs, in which garbage is collected
    is_full.wait()
    time.sleep(0.5)
    results.append(t * 2)

for _ in range(ltc.settings.max_pending_steps):
    context(0).worker.submit(Job(job))
is_full.set()
t += 1
ltc.mark_step()  # waits for a place in the queue
print([r.tolist() for r in results][0])
"""


def test_one_in_the_workers_thread_does_not_wait_for_a_cut_that_waits_for_the_worker() -> None:
    out, err = child.run(IN_THE_WORKER, timeout_s=60, LTC_COMPILE="off", LTC_MAX_PENDING_STEPS="1")
    assert (out.strip(), err) == ("[4.0, 4.0, 4.0, 4.0]", "")
