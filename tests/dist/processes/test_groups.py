"""What a failed process has started ends with it; who ended with code 0 in the middle is named, by both parents."""

import os
import re
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import psutil
import pytest

from ltc_dist.processes.groups import end_groups
from tests.launching import Job, launcher

pytestmark = pytest.mark.dist

# `work(rank)` is the body of each process, under the launcher and under `spawn`.
PROGRAM = """
import os, signal, subprocess, sys, time
import torch
import ltc_dist as ltd

def sleeper(ignores):
    code = "import signal, sys, time; "
    code += "signal.signal(signal.SIGTERM, signal.SIG_IGN); " if ignores else ""
    code += "print('asleep', flush=True); time.sleep(600)"
    found = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE)
    found.stdout.readline()

def work(rank):
BODY

if __name__ == "__main__":
    if "RANK" in os.environ:
        work(int(os.environ["RANK"]))
    else:
        ltd.spawn(work, nprocs=2, start_method=sys.argv[1])
"""
HOW = ["launcher", "spawn", "fork", "forkserver"]


def job(how: str, body: str, tmp_path: Path, **environ: str) -> Job:
    code = PROGRAM.replace("BODY", textwrap.indent(textwrap.dedent(body).strip(), "    "))
    (tmp_path / "train.py").write_text(code)
    begin = launcher("--nprocs", "2") if how == "launcher" else [sys.executable]
    return Job([*begin, "train.py", how], tmp_path, **environ)


@pytest.mark.parametrize(
    "end", ["os.kill(os.getpid(), signal.SIGKILL)", "raise LookupError", "sys.exit(3)"]
)
@pytest.mark.parametrize("how", HOW)
def test_what_a_failed_process_has_started_ends_with_it(how: str, end: str, tmp_path: Path) -> None:
    """Also what ignores SIGTERM, and what was started by the other processes. `Job.end` looks for what is left."""
    body = f"""
        sleeper(ignores=rank == 0)
        ltd.rendezvous("asleep")
        if rank == 1:
            {end}
        time.sleep(600)
    """
    code, _, err = job(how, body, tmp_path).end()
    assert code != 0, err
    assert re.search(r"rank 1 \(pid \d+\)", err), err


@pytest.mark.parametrize("how", ["launcher", "spawn"])
def test_what_a_process_that_is_done_has_started_goes_on(how: str, tmp_path: Path) -> None:
    body = """
        child = subprocess.Popen(["sleep", "600"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        print("child", child.pid, flush=True)
    """
    running = job(how, body, tmp_path)
    out, err = running.process.communicate(timeout=100)
    assert running.process.returncode == 0, err
    pids = [int(found) for found in re.findall(rb"child (\d+)", out)]
    assert len(pids) == 2
    for pid in pids:
        assert psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
        os.kill(pid, signal.SIGKILL)


WAITS = {
    "a rendezvous": "leave(); ltd.rendezvous('never')",
    "gloo": "torch.distributed.init_process_group('gloo'); torch.distributed.barrier(); leave(); "
    "torch.distributed.barrier()",
    "the second collective": "x = torch.ones(2, device=ltd.lazy_device()); "
    "ltd.all_reduce('sum', x).tolist(); leave(); ltd.all_reduce('sum', x).tolist()",
}


@pytest.mark.parametrize("wait", WAITS)
@pytest.mark.parametrize("how", HOW)
def test_who_exits_with_code_0_while_others_wait_is_named(
    how: str, wait: str, tmp_path: Path
) -> None:
    body = f"""
        leave = lambda: rank == 1 and os._exit(0)
        {WAITS[wait]}
    """
    code, _, err = job(how, body, tmp_path).end()
    assert code == 1
    assert re.search(r"rank 1 \(pid \d+\) ended with exit code 0 before its script did", err), err
    assert err.count("rank 1 (pid") == 1 and "reset by peer" not in err.splitlines()[-1]


@pytest.mark.parametrize("how", ["launcher", "spawn"])
def test_os_exit_0_that_nobody_waits_for_is_no_failure(how: str, tmp_path: Path) -> None:
    code, _, err = job(how, "rank == 1 and os._exit(0)", tmp_path).end()
    assert code == 0 and err == ""


@pytest.mark.parametrize("how", HOW)
def test_a_failure_of_its_own_is_told_before_an_exit_with_code_0(how: str, tmp_path: Path) -> None:
    body = """
        if rank == 1:
            os._exit(0)
        raise LookupError("the cause")
    """
    code, _, err = job(how, body, tmp_path).end()
    assert code == 1 and "LookupError: the cause" in err and "before its script" not in err


CTRL_C = """
import os, sys, time
import ltc_dist.multiprocessing as xmp

def work(rank):
    print("ready", flush=True)
    time.sleep(600)

if __name__ == "__main__":
    xmp.spawn(work, nprocs=2, join=False)
    time.sleep(600)
"""


def test_ctrl_c_of_a_parent_that_has_not_joined(tmp_path: Path) -> None:
    """A terminal sends it to the group of the parent, in which the processes are not."""
    (tmp_path / "train.py").write_text(CTRL_C)
    running = Job([sys.executable, "train.py"], tmp_path)
    running.wait_for("ready", times=2)
    os.killpg(running.process.pid, signal.SIGINT)
    code, _, err = running.end()
    assert code == -signal.SIGINT and err.count("Traceback") == 1


def test_a_group_is_ended_gently_first() -> None:
    code = "import os, time; pid = os.fork(); print('here', flush=True); time.sleep(600 if pid == 0 else 0)"
    with subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, start_new_session=True
    ) as leader:
        assert leader.stdout is not None
        assert [leader.stdout.readline() for _ in range(2)] == [b"here\n"] * 2
        leader.wait()
        end_groups([leader.pid, os.getpgrp()], 20.0)
        assert leader.stdout.read() == b""  # its child, which had the other end, is gone
