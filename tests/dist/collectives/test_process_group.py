"""How processes wait for each other's collectives, and that each device's are told apart."""

import datetime
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch.distributed

from ltc_core.errors import CollectiveError
from ltc_core.graph.collective import Route
from ltc_dist.collectives import transport
from ltc_dist.collectives.transport import Line
from tests import prepared
from tests.launching import Job

SCRIPT = Path(__file__).parent / "two_devices.py"


class Work:
    """An op of GPUs that is done at the `looks`-th look; a wait with a time before that aborts it, as NCCL does."""

    def __init__(self, looks: int, error: str = "") -> None:
        self.looks, self.error, self.was_waited_for = looks, error, False

    def is_completed(self) -> bool:
        self.looks -= 1
        return self.looks <= 0

    def wait(self, timeout: datetime.timedelta | None = None) -> bool:
        if timeout is None:  # orders streams, and raises nothing
            return True
        if self.looks > 0:
            self.error = "the communicator was aborted"
        self.was_waited_for = True
        if self.error:
            raise RuntimeError(self.error)
        return True


@pytest.fixture
def store() -> Any:
    return torch.distributed.HashStore()


@pytest.fixture
def line(store: Any, monkeypatch: pytest.MonkeyPatch) -> Line:
    """That of one of two processes; the other is late."""
    monkeypatch.setattr(transport, "LOOK_S", 0.005)
    return Line("0,1", (0, 1), 0, store, None)


def begun(line: Line, plan: str = "all_reduce of x") -> Any:
    line._known.add(plan)  # both have run it before
    return line.begin(plan, Route("0,1", 0, "train.py:7"))[0]


def test_a_late_process_does_not_abort_the_communicator_of_gpus(
    line: Line, store: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(transport, "is_on_gpus", lambda: True)
    told: list[bytes] = []

    class Late(Work):
        def is_completed(self) -> bool:
            if store.check(["at/0,1/0"]):
                told.append(store.get("at/0,1/0"))
            return super().is_completed()

    late = Late(looks=50)
    line.wait(late, begun(line))
    assert late.was_waited_for and set(told) == {b"1\n0\ntrain.py:7\nall_reduce of x"}
    with pytest.raises(RuntimeError, match="a GPU fell off the bus"):
        line.wait(Work(looks=3, error="a GPU fell off the bus"), begun(line))


def test_what_a_late_process_told_does_not_outlive_its_wait(line: Line, store: Any) -> None:
    class Slow(Work):
        def wait(self, timeout: datetime.timedelta | None = None) -> bool:
            if not self.is_completed():
                raise RuntimeError("Operation timed out!")
            return True

    slow = Slow(looks=5)
    line.wait(slow, begun(line))
    assert slow.looks <= 0 and store.get("at/0,1/0") == b""
    other = Line("0,1", (0, 1), 1, store, None)
    for _ in range(10):
        call = begun(other)
    store.set("at/0,1/0", "1\n0\n\nall_reduce of y")  # told long ago
    other.wait(Slow(looks=3), call)


def test_a_process_that_is_elsewhere_is_named_with_its_line(line: Line, store: Any) -> None:
    store.set("at/0,1/1", "1\n0\neval.py:9\nbroadcast from 0 of float32[2]")

    class Never(Work):
        def wait(self, timeout: datetime.timedelta | None = None) -> bool:
            raise RuntimeError("Operation timed out!")

    with pytest.raises(CollectiveError, match="rank 0 and rank 1 are at different") as raised:
        line.wait(Never(looks=1000), begun(line))
    assert "train.py:7" in str(raised.value) and "eval.py:9" in str(raised.value)


def test_what_is_done_just_after_the_time_is_up_has_not_failed(line: Line) -> None:
    class JustDone(Work):
        def wait(self, timeout: datetime.timedelta | None = None) -> bool:
            if timeout is not None:
                raise RuntimeError("Operation timed out!")
            self.was_waited_for = True
            return True

    work = JustDone(looks=1)
    line.wait(work, begun(line))
    assert work.was_waited_for


def run_two_devices(*arguments: str) -> tuple[list[int], list[str]]:
    """Exit codes and outputs of two processes with two devices each."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    same = {"WORLD_SIZE": 2, "LOCAL_WORLD_SIZE": 2, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    more = {"LTC_NUM_DEVICES": 2, "OMP_NUM_THREADS": 1, "PYTHONPATH": SCRIPT.parents[2]}
    processes = [
        prepared.start(
            [sys.executable, str(SCRIPT), *arguments],
            env={
                **os.environ,
                **{k: str(v) for k, v in (same | more | {"RANK": r, "LOCAL_RANK": r}).items()},
            },
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for r in range(2)
    ]
    try:
        said = [process.communicate(timeout=200)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.communicate()
    return [process.returncode for process in processes], said


@pytest.mark.dist
def test_two_devices_in_each_of_two_processes() -> None:
    codes, said = run_two_devices()
    assert codes == [0, 0], said


@pytest.mark.dist
def test_devices_that_reduce_in_another_order() -> None:
    codes, said = run_two_devices("in_another_order")
    assert codes == [1, 1], said
    for text in said:
        assert [line for line in text.splitlines() if line.startswith("[")] == ["[0, 0]"] * 3
        assert "are at different collectives" in text
        assert "on device 0" in text and "on device 1" in text


def test_no_thread_of_gloo_is_left_when_a_process_ends(tmp_path: Path) -> None:
    """One that frees tensors while the interpreter ends would abort the process."""
    (tmp_path / "train.py").write_text("""
import atexit, os, pathlib, time

def tell(text):
    os.write(1, f"{text}\\n".encode())  # at once: the other process writes there, too

def count_threads():
    found = 0
    for path in pathlib.Path("/proc/self/task").glob("*/comm"):
        try:
            found += "gloo" in path.read_text()
        except OSError:  # it has ended meanwhile
            pass
    return found

def tell_threads():
    # The kernel lists a thread for a moment after it has been joined.
    until = time.monotonic() + 5
    while count_threads() and time.monotonic() < until:
        time.sleep(0.01)
    tell(f"gloo {count_threads()}")

atexit.register(tell_threads)  # before ltc registers its own: it runs after those
import torch
import ltc_dist

x = ltc_dist.all_reduce("sum", torch.ones(3, device="ltc"))
tell(f"sum {x.sum().item()}")
""")
    start = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    job = Job(
        [sys.executable, *start, "--log-dir", str(tmp_path), "train.py"],
        tmp_path,
        TORCH_DEVICE_BACKEND_AUTOLOAD="0",
    )
    code, out, err = job.end()
    assert code == 0, err
    assert sorted(out.split("\n")) == ["", "gloo 0", "gloo 0", "sum 6.0", "sum 6.0"]
