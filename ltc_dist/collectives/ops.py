"""Collectives, recorded in the graph: they run when the step runs, in order, in every process of a group.

A group is what a script passes as `groups=`, a list of lists of ranks with every rank in one of them; all processes by
default. With one process they do nothing to values. Calls `process_group`; called by `train.step`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeVar, overload

import torch

import ltc_core as ltc
from ltc_core import source
from ltc_core.errors import CollectiveError
from ltc_core.graph.collective import Route, ops
from ltc_core.runtime.collective_tokens import token
from ltc_dist.collectives.process_group import (
    Group,
    Groups,
    group_of,
    is_of_processes,
    line_of,
    reduction,
)

__all__ = [
    "REDUCE_AND",
    "REDUCE_MAX",
    "REDUCE_MIN",
    "REDUCE_MUL",
    "REDUCE_OR",
    "REDUCE_SUM",
    "all_gather",
    "all_reduce",
    "all_to_all",
    "broadcast_master_param",
    "collective_broadcast",
    "collective_permute",
    "gathered_in",
    "place_of",
    "reduce_scatter",
    "reduced_in",
    "scattered_in",
    "written_to",
]

REDUCE_SUM, REDUCE_MUL, REDUCE_AND = "sum", "mul", "and"
REDUCE_OR, REDUCE_MIN, REDUCE_MAX = "or", "min", "max"

_devices: set[int] = set()  # those that have recorded collectives

Tensors = TypeVar("Tensors", bound=Sequence[torch.Tensor])


def _line(group: Group, value: torch.Tensor) -> tuple[torch.Tensor, str]:
    """Token and route of the group's next collective on the value's device; see `process_group.line_of`."""
    index = value.device.index
    name = line_of(group, index)
    if is_of_processes(name):
        _devices.add(index)
    # Each process may have one device, and each another one. Devices of one line are told apart once there are several.
    device = index if name == group.name and len(_devices) > 1 else -1
    return token(name, index), Route(name, device, source.user_line()).text()


def _checked(value: Any, name: str) -> torch.Tensor:
    if not ltc.is_lazy_tensor(value):
        where = f"a tensor on {value.device}" if isinstance(value, torch.Tensor) else repr(value)
        raise CollectiveError(
            f"{name} takes tensors of a lazy device",
            got=where,
            next="move it first, or use torch.distributed for tensors of the CPU",
        )
    return value.detach() if value.requires_grad else value  # type: ignore[no-any-return]


@overload
def all_reduce(
    reduce_type: str,
    inputs: torch.Tensor,
    scale: float = ...,
    groups: Groups = ...,
    pin_layout: bool = ...,
    *,
    label: str = ...,
) -> torch.Tensor: ...


@overload
def all_reduce(
    reduce_type: str,
    inputs: Tensors,
    scale: float = ...,
    groups: Groups = ...,
    pin_layout: bool = ...,
    *,
    label: str = ...,
) -> Tensors: ...


def all_reduce(
    reduce_type: str,
    inputs: Any,
    scale: float = 1.0,
    groups: Groups = None,
    pin_layout: bool = True,
    *,
    label: str = "",
) -> Any:
    """Reduce over the processes: a new tensor for a tensor; a list is reduced in place and returned.

    Args:
        reduce_type: 'sum', 'mul', 'min', 'max', and for integers 'and', 'or'.
        scale: what each element is multiplied with afterwards.
        pin_layout: accepted for old scripts.
        label: what is reduced, for error messages; must be the same in all processes.

    Raises:
        CollectiveError: an unknown reduction or group. When the graph runs: processes do not agree on the op or its
            sizes, or one has ended.

    Cost: recorded; one vector of at most LTC_BUCKET_MB at a time goes round when the graph runs.

    Source: `torch_xla.core.xla_model.all_reduce`.
    """
    reduction(reduce_type)
    group = group_of(groups)
    single = isinstance(inputs, torch.Tensor)
    values = [_checked(v, "all_reduce") for v in ([inputs] if single else inputs)]
    if len(group.members) == 1 or not values:
        if single:
            return values[0].clone() if scale == 1.0 else values[0] * scale
        for v in values if scale != 1.0 else ():
            v.mul_(scale)
        return inputs
    if single:
        return reduced_in(group, reduce_type, values[0], float(scale), label or "a tensor")
    written, route = _line(group, values[0])
    label = label or f"{len(values)} tensors"
    ops.all_reduce_(values, written, reduce_type, float(scale), label, route)
    return inputs


def all_gather(
    value: torch.Tensor,
    dim: int = 0,
    groups: Groups = None,
    output: torch.Tensor | None = None,
    pin_layout: bool = True,
) -> torch.Tensor:
    """Concatenate the values of all processes along `dim`, in the order of ranks; numbers give a vector.

    Args:
        output: a tensor that the result is written to as well; its size becomes that of the result.

    Source: `torch_xla.core.xla_model.all_gather`.
    """
    group = group_of(groups)
    given = _checked(value, "all_gather")
    given = given.reshape(1) if given.dim() == 0 else given
    dim = place_of(dim, given)
    if len(group.members) == 1:
        result = given.clone()
    else:
        result = gathered_in(group, given, dim)
    return result if output is None else written_to(output, result)


def reduce_scatter(
    reduce_type: str,
    input: torch.Tensor,
    scale: float,
    scatter_dim: int,
    shard_count: int,
    groups: Groups = None,
    output: torch.Tensor | None = None,
    pin_layout: bool = True,
) -> torch.Tensor:
    """Reduce, and return this process's part along `scatter_dim`.

    Args:
        shard_count: the number of processes of the group.

    Source: `torch_xla.core.xla_model.reduce_scatter`.
    """
    reduction(reduce_type)
    group = group_of(groups)
    given = _checked(input, "reduce_scatter")
    _check_count(given, scatter_dim, shard_count, group)
    if shard_count == 1:
        result = given * scale
    else:
        dim = place_of(scatter_dim, given)
        result = scattered_in(group, reduce_type, given, float(scale), dim)
    return result if output is None else written_to(output, result)


def all_to_all(
    value: torch.Tensor,
    split_dimension: int,
    concat_dimension: int,
    split_count: int,
    groups: Groups = None,
    pin_layout: bool = True,
) -> torch.Tensor:
    """Send part i along `split_dimension` to process i; concatenate the received parts along `concat_dimension`.

    Source: `torch_xla.core.xla_model.all_to_all`.
    """
    group = group_of(groups)
    given = _checked(value, "all_to_all")
    _check_count(given, split_dimension, split_count, group)
    dims = place_of(split_dimension, given), place_of(concat_dimension, given)
    if split_count == 1:
        return given.clone()
    written, route = _line(group, given)
    return ops.all_to_all(given, written, *dims, split_count, route)  # type: ignore[no-any-return]


# -- in a group of several, of tensors that need no check --------------------------------------------


def reduced_in(
    group: Group, kind: str, value: torch.Tensor, scale: float, label: str = "a tensor"
) -> torch.Tensor:
    """The tensors of all members, reduced."""
    written, route = _line(group, value)
    return ops.all_reduce(value, written, kind, scale, label, route)  # type: ignore[no-any-return]


def gathered_in(group: Group, value: torch.Tensor, dim: int) -> torch.Tensor:
    """The tensors of all members, side by side along `dim`."""
    written, route = _line(group, value)
    return ops.all_gather(value, written, dim, len(group.members), route)  # type: ignore[no-any-return]


def scattered_in(
    group: Group, kind: str, value: torch.Tensor, scale: float, dim: int
) -> torch.Tensor:
    """This process's part of the reduced tensors, along `dim`."""
    written, route = _line(group, value)
    made = ops.reduce_scatter(value, written, kind, scale, dim, len(group.members), route)
    return made  # type: ignore[no-any-return]


