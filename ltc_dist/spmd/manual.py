"""Manual sharding: tensors of which each device of a mesh has a part that it computes with by itself.

`enable_manual_sharding` makes such a tensor of a whole one, `disable_manual_sharding` makes a whole one of it. Between
the two a script is written for one device: for kernels, and for what XLA shall not divide in another way.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ltc_core import errors, source
from ltc_core.api import sharding
from ltc_dist.spmd.mesh import Mesh, given_or_global
from ltc_dist.spmd.sharding import check_spec, is_manual, note, note_manual

__all__ = ["disable_manual_sharding", "enable_manual_sharding", "mark_manual_sharding"]


def enable_manual_sharding(
    t: torch.Tensor, partition_spec: Sequence[Any], *, mesh: Mesh | None = None
) -> torch.Tensor:
    """A tensor whose value on each device is the device's part of `t`; ops on it run there, without communication.

    Ops with this tensor, and with what they return, see the part alone: a softmax is one over the part. A tensor that
    is not manual has the same value on each device for them. `all_reduce` and the other functions of
    `manual_collectives` send values to other devices.

    Args:
        t: a tensor on the device, of any shape that the mesh divides evenly.
        partition_spec: as for `mark_sharding`. None: each device has all of the dimension.
        mesh: the global one by default.

    Returns:
        a manual tensor: of shape `t.shape`, divided along each dimension by the sizes of its axes. The gradient of `t`
        is the sum over devices that have the same part. So pass parameters through this function, too, with None for
        each dimension: the gradient of one that is used without it would differ between devices.

    Raises:
        ShardingError: there is no mesh, or the spec does not fit the mesh or the tensor, or does not divide it evenly.
        DeviceError: `t` is not a tensor on the device, or the executor has no mesh of that size.

    Cost: none if `t` is divided so already; else it is moved.

    What a manual tensor cannot do is an error that says so, at the next cut or read: be read or printed (`local_shards`
    reads each device's value), run ops without a rule, be divided again, or be written into other memory. Random ops
    draw the same numbers on each device. On a mesh of one device it is a copy of `t`.

    Source: `torch_xla.distributed.spmd.enable_manual_sharding`, which has no gradient.
    """
    mesh, own = _checked("enable_manual_sharding", t, partition_spec, mesh)
    if is_manual(t):
        raise errors.ShardingError(
            "enable_manual_sharding takes a tensor that is whole, not a manual one",
            got=f"a manual tensor of shape {tuple(t.shape)}",
            where=source.user_line(),
            next="call disable_manual_sharding first",
        )
    uneven = [dim for dim in range(t.ndim) if t.shape[dim] % own.parts(dim)]
    if uneven:
        dim = uneven[0]
        raise errors.ShardingError(
            f"dimension {dim} of a tensor cannot be divided evenly over the mesh",
            got=f"{t.shape[dim]} elements for {own.parts(dim)} parts, partition_spec {tuple(partition_spec)}",
            where=source.user_line(),
            next=f"pad it to a multiple of {own.parts(dim)} elements, or pass None for it",
        )
    return note_manual(note(sharding.split(t, own), mesh, partition_spec))


def disable_manual_sharding(
    t: torch.Tensor,
    partition_spec: Sequence[Any],
    full_shape: Sequence[int],
    *,
    mesh: Mesh | None = None,
) -> torch.Tensor:
    """The whole tensor that has each device's value of a manual tensor as its part.

    Args:
        t: a manual tensor; a tensor that is not manual is the same part on each device.
        partition_spec: how the result is divided, as for `mark_sharding`.
        full_shape: its shape: that of `t`, multiplied along each dimension by the sizes of its axes.
        mesh: the global one by default.

    Returns:
        a tensor of `full_shape`, divided so. Devices along an axis that the spec does not name have the same part: the
        first of them gives its value, and gets the gradient.

    Raises:
        ShardingError: as for `enable_manual_sharding`, or `full_shape` is another shape.
        DeviceError: as there.

    Cost: no communication if the spec names all axes; else a part goes to the other devices that have it.

    Source: `torch_xla.distributed.spmd.disable_manual_sharding`, which has no gradient.
    """
    mesh, own = _checked("disable_manual_sharding", t, partition_spec, mesh)
    expected = tuple(size * own.parts(dim) for dim, size in enumerate(t.shape))
    if tuple(full_shape) != expected:
        raise errors.ShardingError(
            "full_shape is not the shape of all parts together",
            got=f"{tuple(full_shape)}, expected {expected}: parts of shape {tuple(t.shape)}, "
            f"partition_spec {tuple(partition_spec)}",
            where=source.user_line(),
            next="pass the shape that parts and spec make, or the spec that the whole tensor had",
        )
    return note(sharding.join_manual(t, own), mesh, partition_spec)


def mark_manual_sharding(t: torch.Tensor) -> torch.Tensor:
    """Note that a tensor is manual, for whoever asks for its sharding; its value stays. Returns the tensor.

    What ops make of manual tensors is manual without it.

    Raises:
        DeviceError: `t` is not a tensor on the device.

    Source: `torch_xla.distributed.spmd._mark_manual_sharding`, which refuses tensors that are computed already.
    """
    sharding.check_on_device(t, "marked as manual")
    return note_manual(t)


def _checked(
    name: str, t: torch.Tensor, spec: Sequence[Any], mesh: Mesh | None
) -> tuple[Mesh, sharding.Sharding]:
    mesh = given_or_global(name, mesh)
    check_spec(name, t, mesh, spec)
    return mesh, mesh.sharding(spec)
