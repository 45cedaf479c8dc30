"""Faults of checkpoints in a job of two: what was saved before is never lost, and a job that goes on ends the same."""

import os
import re
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from tests.faults.test_processes import TRAINING, TWO, expected, final, launcher, undisturbed
from tests.launching import Job

pytestmark = pytest.mark.dist
__all__ = ["expected", "undisturbed"]  # fixtures


# Steps between checkpoints; for each attempt the rank that is killed, at the third call where, and the checkpoint that
# the next attempt begins at.
ATTEMPTS = [
    (2, [
        (0, "write_part", 2),  # which rank 0 calls twice for each: in 4
        (1, "write_part", 6),  # in 8
        (0, "write_manifest", 10),  # in 12
    ]),
    (1, [
        (0, "publish", 2),  # in 3
        (0, "point_latest", 5),
        (0, "prune", 8),
    ]),
]  # fmt: skip


@pytest.mark.parametrize(("every", "attempts"), ATTEMPTS, ids=["writing", "publishing"])
def test_row_18_killed_while_it_saves(
    every: int, attempts: list[tuple[int, str, int]], tmp_path: Path, expected: str
) -> None:
    again = launcher("--nprocs", "2", "--max-restarts", str(len(attempts)))
    faults = ",".join(f"commit@{rank}:{site}" for rank, site, _ in attempts)
    options = ["runs", "--every", str(every), "--fault", faults]
    code, out, err = Job([*again, TRAINING, *options], tmp_path).end(is_killed=True)
    assert code == 0, err
    assert re.findall(r"resumed at (\d+)\n", out) == [str(newest) for *_, newest in attempts]
    assert final(out) == expected
    assert sorted(p.name for p in (tmp_path / "runs").glob("step_*")) == [
        f"step_{12 - back * every:09}" for back in (2, 1, 0)
    ]


