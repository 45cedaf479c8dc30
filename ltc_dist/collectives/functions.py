"""Differentiable collectives; those of `ops` are not.

The gradient of each is a collective, too, so backward must run in every process of the group.
"""

from __future__ import annotations

from typing import Any

import torch

from ltc_core.errors import CollectiveError
from ltc_dist.collectives import ops
from ltc_dist.collectives.process_group import Groups, group_of

__all__ = ["all_gather", "all_reduce", "all_to_all", "reduce_scatter"]


def all_reduce(
    reduce_type: str, value: torch.Tensor, scale: float = 1.0, groups: Groups = None
) -> torch.Tensor:
    """Sum over the processes, times `scale`; the gradient is the sum of theirs, times `scale`.

    Raises:
        CollectiveError: a reduction other than 'sum', which has no such gradient.

    Source: `torch.distributed.nn.functional.all_reduce`; a loss is taken to be a sum over the processes.
    """
    _check_sum("all_reduce", reduce_type)
    return _AllReduce.apply(value, scale, groups)  # type: ignore[no-any-return, no-untyped-call]


def all_gather(value: torch.Tensor, dim: int = 0, groups: Groups = None) -> torch.Tensor:
    """Concatenate the values of all processes; the gradient is this process's part of the sum of theirs.

    Source: `torch.distributed.nn.functional.all_gather`; a loss is taken to be a sum over the processes.
    """
    return _AllGather.apply(value, dim, groups)  # type: ignore[no-any-return, no-untyped-call]


def reduce_scatter(
    reduce_type: str,
    value: torch.Tensor,
    scale: float,
    scatter_dim: int,
    shard_count: int,
    groups: Groups = None,
) -> torch.Tensor:
    """Sum, times `scale`, and return this process's part; the gradient is the parts of all, times `scale`.

    Raises:
        CollectiveError: a reduction other than 'sum', which has no such gradient.
    """
    _check_sum("reduce_scatter", reduce_type)
    return _ReduceScatter.apply(value, scale, scatter_dim, shard_count, groups)  # type: ignore[no-any-return, no-untyped-call]


def all_to_all(
    value: torch.Tensor,
    split_dimension: int,
    concat_dimension: int,
    split_count: int,
    groups: Groups = None,
) -> torch.Tensor:
    """Send part i along `split_dimension` to process i; gradients are sent back."""
    return _AllToAll.apply(value, split_dimension, concat_dimension, split_count, groups)  # type: ignore[no-any-return, no-untyped-call]


def _check_sum(name: str, reduce_type: str) -> None:
    if reduce_type != "sum":
        raise CollectiveError(
            f"{name} has no gradient for the reduction {reduce_type!r}",
            got="expected 'sum'",
            next=f"use the {name} of ltc_dist, without a gradient, or sum",
        )


class _AllReduce(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value: torch.Tensor, scale: float, groups: Groups) -> torch.Tensor:
        ctx.rest = scale, groups
        return ops.all_reduce("sum", value, scale, groups)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        return ops.all_reduce("sum", grad, *ctx.rest), None, None


class _AllGather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value: torch.Tensor, dim: int, groups: Groups) -> torch.Tensor:
        ctx.shape, ctx.rest = value.shape, (dim, groups)
        return ops.all_gather(value, dim, groups)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        dim, groups = ctx.rest
        count = len(group_of(groups).members)
        part = ops.reduce_scatter("sum", grad, 1.0, dim, count, groups)
        return part.reshape(ctx.shape), None, None


class _ReduceScatter(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, value: torch.Tensor, scale: float, dim: int, count: int, groups: Groups
    ) -> torch.Tensor:
        ctx.rest = scale, dim, groups
        return ops.reduce_scatter("sum", value, scale, dim, count, groups)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        scale, dim, groups = ctx.rest
        return ops.all_gather(grad, dim, groups) * scale, None, None, None, None


class _AllToAll(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, value: torch.Tensor, split: int, concat: int, count: int, groups: Groups
    ) -> torch.Tensor:
        ctx.rest = concat, split, count, groups
        return ops.all_to_all(value, split, concat, count, groups)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        return ops.all_to_all(grad, *ctx.rest), None, None, None, None
