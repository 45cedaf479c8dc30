"""Threads of the user that share the device, forks after use, and the end of the interpreter.

What needs a process of its own runs in one: a fork of a process with worker threads, and exits with
work pending. None may hang.
"""

import multiprocessing
import os
import random
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import ltc_core as ltc
from ltc_core.runtime.devices import context
from ltc_core.runtime.launcher import Launcher
from ltc_core.settings import settings
from tests import prepared
from tests.core.beside_eager import assert_same

ROOT = Path(__file__).parents[3]
TIMEOUT_S = 120


def in_threads(*calls: Callable[[], Any]) -> None:
    """Run all at the same time; raise the first error."""
    errors: list[BaseException] = []
    start = threading.Barrier(len(calls))

    def run(call: Callable[[], Any]) -> None:
        try:
            start.wait()
            call()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(call,)) for call in calls]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]


def square_sum(t: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    leaf = t.detach().requires_grad_()
    return (leaf * leaf * 0.5).sum(), leaf


def python(code: str, **env: str) -> subprocess.CompletedProcess[str]:
    prelude = "import os, sys, torch, ltc_core as ltc\nd = ltc.lazy_device()\n"
    return prepared.run(
        [sys.executable, "-W", "error", "-c", prelude + code],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT), **env},
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
    )


class TestThreads:
    def test_models_trained_at_the_same_time(self) -> None:
        """Their ops are recorded into one trace, and cut by whoever comes first."""
        device = ltc.lazy_device()
        results: dict[int, Any] = {}

        def train(seed: int, where: torch.device) -> Any:
            weight = torch.linspace(-1, 1, 12).mul(seed).view(3, 4).to(where).requires_grad_()
            optimizer = torch.optim.Adam([weight], lr=0.1)
            for step in range(8):
                x = torch.full((2, 3), float(step)).to(where)
                optimizer.zero_grad()
                ((x @ weight).tanh() - 0.5).square().mean().backward()
                optimizer.step()
                if where.type != "cpu":
                    ltc.mark_step()
            return weight.detach().cpu()

        def work(seed: int) -> None:
            results[seed] = train(seed, device)

        in_threads(*(lambda seed=seed: work(seed) for seed in (1, 2, 3)))
        for seed, weight in results.items():
            torch.testing.assert_close(weight, train(seed, torch.device("cpu")))

    def test_reading_while_another_thread_records(self) -> None:
        device = ltc.lazy_device()
        stop = threading.Event()
        total = torch.zeros((), device=device)

        def record() -> None:
            while not stop.is_set():
                x = torch.zeros(4, device=device)
                for _ in range(100):
                    x = x + 1
                ltc.mark_step()

        def read() -> None:
            nonlocal total
            try:
                for expected in range(1, 30):
                    total = total + 1
                    assert total.item() == expected
            finally:
                stop.set()

        in_threads(record, read)

    def test_random_programs_in_four_threads(self) -> None:
        """Each compares its tensor with its own on the CPU, whatever the others record and cut."""
        device = ltc.lazy_device()

        def work(seed: int) -> None:
            rng = random.Random(seed)
            eager, lazy = torch.zeros(4), torch.zeros(4, device=device)
            for _ in range(150):
                kind = rng.randrange(6)
                if kind == 0:
                    ltc.mark_step()
                elif kind == 1:
                    assert lazy.tolist() == eager.tolist()
                elif kind == 2:
                    eager, lazy = (t.flip(0) + seed for t in (eager, lazy))
                elif kind == 3:
                    eager[1:3] += 1
                    lazy[1:3] += 1
                elif kind == 4:
                    eager, lazy = eager.cos(), lazy.cpu().to(device).cos()
                else:
                    eager, lazy = (torch.autograd.grad(*square_sum(t))[0] for t in (eager, lazy))
            assert lazy.tolist() == eager.tolist()

        in_threads(*(lambda seed=seed: work(seed) for seed in range(4)))

    def test_loading_data_in_a_thread(self) -> None:
        """A prefetching loader uploads while the main thread trains."""
        device = ltc.lazy_device()
        batches: list[torch.Tensor] = []
        ready = threading.Semaphore(0)

        def load() -> None:
            for step in range(12):
                batches.append(torch.full((3, 2), float(step)).to(device))
                ready.release()

        thread = threading.Thread(target=load)
        thread.start()
        model = nn.Linear(2, 1).to(device)
        sums = []
        for step in range(12):
            ready.acquire()
            sums.append(batches[step].sum() + 0 * model(batches[step]).sum())
            ltc.mark_step()
        thread.join()
        assert [s.item() for s in sums] == [6.0 * step for step in range(12)]

    def test_random_draws_in_threads_are_all_different(self) -> None:
        device = ltc.lazy_device()
        torch.manual_seed(0)
        drawn: list[torch.Tensor] = []

        def draw() -> None:
            for _ in range(10):
                drawn.append(torch.rand(4, device=device))

        in_threads(draw, draw, draw)
        assert len({tuple(t.tolist()) for t in drawn}) == 30
        eager = torch.Generator().manual_seed(0)
        expected = {tuple(torch.rand(4, generator=eager).tolist()) for _ in range(30)}
        assert {tuple(t.tolist()) for t in drawn} == expected

    def test_tensors_that_die_in_another_thread(self) -> None:
        device = ltc.lazy_device()
        before = ltc.get_memory_info()["bytes_used"]
        held = [torch.ones(1000, device=device) + i for i in range(50)]
        ltc.mark_step(wait=True)
        assert ltc.get_memory_info()["bytes_used"] > before

        def drop() -> None:
            while held:
                held.pop()

        in_threads(drop)
        assert ltc.get_memory_info()["bytes_used"] <= before + 5056


