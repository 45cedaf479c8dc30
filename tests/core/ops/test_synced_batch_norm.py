"""`torch.nn.SyncBatchNorm`'s ops over two parts of a batch, beside eager's batch normalisation of the whole batch."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import ltc_core as ltc

EPS, MOMENTUM = 1e-3, 0.2


def _whole(x: Tensor, grad: Tensor, weight: Tensor | None, bias: Tensor | None) -> list[Tensor]:
    mean, variance = torch.full((3,), 0.5), torch.full((3,), 2.0)
    given = [t.float().requires_grad_() for t in (x, weight, bias) if t is not None]
    y = F.batch_norm(
        given[0], mean, variance, *given[1:], training=True, momentum=MOMENTUM, eps=EPS
    )
    return [y.detach(), mean, variance, *torch.autograd.grad(y, given, grad.float())]


def _in_parts(x: Tensor, grad: Tensor, weight: Tensor | None, bias: Tensor | None) -> list[Tensor]:
    mean, variance = torch.full((3,), 0.5).to(x.device), torch.full((3,), 2.0).to(x.device)
    parts, grads = x.split([3, 1]), grad.split([3, 1])
    stats = [torch.batch_norm_stats(part, EPS) for part in parts]
    counts = torch.tensor([part.numel() // 3 for part in parts], device=x.device)
    means, invstds = (torch.stack(found) for found in zip(*stats, strict=True))
    at, invstd = torch.batch_norm_gather_stats_with_counts(
        x, means, invstds, mean, variance, MOMENTUM, EPS, counts.float()
    )
    y = torch.cat([torch.batch_norm_elemt(part, weight, bias, at, invstd, EPS) for part in parts])
    sums = [
        torch.batch_norm_backward_reduce(g, part, at, invstd, weight, True, True, True)
        for g, part in zip(grads, parts, strict=True)
    ]
    sum_dy, sum_dy_xmu, of_weight, of_bias = (
        torch.stack(found).sum(0) for found in zip(*sums, strict=True)
    )
    of_x = torch.cat(
        [
            torch.batch_norm_backward_elemt(
                g, part, at, invstd, weight, sum_dy, sum_dy_xmu, counts.int()
            )
            for g, part in zip(grads, parts, strict=True)
        ]
    )
    assert y.dtype == of_x.dtype == x.dtype
    return [y, mean, variance, of_x, *([] if weight is None else [of_weight, of_bias])]


@pytest.mark.parametrize("is_affine", [True, False])
@pytest.mark.parametrize("shape", [(4, 3), (4, 3, 5), (4, 3, 2, 2)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_parts_have_the_values_of_the_whole(
    shape: tuple[int, ...], dtype: torch.dtype, is_affine: bool
) -> None:
    torch.manual_seed(0)
    x, grad = torch.randn(shape).to(dtype), torch.randn(shape).to(dtype)
    weight, bias = (torch.rand(3), torch.rand(3)) if is_affine else (None, None)
    expected = _whole(x, grad, weight, bias)
    device = ltc.lazy_device()
    ltc.metrics.clear_all()
    for _ in range(3):
        moved = [None if t is None else t.to(device) for t in (x, grad, weight, bias)]
        found = [t.cpu().float() for t in _in_parts(*moved)]  # type: ignore[arg-type]
        atol = 1e-5 if dtype is torch.float32 else 0.03
        torch.testing.assert_close(found, expected, rtol=atol, atol=atol)
    assert not ltc.metrics.executed_fallback_ops()
