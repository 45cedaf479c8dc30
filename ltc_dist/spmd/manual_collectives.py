"""Collectives of manual tensors: what each device has goes to the others along axes of a mesh, within the graph."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ltc_core import errors, source
from ltc_core.api import manual_collectives
from ltc_dist.spmd.mesh import Mesh, given_or_global
from ltc_dist.spmd.sharding import note_manual

__all__ = ["all_gather", "all_reduce", "all_to_all", "permute", "reduce_scatter"]

_KINDS = ("sum", "mul", "min", "max", "and", "or")


def all_reduce(
    t: torch.Tensor, axes: Any = None, *, kind: str = "sum", mesh: Mesh | None = None
) -> torch.Tensor:
    """The sum of what the devices along axes of a mesh have, on each of them.

    Args:
        t: a manual tensor of any shape; one that is not manual is the same on each device.
        axes: name or number of an axis of the mesh, or a tuple of them; None: all of them.
        kind: "sum", "mul", "min", "max"; of integers and bools also "and", "or". Only a sum has a gradient: the sum of
            the devices' gradients.
        mesh: the global one by default.

    Returns:
        a manual tensor of the same shape and dtype. On a mesh of one device it is a copy.

    Raises:
        ShardingError: there is no mesh, no such axis, or no such kind.
        DeviceError: `t` is not a tensor on the device.

    Cost: one all-reduce in the program.

    Source: `jax.lax.psum`; torch_xla has `_XLAC._xla_spmd_all_reduce`.
    """
    is_logical = kind in ("and", "or")
    if kind not in _KINDS or (is_logical and (t.is_floating_point() or t.is_complex())):
        raise errors.ShardingError(
            f"all_reduce has no kind {kind!r} for {t.dtype}",
            where=source.user_line(),
            next=f"use one of {', '.join(_KINDS)}; the last two are for integers and bools",
        )
    groups = _groups("all_reduce", axes, mesh)
    return note_manual(manual_collectives.all_reduce(t, kind, groups))


def all_gather(
    t: torch.Tensor, axes: Any = None, *, dim: int = 0, mesh: Mesh | None = None
) -> torch.Tensor:
    """What the devices along axes of a mesh have, one after the other along a dimension, on each of them.

    Args:
        dim: the dimension; its size is multiplied by the number of devices along the axes.

    The other arguments, the errors and the cost are those of `all_reduce`. The gradient is a `reduce_scatter`.

    Source: `jax.lax.all_gather` with `tiled=True`.
    """
    groups = _groups("all_gather", axes, mesh)
    dim = _dim("all_gather", t, dim, 1)
    return note_manual(manual_collectives.all_gather(t, dim, groups))


def reduce_scatter(
    t: torch.Tensor, axes: Any = None, *, dim: int = 0, mesh: Mesh | None = None
) -> torch.Tensor:
    """The sum over the devices along axes of a mesh, divided among them along a dimension.

    Args:
        dim: the dimension; the number of devices along the axes divides its size.

    The other arguments, the errors and the cost are those of `all_reduce`. The gradient is an `all_gather`.

    Source: `jax.lax.psum_scatter` with `tiled=True`; torch_xla has `_XLAC._xla_spmd_reduce_scatter`.
    """
    groups = _groups("reduce_scatter", axes, mesh)
    dim = _dim("reduce_scatter", t, dim, len(groups[0]))
    return note_manual(manual_collectives.reduce_scatter(t, dim, groups))


def all_to_all(
    t: torch.Tensor,
    axes: Any = None,
    *,
    split_dim: int,
    concat_dim: int,
    mesh: Mesh | None = None,
) -> torch.Tensor:
    """Each device's parts along `split_dim` go to the others: the k-th device gets part k of each, along `concat_dim`.

    Args:
        split_dim: the number of devices along the axes divides its size.
        concat_dim: its size is multiplied by that number.

    The other arguments, the errors and the cost are those of `all_reduce`. The gradient is the way back.

    Source: `jax.lax.all_to_all` with `tiled=True`.
    """
    groups = _groups("all_to_all", axes, mesh)
    split = _dim("all_to_all", t, split_dim, len(groups[0]))
    concat = _dim("all_to_all", t, concat_dim, 1)
    return note_manual(manual_collectives.all_to_all(t, split, concat, groups))


def permute(
    t: torch.Tensor, axes: Any, pairs: Sequence[Sequence[int]], *, mesh: Mesh | None = None
) -> torch.Tensor:
    """What another device along axes of a mesh has.

    Args:
        pairs: (from, to), places along the axes; each at most once as a source, and once as a target. For a ring of
            `n`: `[(k, (k + 1) % n) for k in range(n)]`.

    Returns:
        a manual tensor of the same shape and dtype; zeros on a device that gets nothing.

    The other arguments, the errors and the cost are those of `all_reduce`. The gradient goes back along the pairs.

    Source: `jax.lax.ppermute`.
    """
    groups = _groups("permute", axes, mesh)
    count = len(groups[0])
    places = [(int(source_), int(target)) for source_, target in pairs]
    ends = [[pair[k] for pair in places] for k in (0, 1)]
    if any(len(set(end)) < len(end) or not all(0 <= k < count for k in end) for end in ends):
        raise errors.ShardingError(
            "permute takes pairs of places along the axes, each at most once as a source and once as a target",
            got=f"{places} for {count} places",
            where=source.user_line(),
            next=f"use numbers of range({count})",
        )
    if count == 1:
        return note_manual(t.clone() if places else torch.zeros_like(t))
    sent = [(group[a], group[b]) for group in groups for a, b in places]
    return note_manual(manual_collectives.permute(t, sent))


def _groups(name: str, axes: Any, mesh: Mesh | None) -> list[list[int]]:
    """Numbers of the devices that exchange values, in the order of their places along the axes."""
    mesh = given_or_global(name, mesh)
    every = range(len(mesh.mesh_shape))
    [chosen] = mesh.sharding([tuple(every) if axes is None else axes]).spec
    grid = torch.tensor(mesh.get_logical_mesh())
    order = [*(axis for axis in every if axis not in chosen), *chosen]
    count = mesh.sharding([chosen]).parts(0)
    return grid.permute(order).reshape(-1, count).tolist()


def _dim(name: str, t: torch.Tensor, dim: int, count: int) -> int:
    """The dimension as a number from 0, after a check that `count` divides its size."""
    own = dim + t.ndim if dim < 0 else dim
    if not 0 <= own < t.ndim or t.shape[own] % count:
        raise errors.ShardingError(
            f"{name} cannot use dimension {dim} of its tensor",
            got=f"a tensor of shape {tuple(t.shape)} on each device, {count} devices along the axes",
            where=source.user_line(),
            next=f"choose a dimension whose size {count} divides"
            if count > 1
            else "choose one that it has",
        )
    return own