@pytest.fixture(scope="module")
def run_of_nine_steps(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Checkpoints of steps 3, 6 and 9 by two processes."""
    place = tmp_path_factory.mktemp("nine")
    code, _, err = Job([*TWO, TRAINING, "runs", "--steps", "9"], place).end()
    assert code == 0, err
    return place / "runs"


@pytest.fixture
def runs(run_of_nine_steps: Path, tmp_path: Path) -> Path:
    return shutil.copytree(run_of_nine_steps, tmp_path / "runs", symlinks=True)


def test_rows_20_and_21_the_newest_is_damaged(runs: Path, tmp_path: Path, expected: str) -> None:
    os.truncate(runs / "step_000000009" / "shared" / "t_00002.safetensors", 30)
    damaged = next((runs / "step_000000006" / "rank_00001").glob("t_00000*"))
    data = bytearray(damaged.read_bytes())
    data[-1] ^= 4
    damaged.write_bytes(data)
    code, out, err = Job([*TWO, TRAINING, "runs"], tmp_path).end()
    assert code == 0 and "resumed at 3" in out, err
    told = err + out
    assert re.search(
        r"step_000000009: shared/t_00002.safetensors: 30 of \d+ bytes; using step_000000003", told
    )
    assert re.search(
        r"step_000000006: rank_00001/t_00000.safetensors: .* not what was written; using", told
    )
    assert final(out) == expected


def test_row_21_none_is_whole(runs: Path, tmp_path: Path) -> None:
    for manifest in runs.glob("*/manifest.json"):
        manifest.unlink()
    code, _, err = Job([*TWO, TRAINING, "runs"], tmp_path).end()
    assert code == 65
    assert "is whole" in err and "manifest.json is missing" in err


@pytest.mark.usefixtures("runs")
def test_row_23_another_number_of_processes(tmp_path: Path, expected: str) -> None:
    """One process goes on with the whole batch: the same parameters come of it, but for rounding."""
    code, out, err = Job([*launcher(), TRAINING, "runs"], tmp_path).end()
    assert code == 0 and "resumed at 9" in out, err
    assert float(final(out).split()[-1]) == pytest.approx(float(expected.split()[-1]), rel=1e-5)


def test_row_24_a_directory_that_cannot_be_written(tmp_path: Path) -> None:
    code, out, err = Job([*TWO, TRAINING, "/dev/null/runs", "--slow", "0.01"], tmp_path).end()
    assert code == 74 and "step 1" not in out
    assert re.search(r"rank 0: .*Not a directory.*, rank 1: .*Not a directory", err)


def test_row_19_the_disk_is_full(tmp_path: Path) -> None:
    """The disk is a file system of 300 kB in a namespace of its own."""
    disk = tmp_path / "disk"
    disk.mkdir()
    probe = f"mount -t tmpfs -o size=300k none {disk}"
    unshare = shutil.which("unshare")
    if not unshare or subprocess.run([unshare, "-rm", "sh", "-c", probe]).returncode:
        pytest.skip("no file systems can be mounted here")
    command = f"{probe} && {' '.join([*TWO, TRAINING, str(disk / 'runs'), '--every', '1', '--fill'])}; code=$?; "
    job = Job([unshare, "-rm", "sh", "-c", f"{command} ls {disk}/runs; exit $code"], tmp_path)
    code, out, err = job.end()
    assert code == 74, err
    assert "No space left on device while writing" in err and "free " in err
    assert "step_000000001\n" in out and ".tmp-" not in out


PRIVATE = """
    import os, torch
    import ltc_dist as ltd
    from ltc_core.errors import CheckpointError
    from ltc_core.serialization import directory
    from ltc_dist.checkpoint import commit

    class Shard:
        def __init__(self, count): self.state = torch.zeros(count)
        def state_dict(self): return {"x": self.state}
        def load_state_dict(self, state): self.state = state["x"]

    commit._SEEN_WITHIN_S = 0.3
    rank, model = ltd.get_ordinal(), torch.nn.Linear(2, 2)
    try:
        ltd.Checkpointer(f"own{rank}", model=model)
    except CheckpointError as error:
        print(f"begin {rank}: {error}", flush=True)
    shard = Shard(1000 + rank)
    saver = ltd.Checkpointer("runs", own=["shard"], model=model, shard=shard)
    saver.save(1)
    saver.wait()
    there = saver.directory
    if rank:
        saver.directory = os.path.realpath("own1")  # as when a mount has gone
    try:
        saver.save(2)
        saver.wait()
    except CheckpointError as error:
        print(f"save {rank}: {error}", flush=True)
    saver.directory = there
    sizes, real = [], directory.read_tensor
    def counted(folder, entry):
        sizes.append(entry.shape[0])
        return real(folder, entry)
    directory.read_tensor = counted
    assert saver.restore().step == 1
    print(f"read {rank}: {sorted(size for size in sizes if 1000 <= size < 2000)}", flush=True)
    saver.save(3)
    saver.close()
"""


def test_a_directory_that_is_not_shared_is_told_by_all(tmp_path: Path) -> None:
    """Two processes see directories of their own, from the beginning or from the second checkpoint on."""
    script = tmp_path / "private.py"
    script.write_text(textwrap.dedent(PRIVATE))
    code, out, err = Job([*TWO, str(script)], tmp_path).end()
    assert code == 0, err
    for rank in (0, 1):
        begin = rf"begin {rank}: checkpoints would not be whole in .*own{rank}\n(.*\n)?.*does not see what rank"
        assert re.search(begin, out), out
        assert re.search(rf"save {rank}: .*runs is not shared: rank 0 does not see", out), out
        assert f"read {rank}: [{1000 + rank}]" in out
    assert re.search(
        r"got: rank_00001: missing\n.*Next: give a directory that all hosts share", out
    )
    assert sorted(p.name for p in (tmp_path / "runs").glob("step_*")) == [
        "step_000000001", "step_000000003",
    ]  # fmt: skip
    assert not list((tmp_path / "own1").glob("*tmp*"))


LAST = """
    import sys, errno, torch
    import ltc_dist as ltd
    from ltc_dist.checkpoint import commit

    def train(rank):
        model = torch.nn.Linear(2, 2)
        saver = ltd.Checkpointer("runs", model=model)
        saver.save(1)
        saver.wait()
        def full(*args):
            raise OSError(errno.ENOSPC, "No space left on device")
        commit.write_manifest = full
        saver.save(2)  # in the background: nobody waits for it
        print("trained", flush=True)
        {end}

    if __name__ == "__main__":
        {start}
"""


@pytest.mark.parametrize("end", ["pass", "sys.exit(0)"])
@pytest.mark.parametrize("how", ["python", "launcher", "spawn"])
def test_a_last_checkpoint_that_is_not_written_is_a_failure(
    how: str, end: str, tmp_path: Path
) -> None:
    start = "ltd.spawn(train, nprocs=2)" if how == "spawn" else "train(ltd.get_ordinal())"
    script = tmp_path / "train.py"
    script.write_text(textwrap.dedent(LAST.format(start=start, end=end)))
    command = [*TWO, "train.py"] if how == "launcher" else [sys.executable, "train.py"]
    code, out, err = Job(command, tmp_path).end()
    assert code == (1 if how == "spawn" else 74), err
    assert "trained" in out and "No space left on device" in err
    assert "the last checkpoint is missing" in err


SLOW = """
    import time, torch
    import ltc_dist as ltd
    from ltc_core.serialization import tensor_file

    device, rank = ltd.lazy_device(), ltd.get_ordinal()
    ltd.all_reduce("sum", torch.ones(2, device=device)).tolist()
    saver = ltd.Checkpointer("runs", model=torch.nn.Linear(2, 2), background=False)
    if rank == 0:  # a disk that takes 6 s for two tensors
        real = tensor_file._chunks
        def slow(tensor):
            for chunk in real(tensor):
                for _ in range(10):
                    time.sleep(0.3)
                    yield chunk[:0]
                yield chunk
        tensor_file._chunks = slow
    saver.save(1)
    print("sum", ltd.all_reduce("sum", torch.ones(2, device=device) + rank).tolist(), flush=True)
    ltd.rendezvous("after")
"""


def test_a_checkpoint_that_takes_longer_than_the_timeout_ends_no_job(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(textwrap.dedent(SLOW))
    job = Job([*TWO, "train.py"], tmp_path, LTC_COLLECTIVE_TIMEOUT_S="2")
    code, out, err = job.end()
    assert code == 0, err
    assert [line[4:] for line in sorted(out.splitlines())] == ["sum [3.0, 3.0]"] * 2
