"""Finalizers and signal handlers that record ops and read values: Python runs them anywhere, within an op too."""

import gc
from collections.abc import Iterator
from typing import Any

import pytest
import torch

import ltc_core as ltc
from ltc_core.record import fast_path
from tests.core import child

Results = dict[int, torch.Tensor]


class Garbage:
    """An object in a cycle, whose finalizer records ops on a tensor and keeps their result, in whichever thread."""

    def __init__(self, t: torch.Tensor, results: Results, number: int) -> None:
        self.me, self.t, self.results, self.number = self, t, results, number

    def __del__(self) -> None:
        self.results[self.number] = (self.t * 2 + 1).sum()


def steps(device: Any, results: Results) -> list[torch.Tensor]:
    x, weight = torch.ones(4, 4, device=device), torch.eye(4, device=device)
    found = []
    for step in range(3):
        for k in range(12):
            Garbage(x, results, 12 * step + k)
            x = torch.tanh(x @ weight) + k
            part = x.view(-1)[1:5]
            part.mul_(0.5)
            found.append(x.sum() + part.sum())
        ltc.mark_step()
    return [t.cpu() for t in found]


def run(threshold: int) -> tuple[list[float], dict[int, float]]:
    """What the steps compute, and what the finalizers compute, with a collection after so many new objects."""
    gc.set_threshold(threshold, 1000, 1000)
    results: Results = {}
    found = steps(ltc.lazy_device(), results)
    gc.collect()
    return [t.item() for t in found], {k: t.item() for k, t in results.items()}


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
        for threshold in range(2, 40, 2):
            found, recorded = run(threshold)
            assert (found, recorded) == wanted
    finally:
        fast_path.enable(was_fast)
    assert gc.isenabled()


IN_ONE_COLLECTION = """
import gc

results = {}

class Garbage:
    def __init__(self, number):
        self.me, self.number = self, number
        self.computed = torch.full((4,), float(number), device=device) * 2
        self.kept = torch.ones(4, device=device)
        self.kept += number
        ltc.mark_step()
        self.kept += 1

    def __del__(self):
        results[self.number] = self.computed.tolist(), (self.kept * 2).tolist()  # cuts

gc.disable()
for k in range(3):
    Garbage(k)
gc.collect()
print([sum(a) + sum(b) for _, (a, b) in sorted(results.items())])
"""


def test_what_the_finalizers_of_one_collection_hold_is_alive_when_the_first_one_cuts() -> None:
    out, err = child.run(IN_ONE_COLLECTION, timeout_s=60, LTC_COMPILE="off")
    assert (out.strip(), err) == ("[16.0, 32.0, 48.0]", "")


IN_THE_WORKER = """
import threading, time, warnings
from ltc_core.runtime.devices import context
from ltc_core.runtime.placement import Placement
from ltc_core.runtime.run_cost import RunCost
from ltc_core.runtime.run_policy import RunPolicy
from ltc_core.runtime.worker import Job

def here(self, *args):
    asked.append(self)
    return Placement.HERE

asked = []
RunPolicy.choose = here
RunPolicy.is_here = True
RunCost.is_quicker_here = lambda self, is_awaited: False
t, results, waits = torch.ones(4, device=device), [], threading.Event()

def job():  # as a program that runs, in which garbage is collected
    waits.wait()
    time.sleep(0.5)
    results.append(t * 2)

def step(x):
    global y
    y = x + 1

while not asked:  # until it runs in C++
    step(t)
    ltc.mark_step()
context(0).worker.submit(Job(job))
waits.set()
ACTION
context(0).worker.drain()
print([r.tolist() for r in results][0], y.tolist())
"""


@pytest.mark.parametrize("limit", ["1", "8"], ids=["for a place", "until it is idle"])
@pytest.mark.parametrize(
    "action",
    [
        "step(t); ltc.mark_step()",
        "step(t); y.cpu()",
        "warnings.simplefilter('ignore'); [step(t) for _ in range(200)]",
    ],
    ids=["a cut", "a read", "a graph that is too long"],
)
def test_one_in_the_workers_thread_does_not_wait_for_a_cut_that_waits_for_the_worker(
    action: str, limit: str
) -> None:
    script = IN_THE_WORKER.replace("ACTION", action)
    environ = {"LTC_COMPILE": "off", "LTC_REPLAY": "always", "LTC_MAX_PENDING_STEPS": limit}
    environ |= {"LTC_MAX_GRAPH_SIZE": "100", "LTC_TRIM_GRAPH_SIZE": "100"}
    out, _ = child.run(script, timeout_s=60, **environ)
    assert out.strip() == "[2.0, 2.0, 2.0, 2.0] [2.0, 2.0, 2.0, 2.0]"


