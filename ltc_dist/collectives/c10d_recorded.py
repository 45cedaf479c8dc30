"""Collectives of torch.distributed that are recorded in the graph: those of FSDP2 and of DTensor.

They gather and scatter the parts of a divided tensor many times in a step. Recorded, a step stays one graph, which
gathers a layer's parameters before it computes with them and frees them after. Where the script goes on without
recording, they are handed over meanwhile (`ltc_core.runtime.idle_collectives`). Calls that scripts make themselves, as
`dist.all_reduce`, wait for their result as elsewhere (`ltc_core.api.c10d`, which asks here first).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed

from ltc_core.api.verbs import is_lazy_tensor
from ltc_core.runtime import idle_collectives
from ltc_dist.collectives import ops
from ltc_dist.collectives.c10d_lines import members_of
from ltc_dist.collectives.process_group import Group, group_of_members

__all__ = ["record"]

Tensor = torch.Tensor

# reductions by the names of c10d and of its functional ops -> (kind of ours, whether it is divided by the members)
_KINDS = {
    "sum": ("sum", False),
    "avg": ("sum", True),
    "product": ("mul", False),
    "min": ("min", False),
    "max": ("max", False),
    "band": ("and", False),
    "bor": ("or", False),
}


def record(group: Any, name: str, args: Sequence[Any], reduction: str) -> Any | None:
    """Record one collective; None if it is to run where it is called.

    Args:
        group: torch.distributed's.
        name: of the op.
        args: of the op; the first ones are tensors.
        reduction: of an op whose arguments do not tell it.

    Returns:
        what the op returns, without its work: the first argument, or a new tensor.

    Raises:
        CollectiveError: the first time with a group: its processes could not be connected.
    """
    recorder = _RECORDERS.get(name)
    if recorder is None:
        return None
    members = members_of(group)
    made = recorder(group_of_members(members), args, reduction) if members else None
    if made is not None:
        idle_collectives.watch()
    return made


def _reduction(group: Group, name: str) -> tuple[str, float] | None:
    """The kind of a reduction and the scale of its result; None if graphs have it not."""
    kind, is_mean = _KINDS.get(name, ("", False))
    return (kind, 1.0 / len(group.members) if is_mean else 1.0) if kind else None


def _gathered(group: Group, given: Tensor) -> Tensor:
    """The values of all members, one after the other in memory."""
    return ops.gathered_in(group, given.reshape(-1), 0)


def _scattered(group: Group, given: Tensor, name: str) -> Tensor | None:
    """This member's part of the reduced values, as a vector; None for a reduction that graphs have not."""
    found = _reduction(group, name)
    return (
        None if found is None else ops.scattered_in(group, found[0], given.reshape(-1), found[1], 0)
    )


def _are_parts(whole: Any, part: Any, group: Group) -> bool:
    """Whether both are tensors of the device, and one has the elements of all members: else gloo's error says more."""
    return (
        is_lazy_tensor(whole)
        and is_lazy_tensor(part)
        and whole.dtype == part.dtype
        and 0 < whole.numel() == len(group.members) * part.numel()
    )


def _gather_base(group: Group, args: Sequence[Any], reduction: str) -> Any | None:
    whole, part = args[:2]
    if not _are_parts(whole, part, group):
        return None
    whole.detach().copy_(_gathered(group, part.detach()).view(whole.shape))
    return whole


def _scatter_base(group: Group, args: Sequence[Any], reduction: str) -> Any | None:
    part, whole = args[:2]
    if not _are_parts(whole, part, group):
        return None
    made = _scattered(group, whole.detach(), reduction)
    if made is None:
        return None
    part.detach().copy_(made.view(part.shape))
    return part


def _functional_gather(group: Group, args: Sequence[Any], reduction: str) -> Any | None:
    given, count = args[:2]
    if given.dim() == 0 or given.numel() == 0 or count != len(group.members):
        return None
    size = [count * given.shape[0], *given.shape[1:]]
    return _gathered(group, given.detach()).view(size)


def _functional_scatter(group: Group, args: Sequence[Any], reduction: str) -> Any | None:
    given, name, count = args[:3]
    if given.dim() == 0 or given.numel() == 0 or count != len(group.members):
        return None
    if given.shape[0] % count:
        return None
    made = _scattered(group, given.detach(), name)
    return None if made is None else made.view([given.shape[0] // count, *given.shape[1:]])


def _functional_reduce(group: Group, args: Sequence[Any], reduction: str) -> Any | None:
    given, name = args[:2]
    found = _reduction(group, name)
    if found is None or given.numel() == 0:
        return None
    return ops.reduced_in(group, found[0], given.detach(), found[1])


_RECORDERS: dict[str, Callable[[Group, Sequence[Any], str], Any | None]] = {
    "_allgather_base_": _gather_base,
    "_reduce_scatter_base_": _scatter_base,
    "all_gather_into_tensor": _functional_gather,
    "all_reduce": _functional_reduce,
    "reduce_scatter_tensor": _functional_scatter,
}
