"""Timelines of a job: each rank has a file, the last one to end merges them; loaders and collectives are in them."""

import json
import stat
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.core import child
from tests.core.test_timeline import check, lanes, named
from tests.launching import Job, launcher

pytestmark = pytest.mark.dist

TRAIN = """
import os, signal, sys, time
import torch
import ltc_dist as ltd

def train(rank, kills=False):
    device = ltd.lazy_device()
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 2).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    data = torch.utils.data.TensorDataset(torch.ones(12, 4))
    for epoch in range(2):
        for (x,) in ltd.MpDeviceLoader(torch.utils.data.DataLoader(data, 4), device):
            optimizer.zero_grad()
            model(x).square().mean().backward()
            ltd.optimizer_step(optimizer)
    ltd.wait_device_ops()
    if kills and rank == 1:
        time.sleep(1.2)
        os.kill(os.getpid(), signal.SIGKILL)
"""


def whole(path: Path) -> list[dict[str, Any]]:
    events = json.loads(path.read_text())
    check(events)
    return events  # type: ignore[no-any-return]


def check_job(directory: Path) -> None:
    path = directory / "run.json"
    assert sorted(p.name for p in directory.glob("run*")) == [
        "run.json",
        "run.rank0.json",
        "run.rank1.json",
    ]
    assert all(stat.S_IMODE(p.stat().st_mode) == 0o600 for p in directory.glob("run*"))
    events = whole(path)
    titles = {e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name"}
    assert sorted(title.partition(":")[0] for title in titles.values()) == ["rank 0", "rank 1"]
    for pid in titles:
        of_rank = [e for e in events if e["pid"] == pid]
        assert {"prefetch-read", "prefetch-upload-0", "collectives", "transfers"} <= lanes(of_rank)
        (*_, collective) = named(of_rank, "collective")
        assert collective["args"]["bytes"] > 0 and "all_reduce sum" in collective["args"]["plan"]
        assert {e["args"]["batch"] for e in named(of_rank, "upload a batch")} == {0, 1, 2}
        assert {e["args"]["batch"] for e in named(of_rank, "read a batch")} >= {0, 1, 2}
        names = [e["args"]["name"] for e in of_rank if e["name"] == "thread_name"]
        assert names.count("prefetch-upload-0") == 1  # in both epochs


def test_two_ranks_of_spawn_are_in_one_file(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(
        TRAIN + "\nif __name__ == '__main__':\n    ltd.spawn(train, nprocs=2)\n"
    )
    job = Job([sys.executable, "script.py"], tmp_path, LTC_TRACE=str(tmp_path / "run.json"))
    assert job.end() == (0, "", "")
    check_job(tmp_path)


def test_two_ranks_of_the_launcher_are_in_one_file(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(TRAIN + "\ntrain(int(os.environ['RANK']))\n")
    command = [*launcher("--nprocs", "2"), "script.py"]
    job = Job(command, tmp_path, LTC_TRACE=str(tmp_path / "run.json"))
    code, _, err = job.end()
    assert code == 0, err
    check_job(tmp_path)


def test_a_killed_rank_leaves_the_files_that_the_command_merges(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(TRAIN + "\ntrain(int(os.environ['RANK']), True)\n")
    command = [*launcher("--nprocs", "2"), "script.py"]
    Job(command, tmp_path, LTC_TRACE=str(tmp_path / "run.json")).end(is_killed=True)
    assert not (tmp_path / "run.json").exists()
    merging = f"""
        import runpy, sys
        sys.argv = ["timeline", "merge", {str(tmp_path / "run.json")!r}]
        runpy.run_module("ltc_core.timeline", run_name="__main__")
    """
    out, _ = child.run(merging, prelude="")
    assert "2 processes" in out
    check_job(tmp_path)
