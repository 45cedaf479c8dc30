"""Send values of manual tensors between the devices of a mesh, in the graph. Called by `ltc_dist.spmd`."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any

import torch

from ltc_core import errors, source
from ltc_core.api.sharding import check_on_device
from ltc_core.graph.manual_sharding import (
    ALL_GATHER,
    ALL_REDUCE,
    ALL_TO_ALL,
    PERMUTE,
    REDUCE_SCATTER,
)

__all__ = ["all_gather", "all_reduce", "all_to_all", "permute", "reduce_scatter"]

Groups = Sequence[Sequence[int]]


def all_reduce(t: torch.Tensor, kind: str, groups: Groups) -> torch.Tensor:
    """What the devices of a group have, reduced, on each of them.

    Args:
        t: a manual tensor; one that is not manual is the same on each device.
        kind: "sum", "mul", "min", "max", "and" or "or". The gradient is that of a sum; of others it is an error.
        groups: numbers of the devices of each group; all of one length, with each device in one of them. Where each
            device is alone, the result is a copy.

    Raises:
        DeviceError: `t` is not on the device.
    """
    return _among(groups, t, ALL_REDUCE, kind)


def all_gather(t: torch.Tensor, dim: int, groups: Groups) -> torch.Tensor:
    """What the devices of a group have, one after the other along a dimension. See `all_reduce`."""
    return _among(groups, t, ALL_GATHER, dim)


def reduce_scatter(t: torch.Tensor, dim: int, groups: Groups) -> torch.Tensor:
    """The sum over the devices of a group, divided among them along a dimension. See `all_reduce`."""
    return _among(groups, t, REDUCE_SCATTER, dim)


def all_to_all(t: torch.Tensor, split_dim: int, concat_dim: int, groups: Groups) -> torch.Tensor:
    """Part k of each device of a group, one after the other, on the k-th device. See `all_reduce`."""
    return _among(groups, t, ALL_TO_ALL, split_dim, concat_dim)


def permute(t: torch.Tensor, pairs: Groups) -> torch.Tensor:
    """What another device has: `pairs` are (from, to). Zeros on a device that gets nothing. See `all_reduce`."""
    return _sent(t, PERMUTE, json.dumps(pairs))


def _among(groups: Groups, t: torch.Tensor, op: torch._ops.OpOverload, *args: Any) -> torch.Tensor:
    if len(groups[0]) == 1:
        check_on_device(t, "sent to other devices")
        return t.clone()
    return _sent(t, op, *args, json.dumps(groups))


def _sent(t: torch.Tensor, op: torch._ops.OpOverload, *args: Any) -> torch.Tensor:
    check_on_device(t, "sent to other devices")
    return _Sent.apply(t, op, args)  # type: ignore[no-any-return, no-untyped-call]


class _Sent(torch.autograd.Function):
    """An exchange. Its gradient sends each value's gradient to where the value came from."""

    @staticmethod
    def forward(ctx: Any, t: torch.Tensor, op: torch._ops.OpOverload, args: Any) -> torch.Tensor:
        ctx.call = op, args
        return op(t, *args)  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        op, args = ctx.call
        return _Sent.apply(gradients[0], *_BACK[op](*args)), None, None  # type: ignore[no-untyped-call]


def _back_of_reduce(kind: str, groups: str) -> tuple[torch._ops.OpOverload, Any]:
    if kind != "sum":
        raise errors.ShardingError(
            "only a sum over devices has a gradient",
            got=f"the gradient of an all_reduce of kind {kind!r}",
            where=source.user_line(),
            next="detach() the tensor before it, or compute it of an all_gather",
        )
    return ALL_REDUCE, (kind, groups)


_BACK: dict[torch._ops.OpOverload, Callable[..., tuple[torch._ops.OpOverload, Any]]] = {
    ALL_REDUCE: _back_of_reduce,
    ALL_GATHER: lambda dim, groups: (REDUCE_SCATTER, (dim, groups)),
    REDUCE_SCATTER: lambda dim, groups: (ALL_GATHER, (dim, groups)),
    ALL_TO_ALL: lambda split, concat, groups: (ALL_TO_ALL, (concat, split, groups)),
    PERMUTE: lambda pairs: (PERMUTE, (json.dumps([pair[::-1] for pair in json.loads(pairs)]),)),
}