HANDLER = """
import random, signal, sys
from ltc_core.record import fast_path

fast_path.enable(sys.argv[1:] == ["c++"])
weight, calls = torch.eye(4).to(device) + 0, []

def handler(number, frame):  # as one that saves a checkpoint when the job is to end
    calls.append((weight * 2).sum().item())
    signal.setitimer(signal.ITIMER_REAL, random.uniform(0.002, 0.01))

def steps(x, weight):
    found = []
    for step in range(40):
        for k in range(20):
            x = torch.tanh(x @ weight) + k
            part = x.view(-1)[1:5]
            part.mul_(0.5)
            found.append(x.sum() + part.sum())
        ltc.mark_step()
    return torch.stack(found).cpu()

wanted = steps(torch.ones(4, 4), torch.eye(4))
signal.signal(signal.SIGALRM, handler)
signal.setitimer(signal.ITIMER_REAL, 0.003)
equal = []
while len(equal) < 4 or len(calls) <= 20:
    equal.append(torch.allclose(steps(torch.ones(4, 4, device=device), weight), wanted))
signal.setitimer(signal.ITIMER_REAL, 0)
print(all(equal), set(calls), signal.getsignal(signal.SIGALRM) is handler)
"""


@pytest.mark.parametrize("recorder", ["c++", "python"])
def test_a_signal_handler_reads_values(recorder: str) -> None:
    script = HANDLER.replace("sys.argv[1:]", repr([recorder]))
    out, err = child.run(script, timeout_s=100, LTC_COMPILE="off")
    assert (out.strip(), err) == ("True {8.0} True", "")


def test_a_handler_that_raises_raises_after_the_op() -> None:
    script = """
import os, signal
from ltc_core.uninterrupted import uninterrupted

done = []

@uninterrupted
def change():
    os.kill(os.getpid(), signal.SIGINT)
    sum(range(1000))
    done.append(True)

try:
    change()
except KeyboardInterrupt:
    print("interrupted", done, signal.getsignal(signal.SIGINT) is signal.default_int_handler)
"""
    out, err = child.run(script)
    assert (out.strip(), err) == ("interrupted [True] True", "")


def test_a_read_in_the_workers_thread_is_an_error() -> None:
    script = """
from ltc_core.runtime.devices import context
from ltc_core.runtime.worker import Job

t, errors = torch.ones(4, device=device) + 1, []

def job():
    try:
        print((t * 2).tolist())
    except ltc.errors.DeviceError as error:
        errors.append(error)

done = Job(job)
context(0).worker.submit(done)
print(done.wait(20), errors[0])
print(t.tolist())
"""
    out, err = child.run(script, timeout_s=60)
    first, *rest, last = out.splitlines()
    assert first.startswith("True a value is read in the thread that computes it")
    assert "ltc-worker-0" in rest[0] and "Next: read the value in the training loop" in rest[1]
    assert (last, err) == ("[2.0, 2.0, 2.0, 2.0]", "")


def test_a_fork_by_another_thread_has_the_handlers_and_collects() -> None:
    script = """
import gc, os, signal, threading
from ltc_core.uninterrupted import uninterrupted

begun, over = threading.Event(), threading.Event()

def fork():
    begun.wait()
    pid = os.fork()
    if not pid:
        is_right = gc.isenabled() and signal.getsignal(signal.SIGINT) is signal.default_int_handler
        os._exit(0 if is_right else 1)
    print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
    over.set()

thread = threading.Thread(target=fork)
thread.start()

@uninterrupted
def change():
    begun.set()
    over.wait()

change()
print(gc.isenabled(), signal.getsignal(signal.SIGINT) is signal.default_int_handler)
"""
    out, err = child.run(script, timeout_s=60)
    assert (out.split(), err) == (["0", "True", "True"], "")


OF_THE_RUNTIME = """
class Held:
    def __del__(self):
        signal.raise_signal(signal.SIGINT)

Held.__del__.__module__ = "ltc_core.runtime.held"
held = Held()
"""

# The loaders' finalizers are such calls, and PyTorch's own.
OF_WEAKREF = """
class Held:
    pass

held = Held()
weakref.finalize(held, signal.raise_signal, signal.SIGINT)
"""


@pytest.mark.parametrize("finalizer", [OF_THE_RUNTIME, OF_WEAKREF])
def test_ctrl_c_within_a_finalizer_is_not_lost(finalizer: str) -> None:
    """Python drops what a finalizer raises; then a loop that is interrupted there would go on for ever."""
    loop = """
try:
    del held
    for _ in range(500):
        time.sleep(0.01)
    print("lost")
except KeyboardInterrupt:
    print("interrupted")
"""
    out, err = child.run("import signal, time, weakref\n" + finalizer + loop)
    assert (out, err) == ("interrupted\n", "")
