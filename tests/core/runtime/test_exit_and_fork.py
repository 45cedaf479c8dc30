"""The ends of a process, its forks, and what importing costs it.

The plain cases are in test_threads_and_forks.py, Ctrl-C in test_devices.py. Here: exit codes, ops that no
exit waits for, forks at bad moments, children of children, and which modules an import brings in.
"""

import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch

import ltc_core as ltc
from tests.core import child

STILL = ":0 was still running after 0.2 s; its pending work is dropped. Next: "
# An op of ATen that runs for seconds without Python's lock; and one written in Python.
LONG_OP = """
x = torch.eye(2500).to(device)
y = torch.linalg.matrix_power(x, 2**40 - 1)
ltc.mark_step()
import time; time.sleep(0.3)
"""
LONG_PYTHON = """
from tests.core.custom_ops import Gate
gate = Gate()
gate.__enter__()
y = gate(torch.ones(2, device=device))
ltc.mark_step()
assert gate.reached.wait(10)
"""


class TestExit:
    @pytest.mark.parametrize("work", [LONG_OP, LONG_PYTHON], ids=["an op of ATen", "Python"])
    def test_work_that_no_exit_waits_for(self, work: str) -> None:
        """One sentence, no crash, and whoever started the program sees the code it ended with."""
        ending = "print('end', flush=True)\nimport sys\nsys.exit(7)"
        out, err = child.run(work + ending, returncode=7, LTC_EXIT_TIMEOUT_S="0.2")
        assert out == "end\n"
        [line] = err.splitlines()
        assert STILL in line and "LTC_EXIT_TIMEOUT_S" in line

    def test_an_exception_while_work_is_dropped(self) -> None:
        _, err = child.run(
            LONG_PYTHON + "raise ValueError('mine')", returncode=1, LTC_EXIT_TIMEOUT_S="0.2"
        )
        traceback, _, rest = err.partition("ValueError: mine\n")
        assert traceback.startswith("Traceback") and STILL in rest and len(rest.splitlines()) == 1

    def test_work_is_finished_whatever_the_code(self) -> None:
        """What a kernel writes to the world must not be lost: the exit waits for it."""
        out, err = child.run(
            """
            import sys, time
            @torch.library.custom_op("exit::write", mutates_args=())
            def write(x: torch.Tensor) -> torch.Tensor:
                time.sleep(0.3)
                print("written", x.tolist(), flush=True)
                return x + 0
            write.register_fake(torch.empty_like)
            kept = write(torch.ones(1, device=device) * 2)
            ltc.mark_step()
            sys.exit("with a message")
            """,
            returncode=1,
        )
        assert out == "written [2.0]\n" and err == "with a message\n"

    def test_handlers_of_the_user_may_use_the_device(self) -> None:
        """Registered before the import or after it: the device works until the very end."""
        out, err = child.run(
            """
            def report(when):
                print(when, (x + 1).tolist(), flush=True)
                ltc.mark_step()
            atexit.register(report, "after")
            x = torch.ones(1, device=device)
            ltc.mark_step()
            """,
            prelude="import atexit\natexit.register(lambda: report('before'))\n" + child.PRELUDE,
        )
        assert out.splitlines() == ["after [2.0]", "before [2.0]"] and err == ""

    def test_tensors_that_outlive_the_interpreter(self) -> None:
        """In module globals, in cycles, with their generators and finalizers."""
        out, err = child.run(
            """
            import weakref
            class Keeper:
                def __init__(self):
                    self.me, self.t = self, torch.ones(3, device=device, requires_grad=True) * 2
                def __del__(self):
                    str(self.t.shape)
            keeper = Keeper()
            torch.kept = [torch.ones(3, device=device), torch.Generator(device), keeper.t.grad_fn]
            weakref.finalize(keeper, print, "finalized")
            """
        )
        assert out == "finalized\n" and err == ""


