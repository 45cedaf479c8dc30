"""Processes whose devices are joined: programs contain the collectives of all of them."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.jax.joined import BATCHES, net, step

ROOT = Path(__file__).parents[2]


GRAPH = {"LTC_COLLECTIVES": "graph"}  # on a CPU they run on the host otherwise


def start(command: list[str], environment: dict[str, str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *command],
        env={**os.environ, **environment},
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=150,
    )


def case(
    name: str, count: int, path: Path, is_launched: bool = False, **environment: str
) -> list[tuple[Any, dict[str, int]]]:
    """What each process of a case in `joined` found, and its counters."""
    environment = {**GRAPH, **environment}
    if is_launched:
        command = ["-m", "ltc_launch", "--nprocs", str(count), "tests/jax/joined.py"]
        done = start([*command, name, str(path / name)], environment)
    else:
        done = start(["-m", "tests.jax.joined", name, str(count), str(path / name)], environment)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "Gloo" not in done.stdout
    assert done.stderr == ""
    return [torch.load(f"{path / name}.{rank}", weights_only=False) for rank in range(count)]


def failure(name: str, path: Path) -> str:
    begun = time.monotonic()
    done = start(["-m", "tests.jax.joined", name, "2", str(path / name)], GRAPH)
    assert done.returncode != 0
    assert time.monotonic() - begun < 100
    return done.stderr


def on_joined_batches() -> list[torch.Tensor]:
    eager = net()
    optimizer = torch.optim.AdamW(eager.parameters(), lr=0.05)
    for k, batch in enumerate(BATCHES):
        optimizer.param_groups[0]["lr"] = 0.05 / (k + 1)
        step(eager, optimizer, batch)
        optimizer.step()
    return [p.detach() for p in eager.parameters()]


@pytest.mark.parametrize(("count", "is_launched"), [(2, False), (4, False), (2, True)])
def test_processes_train_as_eager_does_on_the_joined_batch(
    count: int, is_launched: bool, tmp_path: Path
) -> None:
    wanted = on_joined_batches()
    for found, counted in case("train", count, tmp_path, is_launched):
        assert (counted["JointRun"], counted["ProgramsDiffer"]) == (6, 0)
        for own, other in zip(found, wanted, strict=False):
            torch.testing.assert_close(own, other, rtol=1e-5, atol=1e-5)


def test_programs_are_kept_on_disk(tmp_path: Path) -> None:
    """All processes load a program, or all compile it."""
    cache = {"LTC_COMPILED_CACHE_DIR": str(tmp_path / "cache")}
    first = case("train", 2, tmp_path, **cache)
    again = case("train", 2, tmp_path, **cache)
    apart = case("elsewhere", 2, tmp_path, **cache)
    for (wanted, of_first), (found, of_again), (last, _) in zip(first, again, apart, strict=True):
        assert of_first["PersistentCacheHit"] == 0 < of_first["PersistentCacheMiss"]
        assert of_again["PersistentCacheHit"] == of_first["PersistentCacheMiss"]
        assert of_again["PersistentCacheMiss"] == 0
        for one, other, third in zip(wanted, found, last, strict=True):
            assert torch.equal(one, other) and torch.equal(one, third)
    (_, of_0), (_, of_1) = apart
    assert of_0["PersistentCacheHit"] > 0 == of_1["PersistentCacheHit"]


@pytest.mark.parametrize("count", [2, 4])
def test_each_collective_is_that_of_the_host(count: int, tmp_path: Path) -> None:
    joined = case("ops", count, tmp_path)
    on_host = case("ops", count, tmp_path, LTC_COLLECTIVES="host")
    for (found, counted), (wanted, none) in zip(joined, on_host, strict=True):
        assert counted["JointRun"] == 7
        assert none["JointRun"] == 0
        for name, values in wanted.items():
            # A product of four bfloat16 is rounded three times, in another order.
            rtol = 1e-2 if name == "torch.bfloat16" else 0.0
            for own, other in zip(found[name], values, strict=True):
                torch.testing.assert_close(own, other, rtol=rtol, atol=0.0)


def test_smaller_groups_reduce_on_the_host(tmp_path: Path) -> None:
    for rank, ((half, whole), counted) in enumerate(case("groups", 4, tmp_path)):
        assert half.tolist() == [3.0 if rank < 2 else 7.0] * 4
        assert whole.tolist() == [40.0] * 4
        assert counted["JointRun"] == 1


def test_where_programs_differ_the_collectives_run_on_the_host(tmp_path: Path) -> None:
    for (*found, summary), counted in case("unlike", 2, tmp_path):
        expected = [
            [8.0, 14.0],
            [14.0, 20.0],
            [20.0, 26.0],
            [2.0, 2.0, 3.0, 3.0],
            [2.0, 2.0, 3.0, 3.0],
        ]
        assert [t.tolist() for t in found] == expected
        assert (counted["JointRun"], counted["ProgramsDiffer"]) == (0, 4)
        assert "the programs of the processes differ beside them, such as that of" in summary
        assert "joined.py" in summary
        assert "the processes run programs with different collectives" in summary


def test_different_collectives_are_an_error_that_names_ranks_and_lines(tmp_path: Path) -> None:
    told = failure("others", tmp_path)
    assert re.search("rank [01] and rank [01] are at different collectives", told)
    assert "rank 0: all_reduce max of a tensor: float32[4]" in told
    assert "rank 1: all_gather along dim 0 of float32[4]" in told
    assert "recorded at tests/jax/joined.py:" in told


def test_a_process_that_ends_too_early_is_named(tmp_path: Path) -> None:
    told = failure("late", tmp_path)
    assert "PeerEndedError" in told
    assert "rank 0 has ended while rank 1 waits for it" in told


def test_a_process_that_ends_within_a_program_is_an_error(tmp_path: Path) -> None:
    failure("killed", tmp_path)
    (told,), _ = torch.load(tmp_path / "killed.0", weights_only=False)
    assert "a program with collectives did not run to its end" in told
    assert "Next: see which process ended first, and why" in told


def test_a_process_outlives_rank_0(tmp_path: Path) -> None:
    for found, counted in case("outlive", 2, tmp_path):
        assert found.tolist() == [4.0] * 4
        assert counted["JointRun"] == 1


def test_a_process_that_waits_for_others_before_it_has_a_device_is_not_joined(
    tmp_path: Path,
) -> None:
    for (found, summary), counted in case("absent", 2, tmp_path):
        assert found.tolist() == [2.0] * 4
        assert counted["JointRun"] == 0
        assert "rank 1 did not make its device within 20 s" in summary
        assert "they run on the host, through gloo, between two programs" in summary


def test_a_loader_forks_workers_in_joined_processes(tmp_path: Path) -> None:
    for found, counted in case("workers", 2, tmp_path):
        assert found.item() == 6 * 4 + 22 * 2
        assert counted["JointRun"] == 1


def test_results_of_joint_programs_are_freed(tmp_path: Path) -> None:
    for kept, counted in case("repeat", 2, tmp_path):
        assert counted["JointRun"] == 30
        assert kept[-1] <= kept[5]
