"""The norm of gradients that are divided over the processes, and clipping by it."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

from ltc_dist.collectives.ops import all_reduce
from ltc_dist.collectives.process_group import Groups
from ltc_dist.fully_sharded.shards import is_shard

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
    norms = []
    for is_divided in (True, False):
        gradients = [
            p.grad.float() for p in parameters if p.grad is not None and is_shard(p) == is_divided
        ]
        if gradients:
            norm = get_total_norm(gradients, norm_type)
            norms.append(_over_all(norm, norm_type, groups) if is_divided else norm)
    total = get_total_norm(norms, norm_type)
    clip_grads_with_norm_(parameters, max_norm, total)
    return total


def _over_all(norm: torch.Tensor, norm_type: float, groups: Groups) -> torch.Tensor:
    """The norm of the shards of all processes, of that of this process's."""
    if norm_type == float("inf"):
        return all_reduce("max", norm, groups=groups)
    return all_reduce("sum", norm.pow(norm_type), groups=groups).pow(1 / norm_type)