# Code that forks: `child(f)` gives what `f` returned there, or what it raised, or that it hung.
FORKING = """
import os, select, sys, time, traceback
def child(f):
    r, w = os.pipe()
    pid = os.fork()
    if not pid:
        try:
            answer = str(f())
        except BaseException as error:
            answer = f"{type(error).__name__}: {error}"
        os.write(w, answer[:4000].encode())
        os._exit(0)
    os.close(w)
    ready, _, _ = select.select([r], [], [], 15)
    if not ready:
        os.kill(pid, 9)
    answer = os.read(r, 5000).decode() if ready else "hangs"
    os.waitpid(pid, 0)
    os.close(r)
    return answer
"""


class TestFork:
    def test_everything_works_in_the_child(self) -> None:
        """Closures, random numbers, large matrices, waiting, a child of its own; the parent goes on too."""
        out, err = child.run(
            FORKING
            + """
model = torch.nn.Linear(8, 8).to(device)
optimizer = torch.optim.AdamW(model.parameters())
for _ in range(3):
    model(torch.ones(2, 8, device=device)).sum().backward()
    optimizer.step()
    ltc.mark_step()
seen = []
ltc.add_step_closure(seen.append, (1,), run_async=True)
ltc.mark_step()
ltc.wait_device_ops()
torch.manual_seed(0)
big = torch.ones(700, 700, device=device)
def closures():
    ltc.add_step_closure(seen.append, (2,), run_async=True)
    ltc.mark_step()
    ltc.wait_device_ops()
    return seen
def forward():
    with torch.no_grad():
        return model(torch.ones(2, 8, device=device)).shape
print(child(closures), seen)
print(child(forward))
print(child(lambda: (big @ big)[0, 0].item()), (big @ big)[0, 0].item())
print(child(lambda: child(lambda: (big @ big)[0, 0].item())))
print(child(lambda: torch.rand(1, device=device).item()) == str(torch.rand(1, device=device).item()))
print(child(lambda: ltc.metrics.counter_value("MarkStep")), ltc.metrics.counter_value("MarkStep"))
"""
        )
        assert err == ""
        assert out.splitlines() == [
            "[1, 2] [1]",
            "torch.Size([2, 8])",
            "700.0 700.0",
            "700.0",
            "True",
            "4 4",
        ]

    def test_backward_in_a_child_works_or_says_why_not(self) -> None:
        """PyTorch's autograd threads do not survive a fork once they ran; that is said in its words."""
        out, _ = child.run(
            FORKING
            + """
def train():
    w = torch.ones(2, device=device, requires_grad=True)
    (w * 3).sum().backward()
    return w.grad.tolist()
print(child(train))
train()
print(child(train))
print(train())
"""
        )
        first, second, parent = out.splitlines()
        assert first == parent == "[3.0, 3.0]"
        assert second == "[3.0, 3.0]" or "Autograd-and-Fork" in second

    def test_while_other_threads_record(self) -> None:
        """The child finds a trace that is whole, and no lock that is held by a thread it does not have."""
        out, err = child.run(
            FORKING
            + """
import threading
stop = threading.Event()
def busy():
    x = torch.ones(4, device=device)
    while not stop.is_set():
        x = (x * 0.5).exp() + x.view(2, 2).sum()
        if x.sum().item() > 100:
            x = torch.ones(4, device=device)
        torch.rand(3, device=device)
        ltc.mark_step()
def program():
    return (torch.ones(4, device=device) * 2).exp().add(torch.arange(4, device=device)).sum().round().item()
program()  # the first op lets PyTorch import modules, under locks that a child could not get
threads = [threading.Thread(target=busy) for _ in range(2)]
for t in threads: t.start()
answers = {child(program) for _ in range(25)}
stop.set()
for t in threads: t.join()
print(answers)
"""
        )
        assert out == "{'36.0'}\n" and err == ""

    def test_at_bad_moments(self) -> None:
        """With an error that nobody saw yet; and in a closure, which must not wait for itself."""
        out, _ = child.run(
            FORKING
            + """
from tests.core.custom_ops import fail
answers = []
ltc.add_step_closure(lambda: answers.append(child(lambda: 5)), run_async=True)
kept = torch.ones(300, 300, device=device) @ torch.ones(300, 300, device=device)
ltc.mark_step()
ltc.wait_device_ops()
print(answers)
lost = fail(torch.ones(2, device=device))
ltc.mark_step()
print(child(ltc.wait_device_ops).split(" (")[0])
try:
    ltc.wait_device_ops()
except ValueError:
    print("in the parent too")
"""
        )
        closure, told, parent = out.splitlines()
        assert closure == "['5']"
        assert "this op fails" in told or told == "None"
        assert parent == "in the parent too"


