"""Batch normalisation with the statistics of the batches of all processes."""

from __future__ import annotations

import torch
from torch import nn

from ltc_dist.collectives.functions import all_gather
from ltc_dist.job.ranks import world_size

__all__ = ["SyncBatchNorm"]


class SyncBatchNorm(nn.modules.batchnorm._BatchNorm):
    """`torch.nn.BatchNorm1d`, `2d` and `3d` in one, over the batches of all processes while training.

    Args:
        num_features: C of inputs [N, C, ...]. N may differ between the processes, and be 0 in some.
        eps, momentum, affine, track_running_stats: as for `torch.nn.BatchNorm2d`.

    Cost: gathers 2 C + 1 numbers of each process, and the same for the gradient; recorded in the graph.

    Source: `torch.nn.SyncBatchNorm`, which needs a process group.
    """

    def _check_input_dim(self, input: torch.Tensor) -> None:
        if input.dim() < 2:
            raise ValueError(f"expected at least 2D input (got {input.dim()}D input)")
        if input.size(1) != self.num_features:
            raise ValueError(f"expected {self.num_features} channels, got {input.size(1)}")

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Normalise; in `eval()` with the running statistics."""
        self._check_input_dim(input)
        if not self.training or world_size() == 1:
            return super().forward(input)
        wide = torch.promote_types(input.dtype, torch.float32)
        values = input.to(wide)
        dims = [d for d in range(input.dim()) if d != 1]
        if input.numel():
            var, mean = torch.var_mean(values, dims, correction=0)
        else:
            var = mean = values.sum(dims)  # zeros, and a part of the graph as elsewhere
        count = mean.new_full((1,), input.numel() / input.size(1))
        of_each = all_gather(torch.cat([mean, var, count])[None])
        size = self.num_features
        means, variances, counts = of_each[:, :size], of_each[:, size:-1], of_each[:, -1:]
        share = counts / counts.sum()
        mean = (share * means).sum(0)
        var = (share * (variances + (means - mean) ** 2)).sum(0)
        self._follow(mean.detach(), var.detach(), counts.detach().sum())
        shape = [1, -1] + [1] * (input.dim() - 2)
        normal: torch.Tensor = (values - mean.view(shape)) * (var + self.eps).rsqrt().view(shape)
        if self.affine:
            normal = normal * self.weight.view(shape) + self.bias.view(shape)
        return normal.to(input.dtype)

    @torch.no_grad()
    def _follow(self, mean: torch.Tensor, var: torch.Tensor, count: torch.Tensor) -> None:
        """Update the running statistics."""
        if self.running_mean is None or self.running_var is None:
            return
        assert self.num_batches_tracked is not None
        self.num_batches_tracked.add_(1)
        if self.momentum is None:  # the mean over all batches
            weight: torch.Tensor | float = 1 / self.num_batches_tracked.to(mean.dtype)
        else:
            weight = self.momentum
        self.running_mean += (mean - self.running_mean) * weight
        self.running_var += (var * count / (count - 1) - self.running_var) * weight
