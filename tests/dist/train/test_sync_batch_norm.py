"""SyncBatchNorm: two processes with batches of their own sizes are one with the whole batch."""

from pathlib import Path

import pytest
import torch

import ltc_dist as ltd
from tests.dist import spawned


@pytest.mark.dist
@pytest.mark.parametrize("norm_class", [ltd.SyncBatchNorm, torch.nn.SyncBatchNorm])
def test_two_processes_are_one(norm_class: type, tmp_path: Path) -> None:
    ltd.spawn(spawned.normalise, (str(tmp_path), norm_class), nprocs=2, start_method="forkserver")
    found = [torch.load(tmp_path / f"{k}.pt") for k in range(2)]
    torch.manual_seed(0)
    batch = torch.randn(8, 3, 4).requires_grad_()
    norm, average = torch.nn.BatchNorm1d(3), torch.nn.BatchNorm1d(3, momentum=None, affine=False)
    optimizer = torch.optim.SGD(norm.parameters(), lr=0.05)  # the mean over two processes
    for _ in range(3):
        optimizer.zero_grad()
        batch.grad = None
        (norm(batch) ** 4 + average(batch) ** 3).sum().backward()
        optimizer.step()
    norm.eval()
    for name, module in (("norm", norm), ("average", average)):
        for one in found:
            torch.testing.assert_close(one[name], module.state_dict(), rtol=1e-4, atol=1e-5)
    grads = torch.cat([one["grad"] for one in found])
    torch.testing.assert_close(grads, batch.grad, rtol=1e-3, atol=1e-4)
    out = torch.cat([one["out"] for one in found])
    torch.testing.assert_close(out, norm(batch).detach(), rtol=1e-4, atol=1e-5)


@pytest.mark.dist
def test_half_precision_and_a_batch_that_is_empty() -> None:
    ltd.spawn(spawned.normalise_more, nprocs=2, start_method="forkserver")


def test_alone_it_is_batch_norm() -> None:
    norm = ltd.SyncBatchNorm(3, 1e-4, 0.2)
    plain = torch.nn.BatchNorm2d(3, 1e-4, 0.2)
    batch = torch.randn(4, 3, 2, 2)
    assert torch.equal(norm(batch), plain(batch))
    assert torch.equal(norm.running_var, plain.running_var)
    with pytest.raises(ValueError, match="expected at least 2D input"):
        norm(torch.randn(3))
    with pytest.raises(ValueError, match="expected 3 channels, got 5"):
        norm(torch.randn(2, 5))