class TestForks:
    def test_a_child_goes_on_with_the_device(self) -> None:
        done = python("""
x = torch.arange(4.0, device=d)
model = torch.nn.Linear(4, 2).to(d)
y = model(x).sum() * 2          # recorded, not run, at the fork
z = x * 3
ltc.mark_step()                 # running at the fork
pid = os.fork()
w = x + 1
assert w.tolist() == [1.0, 2.0, 3.0, 4.0] and z.tolist() == [0.0, 3.0, 6.0, 9.0]
value = y.item()
y.backward()
torch.optim.SGD(model.parameters(), lr=0.1).step()
ltc.mark_step(wait=True)
assert model.weight.grad is not None
x += 100                        # copies of the process do not see each other
assert x.tolist() == [100.0, 101.0, 102.0, 103.0]
torch.rand(2, device=d).tolist()
if pid:
    _, status = os.waitpid(pid, 0)
    print("parent", value, os.waitstatus_to_exitcode(status))
else:
    print("child", value, flush=True)
    os._exit(0)
""")
        assert done.returncode == 0, done.stderr
        child, parent = done.stdout.splitlines()
        assert child.split()[0] == "child" and parent.endswith(" 0")
        assert child.split()[1] == parent.split()[1]

    def test_forks_while_threads_use_two_devices(self) -> None:
        """Each device is at work: threads record and copy between them, a job reads the other device."""
        done = python(
            """
import threading, time
@torch.library.custom_op("ltc_tests::reads", mutates_args=())
def reads(x: torch.Tensor) -> torch.Tensor:
    time.sleep(0.05)            # the fork has the lock of the first device by now
    return x + other.sum().item()
@reads.register_fake
def _(x): return torch.empty_like(x)
devices = [ltc.lazy_device(0), ltc.lazy_device(1)]
shared = [torch.ones(4, device=d) * 2 for d in devices]
other = torch.ones(2, device=devices[0])
stop, errors = threading.Event(), []
def train(k):
    try:
        x, count = torch.zeros(16, 16, device=devices[k]), 0
        while not stop.is_set():
            for _ in range(10):
                x = x + 1
            y, count = (x @ x).sum(), count + 10
            if count % 40 == 0:
                assert (x.to(devices[1 - k]) + 1)[0, 0].item() == count + 1
            ltc.mark_step(device=devices[k])
    except BaseException as error:
        errors.append(error)
def read():
    try:
        while not stop.is_set():
            z = reads(torch.ones(1, device=devices[1]))
            ltc.mark_step(device=devices[1])
            assert z.item() == 3
    except BaseException as error:
        errors.append(error)
def use():
    for d, t in zip(devices, shared):
        assert (torch.arange(4.0, device=d) + t).sum().item() == 14
        ltc.mark_step()
    ltc.wait_device_ops()
threads = [threading.Thread(target=c) for c in (lambda: train(0), lambda: train(1), read)]
for t in threads: t.start()
codes = []
for _ in range(8):
    pid = os.fork()
    if not pid:
        try:
            use()
            os._exit(0)
        finally:
            os._exit(1)
    codes.append(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
stop.set()
for t in threads: t.join()
use()
print(codes, errors)
""",
            LTC_NUM_DEVICES="2",
        )
        assert done.stdout == "[0, 0, 0, 0, 0, 0, 0, 0] []\n", done.stderr

    def test_a_fork_does_not_wait_for_ever(self) -> None:
        """What a busy device computed is lost in the child, which goes on with the device; the parent keeps all."""
        done = python("""
import threading
from ltc_core.runtime import devices
devices._FORK_PATIENCE_S = 0.2
go, begun = threading.Event(), threading.Event()
@torch.library.custom_op("ltc_tests::waits", mutates_args=())
def waits(x: torch.Tensor) -> torch.Tensor:
    begun.set()
    assert go.wait(30)
    return x + 1
@waits.register_fake
def _(x): return torch.empty_like(x)
held = torch.ones(2).to(d)
lost = waits(held)
ltc.mark_step()
assert begun.wait(30)
pending = held * 3
pid = os.fork()
if not pid:
    for t in (lost, pending):
        try:
            t.tolist()
            print("read")
        except RuntimeError as error:
            print("forked while" in str(error), "Next: " in str(error))
    print((held * 2).tolist(), flush=True)
    ltc.wait_device_ops()
    os._exit(0)
code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
go.set()
print(code, lost.tolist(), pending.tolist())
""")
        lines = ["True True", "True True", "[2.0, 2.0]", "0 [2.0, 2.0] [3.0, 3.0]"]
        assert done.stdout.splitlines() == lines, done.stderr

    def test_multiprocessing_with_fork(self) -> None:
        done = python("""
import multiprocessing
def work(queue, t):
    queue.put((t * 2).sum().item())
    torch.set_num_threads(1)
    queue.put(torch.ones(1000, 1000, device=d).mm(torch.ones(1000, 1000, device=d)).mean().item())
if __name__ == "__main__":
    t = torch.ones(5, device=d) + 1
    big = torch.ones(1000, 1000, device=d).mm(torch.ones(1000, 1000, device=d))
    ltc.mark_step()
    context = multiprocessing.get_context("fork")
    queue = context.Queue()
    processes = [context.Process(target=work, args=(queue, t)) for _ in range(2)]
    for p in processes: p.start()
    print(sorted(queue.get() for _ in range(4)))
    for p in processes: p.join()
    print([p.exitcode for p in processes], t.sum().item(), big.mean().item())
""")
        assert done.returncode == 0, done.stderr
        assert done.stdout.splitlines() == ["[20.0, 20.0, 1000.0, 1000.0]", "[0, 0] 10.0 1000.0"]

    def test_a_loader_that_forks_its_workers(self) -> None:
        device = ltc.lazy_device()
        torch.ones(1, device=device).add(1).item()
        loader = torch.utils.data.DataLoader(
            torch.utils.data.TensorDataset(torch.arange(8.0)),
            batch_size=2,
            num_workers=2,
            multiprocessing_context="fork",
        )
        seen = [batch.to(device).sum().item() for (batch,) in loader]
        assert seen == [1.0, 5.0, 9.0, 13.0]

    def test_spawned_processes_start_anew(self) -> None:
        torch.ones(1, device=ltc.lazy_device()).item()
        context = multiprocessing.get_context("spawn")
        with context.Pool(1) as pool:
            assert pool.apply(spawned, (3.0,)) == 9.0


