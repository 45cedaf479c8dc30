"""torch.distributed on tensors of the device: collectives, groups, objects, DTensor, DistributedDataParallel."""

import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import ltc_core as ltc
import ltc_dist as ltd
from tests import prepared
from tests.dist import spawned


@pytest.mark.dist
def test_two_processes(tmp_path: Path) -> None:
    ltd.spawn(spawned.distributed, (str(tmp_path),), nprocs=2)
    found = [torch.load(tmp_path / f"{k}.pt") for k in range(2)]
    a, b = torch.arange(4.0), torch.arange(4.0) + 10
    for rank, got in enumerate(found):
        half = slice(2 * rank, 2 * rank + 2)
        mixed, kept = torch.cat([a[half], b[half]]), a
        expected = [a + b, b, a, b, torch.cat([a, b]), (a + b)[half], mixed, kept, (a, b)[rank]]
        assert all(map(torch.equal, got["tensors"], expected)), got["tensors"]
        assert got["on_cpu"].tolist() == [2, 2]
        assert got["objects"] == [{"rank": 0}, {"rank": 1}]

    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)
    data, target = torch.arange(64.0).reshape(16, 4) / 64, torch.arange(16.0).reshape(16, 1) / 16
    for _ in range(4):
        optimizer.zero_grad()
        torch.nn.functional.mse_loss(net(data), target).backward()
        optimizer.step()
    for first, second, alone in zip(
        found[0]["params"], found[1]["params"], net.parameters(), strict=True
    ):
        assert torch.equal(first, second)
        torch.testing.assert_close(first, alone.detach(), rtol=1e-4, atol=1e-5)


@pytest.mark.dist
def test_distributed_checkpoints(tmp_path: Path) -> None:
    ltd.spawn(spawned.distributed_checkpoint, (str(tmp_path / "checkpoint"),), nprocs=2)
    assert (tmp_path / "checkpoint" / ".metadata").exists()


SCRIPT = Path(__file__).parents[2] / "dist" / "c10d_calls.py"


def start(rank: int, size: int, port: int, *args: str) -> Any:
    variables = {"RANK": rank, "WORLD_SIZE": size, "LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": size}
    more = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "GLOO_SOCKET_IFNAME": "lo"}
    env = {k: str(v) for k, v in {**variables, **more, "OMP_NUM_THREADS": 1}.items()}
    return prepared.start(
        [sys.executable, str(SCRIPT), *args],
        env={**os.environ, **env, "PYTHONPATH": str(SCRIPT.parents[2])},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


@pytest.mark.dist
@pytest.mark.parametrize(("size", "backend"), [(3, ""), (2, "gloo")])
def test_every_collective_gives_what_it_gives_on_the_cpu(size: int, backend: str) -> None:
    """In processes that import the core alone."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    processes = [start(rank, size, port, backend) for rank in range(size)]
    try:
        said = [process.communicate(timeout=200)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.communicate()
    assert [process.returncode for process in processes] == [0] * size, said


def test_an_unknown_op_is_refused() -> None:
    library = torch.library.Library("c10d", "FRAGMENT")  # type: ignore[no-untyped-call]
    library.define("write_(Tensor tensor) -> ()")
    with pytest.raises(ltc.errors.UnsupportedOpError, match=r"c10d.write_.default has no rule"):
        torch.ops.c10d.write_(torch.ones(2, device="ltc"))
