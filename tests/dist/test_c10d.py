"""torch.distributed on tensors of the device: collectives, groups, objects, DistributedDataParallel."""

from pathlib import Path

import pytest
import torch

import ltc_dist as ltd
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