def spawned(value: float) -> float:
    return (torch.full((3,), value, device=ltc.lazy_device())).sum().item()


class TestTheEnd:
    @pytest.mark.parametrize(
        "ending", ["", "sys.exit(0)", "t.start()", "ltc.mark_step(); raise SystemExit"]
    )
    def test_exit_with_work_pending(self, ending: str) -> None:
        done = python(f"""
import threading
x = torch.ones(700, 700, device=d)
for _ in range(6):
    x = x @ x / 700
    ltc.mark_step()
y = x.sum()                     # recorded only
t = threading.Thread(target=lambda: print("read", y.item()))
{ending}
""")
        assert done.returncode == 0, done.stderr
        assert done.stderr == ""
        assert done.stdout == ("read 490000.0\n" if "start" in ending else "")

    def test_exit_with_a_model_an_optimizer_and_a_generator_alive(self) -> None:
        done = python("""
g = torch.Generator(d)
model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Dropout()).to(d)
optimizer = torch.optim.Adam(model.parameters())
for _ in range(3):
    model(torch.randn(4, 8, device=d, generator=g)).sum().backward()
    optimizer.step()
    ltc.mark_step()
ltc.add_step_closure(print, ("never",), run_async=True)
keep = [model, optimizer, g]
keep.append(keep)
""")
        assert (done.returncode, done.stderr) == (0, "")

    def test_work_that_takes_too_long_is_dropped_with_a_sentence(self) -> None:
        done = python(
            """
import time
@torch.library.custom_op("ltc_tests::slow", mutates_args=())
def slow(x: torch.Tensor) -> torch.Tensor:
    time.sleep(30)
    return x + 0
@slow.register_fake
def _(x): return torch.empty_like(x)
kept = slow(torch.ones(1, device=d))
ltc.mark_step()
""",
            LTC_EXIT_TIMEOUT_S="0.2",
        )
        assert done.returncode in (0, 1), done.stderr  # not killed by a signal
        (sentence,) = done.stderr.splitlines()
        assert f"{settings.device_name}:0 was still running" in sentence
        assert "dropped" in sentence and "Next: " in sentence

    def test_an_error_nobody_saw_is_told_at_the_end(self) -> None:
        done = python("""
table = torch.ones(4, 2, device=d)
kept = torch.nn.functional.embedding(torch.tensor([99], device=d), table)
ltc.mark_step()
""")
        assert done.returncode == 1
        assert "index out of range" in done.stderr and "Next: " in done.stderr

    def test_an_exception_of_the_user_is_shown_as_it_is(self) -> None:
        done = python("""
x = torch.ones(700, 700, device=d) @ torch.ones(700, 700, device=d)
ltc.mark_step()
raise ValueError("mine")
""")
        assert done.returncode == 1
        assert done.stderr.rstrip().endswith("ValueError: mine")


def test_the_device_of_a_thread_is_its_own() -> None:
    assert_same(torch.ones(1, device=settings.device_name), torch.ones(1))


def test_a_read_while_another_thread_cuts(monkeypatch: pytest.MonkeyPatch) -> None:
    """The trace is empty then, and what was in it has no buffers yet."""
    is_cut, reads = threading.Event(), threading.Event()
    plain = Launcher.launch

    def slow(*args: Any, **kwargs: Any) -> Any:
        is_cut.set()
        reads.wait(TIMEOUT_S)
        time.sleep(0.1)
        return plain(*args, **kwargs)

    x = torch.ones(3, device=ltc.lazy_device())
    y = x * 2.5 + 1
    monkeypatch.setattr(Launcher, "launch", slow)

    def read() -> None:
        is_cut.wait(TIMEOUT_S)
        reads.set()
        context(0)._await_value(y._h.value, "Test", None)  # type: ignore[attr-defined]
        assert y.tolist() == [3.5] * 3

    in_threads(ltc.mark_step, read)
