"""The norm of gradients that are divided over the processes, and clipping by it."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ltc_dist.collectives.ops import all_reduce
from ltc_dist.collectives.process_group import Groups

__all__ = ["clip_by_norm"]


@torch.no_grad()
def clip_by_norm(
    parameters: Sequence[torch.Tensor], max_norm: float, norm_type: float, groups: Groups
) -> torch.Tensor:
    """Scale gradients down so that their total norm is at most `max_norm`; return the norm before.

    Args:
        parameters: with gradients; those that are shards count with the shards of the other processes.
        groups: lists of ranks that share one set of parameters.

    Cost: recorded; one all_reduce.
    """
    is_max = norm_type == float("inf")
    totals = []
    for is_sharded in (True, False):
        norms = [
            torch.linalg.vector_norm(p.grad.float(), norm_type)
            for p in parameters
            if p.grad is not None and hasattr(p, "_is_sharded") == is_sharded
        ]
        if norms:
            stacked = torch.stack(norms)
            total = stacked.max() if is_max else stacked.pow(norm_type).sum()
            if is_sharded:
                total = all_reduce("max" if is_max else "sum", total, groups=groups)
            totals.append(total)
    joined = torch.stack(totals)
    norm = joined.max() if is_max else joined.sum().pow(1 / norm_type)
    factor = (max_norm / (norm + 1e-6)).clamp(max=1.0)
    for p in parameters:
        if p.grad is not None:
            p.grad.mul_(factor.to(p.grad.dtype))
    return norm
