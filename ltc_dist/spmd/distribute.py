"""PyTorch's words for meshes: a `DeviceMesh` and placements as a mesh and a spec."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

import ltc_core as ltc
from ltc_core import errors, source
from ltc_dist.spmd.mesh import Mesh, num_devices
from ltc_dist.spmd.sharding import mark_sharding

__all__ = ["mesh_of", "spec_of", "xla_distribute_module", "xla_distribute_tensor"]


def xla_distribute_tensor(
    tensor: torch.Tensor, device_mesh: Any, placements: Sequence[Any] | None = None
) -> torch.Tensor:
    """Move a tensor to the device, and divide it over a mesh.

    Args:
        device_mesh: a `torch.distributed.device_mesh.DeviceMesh` of all devices, or a `Mesh`.
        placements: `Shard` or `Replicate` for each axis of the mesh; by default each device has all of the tensor.

    Raises:
        ShardingError: the mesh does not have all devices, or a placement does not fit the mesh or the tensor.

    Source: `torch_xla.distributed.spmd.xla_distribute_tensor`.
    """
    mesh = mesh_of(device_mesh)
    if placements is not None and len(placements) != len(mesh.mesh_shape):
        raise errors.ShardingError(
            f"`placements` must have the same length as `device_mesh.ndim`: {len(placements)}, "
            f"not {len(mesh.mesh_shape)}",
            where=source.user_line(),
            next="pass Shard(dim) or Replicate() for each axis of the mesh",
        )
    moved = tensor if tensor.device == ltc.lazy_device() else tensor.to(ltc.lazy_device())
    if isinstance(tensor, nn.Parameter) and moved is not tensor:
        moved = nn.Parameter(moved.detach(), requires_grad=tensor.requires_grad)
    return mark_sharding(moved, mesh, spec_of(tensor.ndim, placements or ()))


def xla_distribute_module(
    module: nn.Module,
    device_mesh: Any = None,
    partition_fn: Callable[[str, nn.Module, Any], None] | None = None,
    input_fn: Callable[..., Any] | None = None,
    output_fn: Callable[..., Any] | None = None,
) -> nn.Module:
    """Divide a module's parameters as `partition_fn(name, submodule, device_mesh)` says.

    Args:
        input_fn: called as `input_fn(module, inputs, device_mesh)` before each forward.
        output_fn: called as `output_fn(module, outputs, device_mesh)` after it.

    Source: `torch_xla.distributed.spmd.xla_distribute_module`.
    """
    if partition_fn is not None:
        for name, child in module.named_modules():
            partition_fn(name, child, device_mesh)
    if input_fn is not None:
        give = _with_mesh(input_fn, device_mesh)
        module.register_forward_pre_hook(lambda own, inputs: give(own, inputs))
    if output_fn is not None:
        take = _with_mesh(output_fn, device_mesh)
        module.register_forward_hook(lambda own, _, outputs: take(own, outputs))
    return module


def _with_mesh(function: Callable[..., Any], mesh: Any) -> Callable[[nn.Module, Any], Any]:
    count = len(inspect.signature(function).parameters)
    if count == 2:
        return lambda own, data: function(data, mesh)
    if count == 3:
        return lambda own, data: function(own, data, mesh)
    raise ValueError(
        f"input_fn and output_fn should take in 3 arguments, but got {count} arguments!"
    )


def mesh_of(mesh: Any) -> Mesh:
    """The mesh of a `DeviceMesh`.

    Raises:
        ShardingError: it does not have all devices.
    """
    if isinstance(mesh, Mesh):
        return mesh
    if mesh.size() != num_devices():
        raise errors.ShardingError(
            f"a mesh of {mesh.size()} devices; there are {num_devices()}",
            where=source.user_line(),
            next=f"LTC_EXECUTOR=jax LTC_NUM_DEVICES={mesh.size()} makes {mesh.size()} devices of a CPU",
        )
    return Mesh(mesh.mesh.flatten().tolist(), tuple(mesh.mesh.size()), mesh.mesh_dim_names)


def _is(placement: Any, kind: str) -> bool:
    """Whether a placement is of a kind; its classes are not imported, which takes long."""
    return hasattr(placement, kind) and bool(getattr(placement, kind)())


def spec_of(num_dims: int, placements: Sequence[Any]) -> tuple[Any, ...]:
    """The spec of placements, for a tensor of so many dimensions.

    Raises:
        ShardingError: one is neither `Shard` of a dimension that is there nor `Replicate`.
    """
    spec: list[tuple[int, ...]] = [()] * num_dims
    for axis, placement in enumerate(placements):
        if _is(placement, "is_shard") and -num_dims <= placement.dim < num_dims:
            spec[placement.dim] += (axis,)
        elif not _is(placement, "is_replicate"):
            raise errors.ShardingError(
                f"Unsupported placement: {placement!r} of a tensor of {num_dims} dimensions",
                where=source.user_line(),
                next="pass Shard(dim), with a dimension that the tensor has, or Replicate()",
            )
    return tuple(axes[0] if len(axes) == 1 else axes or None for axes in spec)
