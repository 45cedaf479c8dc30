"""XLA's `OpSharding`, and what `_XLAC` makes with it: tensors of parts, and conversions to manual ones and back.

Importing this gives `Mesh` a method that makes one of a partition spec.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from itertools import product
from typing import Any

import torch

import ltc_core as ltc
from ltc_core import source
from ltc_core.errors import ShardingError
from ltc_dist.compat.torch_xla.distributed.spmd.xla_sharding import ShardingType
from ltc_dist.compat.xla_text import tiles_of
from ltc_dist.job.ranks import ranks
from ltc_dist.spmd import (
    Mesh,
    disable_manual_sharding,
    enable_manual_sharding,
    is_manual,
    mark_sharding,
    num_devices,
    sharding_of,
)

__all__ = ["OpSharding", "global_tensor_from_cpu_shards", "to_full_shape", "to_shard_shape"]


class OpShardingError(ShardingError, RuntimeError):
    """Parts, a shape or a tensor do not fit an `OpSharding`."""


class OpSharding:
    """How a tensor is divided, as XLA writes it. `Mesh.get_op_sharding` makes it.

    Args:
        tile_assignment: nested lists of the numbers of the devices: for each dimension of the tensor one of its parts;
            of a PARTIAL one, a last dimension for the devices that have the same part. Empty if nothing is divided.
        group_assignment, replication_groups: accepted; they follow from `tile_assignment`.
        sharding_type: REPLICATED, TILED or PARTIAL.
    """

    def __init__(
        self,
        tile_assignment: Any,
        group_assignment: Any,
        replication_groups: Any,
        sharding_type: int,
    ) -> None:
        self.tile_assignment = torch.as_tensor(tile_assignment, dtype=torch.int64)
        self.sharding_type = ShardingType(sharding_type)

    def tiles(self, num_dims: int) -> tuple[int, ...]:
        """Parts of each dimension of a tensor.

        Raises:
            OpShardingError: the tensor has another number of dimensions.
        """
        if self.sharding_type is ShardingType.REPLICATED:
            return (1,) * num_dims
        shape = tuple(self.tile_assignment.shape)
        own = shape[:-1] if self.sharding_type is ShardingType.PARTIAL else shape
        if len(own) != num_dims:
            raise _misfit(f"a tensor of {num_dims} dimensions, {self}")
        return own

    def mesh_and_spec(self, num_dims: int) -> tuple[Mesh, tuple[Any, ...]]:
        """The mesh and the partition spec that divide a tensor so.

        Raises:
            OpShardingError: the tensor has another number of dimensions.
        """
        self.tiles(num_dims)
        if self.sharding_type is ShardingType.REPLICATED:
            return Mesh(range(num_devices()), (num_devices(),)), (None,) * num_dims
        devices = self.tile_assignment.flatten().tolist()
        return Mesh(devices, tuple(self.tile_assignment.shape)), tuple(range(num_dims))

    def __repr__(self) -> str:
        return f"OpSharding({self.tile_assignment.tolist()}, {self.sharding_type.name})"


@functools.lru_cache(maxsize=1024)
def _op_sharding(mesh: Mesh, spec: tuple[Any, ...]) -> OpSharding:
    shape, devices = tiles_of(mesh.sharding(spec))
    if math.prod(shape[: len(spec)]) == 1:
        return OpSharding([], [], [], ShardingType.REPLICATED)
    kind = ShardingType.PARTIAL if len(shape) > len(spec) else ShardingType.TILED
    return OpSharding(torch.tensor(devices).reshape(shape), [], [], kind)


def _get_op_sharding(self: Mesh, partition_spec: Sequence[Any]) -> OpSharding:
    """How `partition_spec` divides a tensor over the mesh, as XLA writes it.

    Raises:
        ShardingError: as `mark_sharding` does.
    """
    spec = tuple(tuple(axes) if isinstance(axes, list) else axes for axes in partition_spec)
    return _op_sharding(self, spec)


Mesh.get_op_sharding = _get_op_sharding  # type: ignore[attr-defined]


def global_tensor_from_cpu_shards(
    shards: Sequence[torch.Tensor],
    sharding: OpSharding,
    global_shape: Sequence[int] | None = None,
) -> torch.Tensor:
    """A tensor on the device, of its parts.

    Args:
        shards: CPU tensors of one shape and dtype, one for each device in the order of their numbers. Of those of
            devices that have the same part, the first is taken.
        global_shape: of the tensor. The last parts of a dimension may have more elements than are left for them: what
            is too much is dropped. By default the shape of all parts together.

    Raises:
        OpShardingError: there is not one part for each device, or the parts do not fit `global_shape`, or the job has
            several processes.
    """
    count = num_devices()
    sizes = {(tuple(shard.shape), shard.dtype) for shard in shards}
    if len(shards) != count or len(sizes) != 1 or ranks().world_size > 1:
        raise _misfit(
            f"{len(shards)} parts of {len(sizes)} shapes and dtypes, in one of {ranks().world_size} "
            f"processes; expected {count} parts of one shape and dtype in one process"
        )
    part = tuple(shards[0].shape)
    tiles = sharding.tiles(len(part))
    whole = tuple(size * tile for size, tile in zip(part, tiles, strict=True))
    shape = whole if global_shape is None else tuple(global_shape)
    expected = tuple(-(-size // tile) for size, tile in zip(shape, tiles, strict=False))
    if len(shape) != len(part) or expected != part:
        raise _misfit(f"parts of shape {part}, {sharding}, global_shape {shape}")
    found = torch.empty(whole, dtype=shards[0].dtype)
    owners = [0] if sharding.sharding_type is ShardingType.REPLICATED else None
    if owners is None:
        owners = sharding.tile_assignment.reshape(math.prod(tiles), -1)[:, 0].tolist()
    for owner, at in zip(owners, product(*map(range, tiles)), strict=True):
        place = tuple(slice(k * size, (k + 1) * size) for k, size in zip(at, part, strict=True))
        found[place] = shards[owner]
    kept = found[tuple(slice(0, size) for size in shape)].to(ltc.lazy_device())
    return mark_sharding(kept, *sharding.mesh_and_spec(len(part)))


def to_shard_shape(t: torch.Tensor) -> torch.Tensor:
    """A manual tensor: each device has its part of a marked one; see `enable_manual_sharding`.

    Raises:
        OpShardingError: the tensor is not marked.
    """
    found = sharding_of(t)
    if found is None:
        raise _misfit("a tensor that is not marked", "mark_sharding(t, mesh, partition_spec) first")
    return enable_manual_sharding(t, found[1], mesh=found[0])


def to_full_shape(
    t: torch.Tensor, sharding: OpSharding, shape: Sequence[int], dtype: torch.dtype
) -> torch.Tensor:
    """The whole tensor of a manual one; see `disable_manual_sharding`.

    Raises:
        OpShardingError: the tensor is not marked as manual, or has another dtype.
        ShardingError: `shape` is not that of all parts together.
    """
    if not is_manual(t) or t.dtype is not dtype:
        got = f"a tensor of {t.dtype} that is {'' if is_manual(t) else 'not '}marked as manual, {dtype}"
        raise _misfit(
            got, "pass what _spmd_full_to_shard_shape returned, or _mark_manual_sharding(t)"
        )
    mesh, spec = sharding.mesh_and_spec(t.ndim)
    return disable_manual_sharding(t, spec, tuple(shape), mesh=mesh)


def _misfit(got: str, todo: str = "") -> OpShardingError:
    return OpShardingError(
        "the tensors do not fit how they are to be divided",
        got=got,
        where=source.user_line(),
        next=todo
        or "pass mesh.get_op_sharding(partition_spec), and what the spec makes of the tensor",
    )