def written_to(output: torch.Tensor, result: torch.Tensor) -> torch.Tensor:
    """As with `out=`: a tensor of another size is not broadcast into."""
    return output.resize_(result.shape).copy_(result)


def place_of(dim: int, value: torch.Tensor) -> int:
    """`dim`, counted from the first dimension.

    Raises:
        CollectiveError: the tensor has no such dimension.
    """
    count = value.dim()
    if not -count <= dim < count:
        raise CollectiveError(
            f"the tensor has no dimension {dim}",
            got=f"a tensor of {count} dimension{'' if count == 1 else 's'}: {list(value.shape)}",
            next=f"dimensions count from {-count} to {count - 1}"
            if count
            else "a number has no dimensions: reshape(1)",
        )
    return dim % count


def _check_count(value: torch.Tensor, dim: int, count: int, group: Group) -> None:
    size = value.shape[place_of(dim, value)]
    if count != len(group.members) or size % count:
        raise CollectiveError(
            f"dim {dim} of the tensor cannot be dealt out to the group",
            got=f"size {size}, {count} parts, {len(group.members)} processes",
            next="one part for each process, and a size that they divide",
        )


def collective_permute(value: torch.Tensor, pairs: Sequence[Sequence[int]]) -> torch.Tensor:
    """Send along `pairs` of (source, target) ranks; a process that is no target gets zeros.

    Source: `torch_xla.core.xla_model.collective_permute`.
    """
    group = group_of()
    given = _checked(value, "collective_permute")
    flat = [int(r) for pair in pairs for r in pair]
    legal = range(len(group.members))
    targets = [pair[1] for pair in pairs]
    if not all(r in legal for r in flat) or len(set(targets)) != len(targets):
        raise CollectiveError(
            "pairs must be (source, target) ranks, each target once",
            got=f"{list(map(list, pairs))} for {len(group.members)} processes",
        )
    if len(group.members) == 1:
        return given.clone() if flat else torch.zeros_like(given)
    written, route = _line(group, given)
    return ops.permute(given, written, flat, route)  # type: ignore[no-any-return]


def collective_broadcast(
    tensors: Sequence[torch.Tensor],
    root_ordinal: int = 0,
    groups: Groups = None,
    pin_layout: bool = True,
) -> None:
    """Overwrite the tensors with those of the process `root_ordinal`, counted within the group.

    Source: `torch_xla.core.xla_model.collective_broadcast`.
    """
    group = group_of(groups)
    if root_ordinal not in range(len(group.members)):
        raise CollectiveError(
            f"there is no process {root_ordinal} in the group",
            got=f"{len(group.members)} processes",
        )
    values = [_checked(t, "collective_broadcast") for t in tensors]
    if len(group.members) == 1 or not values:
        return
    written, route = _line(group, values[0])
    for value, result in zip(
        values, ops.broadcast(values, written, root_ordinal, route), strict=True
    ):
        value.copy_(result)


def broadcast_master_param(model: torch.nn.Module) -> None:
    """Broadcast the parameters and buffers of rank 0 to all processes.

    Source: `torch_xla.core.xla_model.broadcast_master_param`.
    """
    collective_broadcast([*model.parameters(), *model.buffers()])
    ltc.mark_step()
