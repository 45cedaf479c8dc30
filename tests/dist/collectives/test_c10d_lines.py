"""Collectives of torch.distributed on tensors of the device: who is at another one, does not come, or has ended."""

import re
import signal
import sys
from pathlib import Path

import pytest

from tests.launching import Job, launcher

pytestmark = pytest.mark.dist

# Both ranks have run `known` before, so that it is not compared again before it runs.
SCRIPT = """
import sys, time, torch, torch.distributed as dist
import ltc_dist as ltd
from torch.distributed import _functional_collectives as functional

def run(index):
    dist.init_process_group()
    rank, device = dist.get_rank(), ltd.lazy_device()
    known = torch.ones(4, device=device)
    longer = torch.ones(400, device=device)
    for _ in range(2):
        dist.all_reduce(known)
        dist.all_reduce(longer)
        dist.broadcast(known, 0)
    CASE

if __name__ == "__main__":
    ltd.spawn(run, nprocs=2)
"""
DIFFERENT = "are at different collectives"
CASES = {
    "ops": (
        "x = torch.ones(8, device=device); dist.broadcast(x, 0) if rank else dist.reduce(x, 0)",
        (
            DIFFERENT,
            "rank 0: torch.distributed's reduce sum with root 0 of float32[8]; number 7, recorded at train.py:15",
            "rank 1: torch.distributed's broadcast with root 0 of float32[8]; number 7",
        ),
    ),
    "known ops": (
        "dist.all_reduce(known) if rank else dist.broadcast(known, 0)",
        (DIFFERENT, "rank 1: torch.distributed's allreduce sum of float32[4]; number 7"),
    ),
    "known sizes": (
        "dist.all_reduce(longer if rank else known)",
        (DIFFERENT, "rank 0: torch.distributed's allreduce sum of float32[4]", "float32[400]"),
    ),
    "reductions": (
        "dist.all_reduce(known, dist.ReduceOp.MAX if rank else dist.ReduceOp.SUM)",
        (DIFFERENT, "rank 0: torch.distributed's allreduce sum of", "allreduce max of float32[4]"),
    ),
    "shapes": (
        "dist.all_reduce(torch.ones(5 + rank, device=device))",
        (
            DIFFERENT,
            "rank 0: torch.distributed's allreduce sum of float32[5]",
            "allreduce sum of float32[6]",
        ),
    ),
    "dtypes": (
        "dist.all_reduce(known if rank else known.double())",
        (DIFFERENT, "rank 0: torch.distributed's allreduce sum of float64[4]"),
    ),
    "roots": (
        "dist.broadcast(torch.ones(3, device=device), rank)",
        (DIFFERENT, "broadcast with root 1 of float32[3]"),
    ),
    "functional": (
        "functional.all_reduce(torch.ones(5 + rank, device=device), 'sum', dist.group.WORLD)",
        (DIFFERENT, "rank 0: all_reduce sum of a tensor: float32[5]", "recorded at train.py:15"),
    ),
    "late": (
        "time.sleep(100 * rank); dist.all_reduce(known)",
        (
            "one of the others did not come within 3 s",
            "rank 0 is at torch.distributed's allreduce sum of float32[4]",
        ),
    ),
    "ended": (
        "rank or dist.all_reduce(known)",
        (
            "rank 1 has ended while rank 0 waits",
            "after rank 1 ended with exit code 0 while others waited",
        ),
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_what_is_told(case: str, tmp_path: Path) -> None:
    code, words = CASES[case]
    (tmp_path / "train.py").write_text(SCRIPT.replace("CASE", code))
    environ = {"LTC_COLLECTIVE_TIMEOUT_S": "3", "LTC_COMPILE": "off"}
    job = Job([sys.executable, str(tmp_path / "train.py")], tmp_path, **environ)
    exit_code, _, err = job.end()
    assert exit_code == 1 and all(word in err for word in words), err


ALONE = """
import os, sys, torch, torch.distributed as dist
from ltc_core.device.register import hold_gloo_threads
import ltc_core

hold_gloo_threads(0.2)
rank = int(sys.argv[1])
dist.init_process_group("gloo", init_method=f"file://{sys.argv[2]}", rank=rank, world_size=2)
dist.all_reduce(torch.ones(400 if rank else 4))
"""


def test_nobody_who_finds_out_why(tmp_path: Path) -> None:
    """Collectives of the CPU are not compared: gloo ends the process, as without this runtime."""
    script = tmp_path / "train.py"
    script.write_text(ALONE)
    command = [sys.executable, str(script)]
    jobs = [Job([*command, str(rank), str(tmp_path / "store")], tmp_path) for rank in range(2)]
    ends = [job.end() for job in jobs]
    assert any(code == -signal.SIGABRT and "preamble.length" in err for code, _, err in ends), ends


RIGHT = """
import sys, time, torch, torch.distributed as dist
import ltc_core as ltc

dist.init_process_group()
rank, device = dist.get_rank(), ltc.lazy_device()
x = torch.ones(4, device=device)
halves = [dist.new_group([0, 1]), dist.new_group([1, 2])]
for k, half in enumerate(halves):  # rank 1 is in both
    if rank in (k, k + 1):
        dist.all_reduce(x, group=half)
if rank == 0:
    dist.send(x, 1)  # sending is of two processes, and has no number
elif rank == 1:
    dist.recv(x, 0)
into = torch.empty(3 + 3 * rank, device=device)
dist.all_to_all_single(into, torch.ones(6, device=device), [1 + rank] * 3, [1, 2, 3])
parts = [torch.empty(4, device=device) for _ in range(3)] if rank == 0 else None
if rank == 2:
    time.sleep(2)  # rank 1 has done its part by now, and has ended
dist.gather(x, parts, 0)
if rank == 0:
    print("gathered", [t[0].item() for t in parts])
"""


def test_members_that_have_done_their_parts_may_end(tmp_path: Path) -> None:
    """Groups that overlap, messages of two processes, parts of several sizes are no mistakes either."""
    (tmp_path / "train.py").write_text(RIGHT)
    job = Job([*launcher("--nprocs", "3"), str(tmp_path / "train.py")], tmp_path)
    code, out, err = job.end()
    assert code == 0, err
    assert re.search(r"gathered \[2.0, 2.0, 3.0\]", out), out
