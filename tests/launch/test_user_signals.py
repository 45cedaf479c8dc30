"""SIGUSR1 and SIGUSR2 to the launcher reach the scripts; stacks are shown by a signal of their own."""

import re
import signal
from pathlib import Path

import psutil
import pytest

from ltc_dist.processes import child
from tests.launching import Job, launcher, names_in

pytestmark = pytest.mark.dist

HANDLER = """
import os, signal, time
came = []
for number in (signal.SIGUSR1, signal.SIGUSR2):
    signal.signal(number, lambda number, frame: came.append(signal.Signals(number).name))
print("ready")
while len(came) < EXPECTED:
    time.sleep(0.01)
print(*came)
"""


@pytest.mark.parametrize("nprocs", ["1", "2"])
def test_both_signals_reach_the_scripts(nprocs: str, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(HANDLER.replace("EXPECTED", "2"))
    job = Job([*launcher("--nprocs", nprocs, "--prefix"), "train.py"], tmp_path)
    job.wait_for("ready", times=int(nprocs))
    job.process.send_signal(signal.SIGUSR1)
    job.process.send_signal(signal.SIGUSR2)
    code, out, err = job.end()
    assert code == 0 and err == ""
    words = [line.split() for line in out.splitlines()]
    assert {word[0] for word in words} == {f"[{k}]" for k in range(int(nprocs))}
    assert all(sorted(word[1:]) == ["SIGUSR1", "SIGUSR2"] for word in words)


def test_a_signal_before_the_scripts_run_is_kept_for_them(tmp_path: Path) -> None:
    """It comes when the launcher handles it, and imports PyTorch: no process runs yet."""
    (tmp_path / "train.py").write_text(HANDLER.replace("EXPECTED", "1"))
    job = Job([*launcher(), "train.py"], tmp_path)
    status = Path(f"/proc/{job.process.pid}/status")
    while not is_caught(status, signal.SIGUSR1):
        assert job.process.poll() is None
    job.process.send_signal(signal.SIGUSR1)
    job.wait_for("ready")
    job.process.send_signal(signal.SIGUSR1)
    code, out, err = job.end()
    assert code == 0 and out == "SIGUSR1\n"
    assert "most recent call first" in err  # the first one has come to the process


def is_caught(status: Path, number: int) -> bool:
    found = re.search(r"SigCgt:\s*(\w+)", status.read_text())
    return found is not None and bool(int(found[1], 16) >> (number - 1) & 1)


def test_stacks_beside_a_handler_of_the_script(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(HANDLER.replace("EXPECTED", "1"))
    job = Job([*launcher("--nprocs", "2"), "train.py"], tmp_path)
    job.wait_for("ready", times=2)
    for process in psutil.Process(job.process.pid).children():
        process.send_signal(child.STACKS)
    job.process.send_signal(signal.SIGUSR1)
    code, out, err = job.end()
    assert code == 0 and out.count("SIGUSR1") == 2
    for rank in range(2):
        assert re.search(rf"\[{rank}\]   File .*train.py\", line \d+ in", err), err


def test_without_a_handler_sigusr1_shows_the_stacks(tmp_path: Path) -> None:
    code = "import sys, time\nprint('ready')\nwhile True: time.sleep(0.01)\n"
    (tmp_path / "train.py").write_text(code)
    job = Job(launcher("train.py"), tmp_path)
    job.wait_for("ready")
    job.process.send_signal(signal.SIGUSR1)
    assert job.process.stderr is not None
    assert b"most recent call first" in job.process.stderr.readline()
    job.process.terminate()
    assert job.end()[0] == 143
    assert names_in(tmp_path / "tmp") == []