def test_importing_brings_in_nothing_heavy_and_starts_nothing() -> None:
    """What costs seconds, or what only some runs need, is imported by whoever needs it."""
    out, err = child.run(
        """
        import sys, threading
        import psutil, torch
        before = set(sys.modules)
        import ltc_core as ltc
        added = set(sys.modules) - before
        heavy = ["torch._dynamo", "torch._inductor", "torch._lazy", "torch.distributed.tensor",
                 "sympy", "triton", "rich", "safetensors", "cloudpickle"]
        print([name for name in heavy if name in added])
        print(len([m for m in added if not m.startswith(("ltc_core", "torch.ltc"))]) < 60)
        me = psutil.Process()
        print([t.name for t in threading.enumerate()], me.children(), me.net_connections())
        x = torch.ones(2, device="ltc") + 1
        print([t.name for t in threading.enumerate()])
        ltc.mark_step()
        print(len(threading.enumerate()) <= 2)
        """,
        prelude="",
        PYTHONUNBUFFERED="1",  # so that it starts from nothing
    )
    lines = out.splitlines()
    assert lines == ["[]", "True", "['MainThread'] [] []", "['MainThread']", "True"] and err == ""


@pytest.mark.skipif(not os.path.exists("/proc"), reason="counts file descriptors in /proc")
def test_files_and_threads_do_not_pile_up() -> None:
    """Five hundred steps leave what ten leave."""
    device = ltc.lazy_device()

    def held_after(count: int) -> tuple[int, int]:
        for _ in range(count):
            x = torch.rand(4, device=device).sum()
            ltc.add_step_closure(lambda t: t.item(), (x,), run_async=True)
            ltc.mark_step()
        ltc.mark_step(wait=True)
        return len(os.listdir("/proc/self/fd")), threading.active_count()

    assert held_after(10) == held_after(500)


@pytest.mark.parametrize(("end", "code"), [("", 1), ("sys.exit(0)", 1), ("raise KeyError(1)", 1)])
def test_an_error_that_nobody_has_seen_is_the_exit_code(
    end: str, code: int, tmp_path: Path
) -> None:
    """In a process of its own from its first line on: the code is decided after the last exit handler."""
    script = tmp_path / "script.py"
    script.write_text(
        "import atexit, sys\n"
        "atexit.register(lambda: print('last'))\n"
        "import torch\n"
        "import ltc_core as ltc\n"
        "x = torch.ones(3, device=ltc.lazy_device())\n"
        "y = x[torch.tensor([9], device=x.device)]\n"
        "ltc.mark_step()\n"
        "z = x[torch.tensor([8], device=x.device)]\n"
        "ltc.mark_step()\n" + end
    )
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (code, "last\n")
    told = "an error was not seen before the end: aten.index.Tensor failed"
    assert done.stderr.count(told) == 2


@pytest.mark.parametrize("is_raised", [True, False])
def test_steps_that_fail_alike_are_told_once(is_raised: bool, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "import torch\n"
        "import ltc_core as ltc\n"
        "x = torch.ones(3, device=ltc.lazy_device())\n"
        "failed = []\n"
        "for _ in range(2):\n"
        "    failed.append(x[torch.tensor([9], device=x.device)])\n"
        "    ltc.mark_step()\n"
        "    failed.append(x * 2)\n"
        "    ltc.mark_step()\n" + ("failed[0].cpu()\n" if is_raised else "")
    )
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, timeout=60)
    assert done.returncode == 1
    assert done.stderr.count("aten.index.Tensor failed while its graph ran") == 1
    assert ("Traceback" in done.stderr) is is_raised
