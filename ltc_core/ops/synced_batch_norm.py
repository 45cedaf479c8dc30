"""Batch normalisation in parts: what `torch.nn.SyncBatchNorm` calls between its collectives, as other ops.

PyTorch has these ops for GPUs only. Statistics are one number for each channel (dimension 1), and `invstd` is
1 / sqrt(variance + eps). Called by `composites` as the ATen ops of these names.
"""

from __future__ import annotations

import torch

__all__ = [
    "batch_norm_backward_elemt",
    "batch_norm_backward_reduce",
    "batch_norm_elemt",
    "batch_norm_gather_stats_with_counts",
    "batch_norm_stats",
]

Tensor = torch.Tensor


def batch_norm_stats(x: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Mean and invstd of this process's samples."""
    variance, mean = torch.var_mean(_wide(x), _all_but_channels(x), correction=0)
    return mean, torch.rsqrt(variance + eps)


def batch_norm_gather_stats_with_counts(
    x: Tensor,
    mean_WC: Tensor,
    invstd_WC: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    momentum: float,
    eps: float,
    counts_W: Tensor,
) -> tuple[Tensor, Tensor]:
    """Mean and invstd of the samples of all processes; the running statistics are updated in place.

    Args:
        counts_W: the values of a channel in each process.
    """
    counts_W1 = counts_W.to(mean_WC.dtype).unsqueeze(1)
    count = counts_W1.sum()
    mean = (mean_WC * counts_W1).sum(0) / count
    squares_WC = invstd_WC.pow(-2) - eps + (mean_WC - mean).square()
    variance = (squares_WC * counts_W1).sum(0) / count
    if running_mean is not None:
        running_mean.lerp_(mean.to(running_mean.dtype), momentum)
    if running_var is not None:
        unbiased = variance * (count / (count - 1))
        running_var.lerp_(unbiased.to(running_var.dtype), momentum)
    return mean, torch.rsqrt(variance + eps)


def batch_norm_elemt(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, mean: Tensor, invstd: Tensor, eps: float
) -> Tensor:
    """The normalised input."""
    scale = invstd if weight is None else invstd * weight
    result = (_wide(x) - _along_channels(mean, x)) * _along_channels(scale, x)
    if bias is not None:
        result = result + _along_channels(bias, x)
    return result.to(x.dtype)


def batch_norm_backward_reduce(
    grad: Tensor,
    x: Tensor,
    mean: Tensor,
    invstd: Tensor,
    weight: Tensor | None,
    input_g: bool,
    weight_g: bool,
    bias_g: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Over this process's samples: sum of grad, sum of grad * (x - mean), gradients of weight and bias."""
    dims, wide = _all_but_channels(x), _wide(grad)
    sum_dy = wide.sum(dims)
    sum_dy_xmu = (wide * (_wide(x) - _along_channels(mean, x))).sum(dims)
    dtype = sum_dy.dtype if weight is None else weight.dtype
    return sum_dy, sum_dy_xmu, (sum_dy_xmu * invstd).to(dtype), sum_dy.to(dtype)


def batch_norm_backward_elemt(
    grad: Tensor,
    x: Tensor,
    mean: Tensor,
    invstd: Tensor,
    weight: Tensor | None,
    sum_dy: Tensor,
    sum_dy_xmu: Tensor,
    count: Tensor,
) -> Tensor:
    """Gradient of the input.

    Args:
        sum_dy, sum_dy_xmu: of all processes.
        count: the values of a channel in each process.
    """
    num_values = count.sum()
    slope = invstd.square() * sum_dy_xmu / num_values
    scale = invstd if weight is None else invstd * weight
    centered = _wide(x) - _along_channels(mean, x)
    whole = (
        _wide(grad) - _along_channels(sum_dy / num_values, x) - centered * _along_channels(slope, x)
    )
    return (whole * _along_channels(scale, x)).to(x.dtype)


def _wide(x: Tensor) -> Tensor:
    """`x` in the dtype that statistics are computed in."""
    return x.float() if x.dtype in (torch.float16, torch.bfloat16) else x


def _all_but_channels(x: Tensor) -> list[int]:
    return [dim for dim in range(x.dim()) if dim != 1]


def _along_channels(statistic: Tensor, x: Tensor) -> Tensor:
    return statistic.view(-1, *[1] * (x.dim() - 2))
