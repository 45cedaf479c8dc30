"""What a marked tensor has of PyTorch's DTensor with torch_xla: its placements, its mesh, and another division.

Used by `torch_xla.distributed.spmd`, which adds them to the tensors of the device.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh

from ltc_core import source
from ltc_core.errors import ShardingError, with_notes
from ltc_core.settings import settings
from ltc_dist.spmd import (
    Mesh,
    mark_sharding,
    mark_sharding_with_gradients,
    num_devices,
    sharding_of,
)
from ltc_dist.spmd.distribute import mesh_of, spec_of

__all__ = [
    "METHODS",
    "MeshSizeError",
    "NotMarkedError",
    "PlacementError",
    "convert_to_xla_mesh",
    "convert_to_xla_partition_spec",
    "wrap_as_sharded_tensor",
]

_SPEC = "_ltc_dtensor_spec"


class NotMarkedError(ShardingError, AttributeError):
    """A tensor that is not marked has no placements; for `hasattr` it has no such attribute."""


class MeshSizeError(ShardingError, AssertionError):
    """A mesh does not have all devices."""


class PlacementError(ShardingError, IndexError):
    """A placement divides a dimension that a tensor does not have."""


class PartialPlacementError(ShardingError, NotImplementedError):
    """A placement says that the devices have terms of a sum."""


def convert_to_xla_mesh(dt_mesh: Any) -> Mesh:
    """The `Mesh` of a `DeviceMesh` of all devices.

    Raises:
        MeshSizeError: it does not have all devices.
    """
    if dt_mesh.size() != num_devices():
        raise MeshSizeError(
            f"a mesh of {dt_mesh.size()} devices; there are {num_devices()}",
            where=source.user_line(),
            next="pass a DeviceMesh of all devices",
        )
    return mesh_of(dt_mesh)


def convert_to_xla_partition_spec(
    tensor: torch.Tensor, placements: Sequence[Any]
) -> tuple[Any, ...]:
    """For each dimension of a tensor the axis of the mesh that divides it, or None.

    Raises:
        ShardingError: a placement is neither `Shard` nor `Replicate`.
    """
    return spec_of(tensor.ndim, placements)


def wrap_as_sharded_tensor(
    t: torch.Tensor,
    mesh_shape: Sequence[int] | None = None,
    partition_spec: Sequence[Any] | None = None,
) -> torch.Tensor:
    """Divide a tensor over all devices, in place, and return it. What is not given stays as it was marked.

    Raises:
        ShardingError: the mesh or the spec does not fit.
    """
    found = sharding_of(t)
    if mesh_shape is None and partition_spec is None:
        return t
    mesh = found[0] if found is not None else None
    if mesh_shape is not None:
        mesh = Mesh(range(num_devices()), tuple(mesh_shape))
    spec = partition_spec if partition_spec is not None else (found or (None, None))[1]
    if mesh is None or spec is None:
        raise ShardingError(
            "a tensor that is not marked needs both mesh_shape and partition_spec",
            got=f"mesh_shape={mesh_shape}, partition_spec={partition_spec}",
            where=source.user_line(),
            next="pass both, or call mark_sharding(t, mesh, partition_spec)",
        )
    return mark_sharding(t, mesh, spec)


def _mark(t: torch.Tensor) -> tuple[Mesh, tuple[Any, ...]]:
    found = sharding_of(t)
    if found is None:
        error = NotMarkedError(
            "Placements not available: XLAShardedTensor requires mesh_shape and partition_spec to be set. Use "
            "mark_sharding() to properly initialize sharding information.",
            got=f"a tensor of shape {list(t.shape)} that is not marked; results of ops are divided as XLA chooses",
            where=source.user_line(),
            next="mark_sharding(t, mesh, partition_spec), or wrap_as_sharded_tensor",
        )
        raise with_notes(error)
    return found


def _spec(t: torch.Tensor) -> Any:
    """PyTorch's `DTensorSpec` of a marked tensor."""
    from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
    from torch.distributed.tensor.placement_types import Replicate, Shard

    cached = _cached(t)
    if cached is not None:
        return cached
    mark = mesh, spec = _mark(t)
    dividing = mesh.sharding(spec).spec
    dims = {axis: dim for dim, axes in enumerate(dividing) for axis in axes}
    if any(list(axes) != sorted(axes) for axes in dividing):
        raise ShardingError(
            "placements divide a dimension by the axes of the mesh in their order",
            got=f"partition_spec {spec}",
            where=source.user_line(),
            next="read t.partition_spec, or name the axes of the mesh in the other order",
        )
    made = DTensorSpec(
        DeviceMesh(
            settings.device_name,
            torch.from_numpy(mesh.get_logical_mesh()),
            mesh_dim_names=mesh.axis_names,
        ),
        tuple(
            Shard(dims[axis]) if axis in dims else Replicate()
            for axis in range(len(mesh.mesh_shape))
        ),
        tensor_meta=TensorMeta(t.shape, t.stride(), t.dtype),
    )
    setattr(t, _SPEC, (mark, made))
    return made


def _cached(t: torch.Tensor) -> Any:
    mark, spec = getattr(t, _SPEC, (None, None))
    return spec if mark == sharding_of(t) else None


def _forget(t: torch.Tensor) -> None:
    """Forget the `DTensorSpec` that was made; a new mark does so by itself."""
    setattr(t, _SPEC, (None, None))


def _redistribute(
    t: torch.Tensor, device_mesh: Any, placements: Sequence[Any], *, async_op: bool = False
) -> torch.Tensor:
    """A copy of a tensor, divided as the placements say; with gradients.

    Args:
        device_mesh: a `Mesh`, or a `DeviceMesh` of all devices.
        async_op: accepted; nothing waits.

    Raises:
        ShardingError: the placements do not fit the mesh or the tensor.
    """
    mesh = mesh_of(device_mesh)
    where, todo = source.user_line(), "pass Shard(dim) or Replicate() for each axis of the mesh"
    got = f"{list(placements)} for a tensor of shape {list(t.shape)}"
    if len(placements) != len(mesh.mesh_shape):
        raise ShardingError(
            f"Number of placements ({len(placements)}) must match mesh dimensions ({len(mesh.mesh_shape)})",
            got=got,
            where=where,
            next=todo,
        )
    if any(placement.is_partial() for placement in placements):
        raise PartialPlacementError(
            "a tensor has no partial placement: each value is whole, or a part",
            got=got,
            where=where,
            next=todo,
        )
    if any(placement.is_shard() and placement.dim >= t.ndim for placement in placements):
        raise PlacementError(
            "a placement divides a dimension that is not there", got=got, where=where, next=todo
        )
    return mark_sharding_with_gradients(t, mesh, spec_of(t.ndim, placements))


# Attribute of marked tensors -> what it is.
METHODS: dict[str, Any] = {
    "_cached_spec": property(_cached),
    "_spec": property(_spec),
    "device_mesh": property(lambda t: _spec(t).mesh),
    "invalidate_spec_cache": _forget,
    "placements": property(lambda t: _spec(t).placements),
    "redistribute": _redistribute,
}
