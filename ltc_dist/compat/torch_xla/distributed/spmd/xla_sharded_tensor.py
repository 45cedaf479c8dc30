"""`torch_xla.distributed.spmd.xla_sharded_tensor`: marked tensors with torch_xla's attributes.

A marked tensor is an ordinary tensor of the device, so the attributes are those of all its tensors.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Sequence
from types import EllipsisType
from typing import Any

import torch

from ltc_core import source
from ltc_core.api.sharding import NewParts, parts_of
from ltc_core.api.verbs import is_lazy_tensor, lazy_device
from ltc_core.errors import ShardingError
from ltc_core.tensor.lazy_tensor import LazyTensor
from ltc_dist.compat.dtensor_names import METHODS, wrap_as_sharded_tensor
from ltc_dist.compat.torch_xla.distributed.spmd.xla_sharding import (
    ShardingType,
    has_parts,
    sharding_type_of,
)
from ltc_dist.compat.xla_text import sharding_text, tiles_of
from ltc_dist.spmd import is_manual, local_shards, sharding_of

__all__ = ["LocalShardsError", "XLAShard", "XLAShardedTensor"]


class LocalShardsError(ShardingError, RuntimeError):
    """Parts do not fit the tensor that they are loaded into."""


@dataclasses.dataclass
class XLAShard:
    """A part of a tensor, with the name of its device.

    Attributes:
        data: a copy of the part, on the CPU. Where a dimension is not divided evenly, the last parts are filled up
            with zeros: all have one shape.
        indices: where it is in the tensor, a slice for each dimension; `...` if it is all of the tensor.
        shard_device: name of its device.
        replica_id: which of the copies of the part it is; of a tensor that is whole on all devices, the device.
    """

    data: torch.Tensor
    indices: EllipsisType | list[slice]
    shard_device: str
    replica_id: int

    @property
    def unpadded_data(self) -> torch.Tensor:
        """The part without the zeros that fill it up."""
        if self.indices is ...:
            return self.data
        sizes = zip(self.indices, self.data.shape, strict=True)
        own = tuple(slice(0, min(of_dim.stop - of_dim.start, size)) for of_dim, size in sizes)
        return self.data[own]


class _Marked(type):
    def __instancecheck__(cls, instance: object) -> bool:
        return isinstance(instance, torch.Tensor) and (
            sharding_of(instance) is not None or is_manual(instance)
        )


class XLAShardedTensor(metaclass=_Marked):
    """For `isinstance`: whether a tensor is marked. Called, it is `wrap_as_sharded_tensor`.

    A tensor of the CPU is copied to the device.
    """

    def __new__(  # type: ignore[misc]
        cls,
        elem: torch.Tensor,
        mesh_shape: Sequence[int] | None = None,
        partition_spec: Sequence[Any] | None = None,
        *,
        requires_grad: bool = False,
    ) -> torch.Tensor:
        there = elem if is_lazy_tensor(elem) else elem.to(lazy_device())
        marked = wrap_as_sharded_tensor(there, mesh_shape, partition_spec)
        return marked.requires_grad_() if requires_grad else marked


def _is_uneven(t: torch.Tensor) -> bool:
    """Whether a mark divides a dimension of a tensor into parts that are not of one size. Its memory is not divided."""
    found = sharding_of(t)
    if found is None or is_manual(t):  # a manual tensor has the shape of one part
        return False
    sharding = found[0].sharding(found[1])
    return any(size % sharding.parts(dim) for dim, size in enumerate(t.shape))


def _filled_up(t: torch.Tensor) -> list[XLAShard]:
    """The parts of such a tensor as torch_xla has them: of one shape, the last ones filled up with zeros."""
    mesh, spec = sharding_of(t) or (None, ())
    assert mesh is not None
    tiles, devices = tiles_of(mesh.sharding(spec))
    count = math.prod(tiles[t.ndim :])
    whole, local = t.detach().cpu(), {part.device for part in parts_of(t)}
    sizes = [-(-size // n) for size, n in zip(t.shape, tiles, strict=False)]
    found = []
    for at, place in enumerate(itertools.product(*map(range, tiles[: t.ndim]))):
        firsts = [k * size for k, size in zip(place, sizes, strict=True)]
        ends = zip(firsts, sizes, t.shape, strict=True)
        indices = [slice(min(a, n), min(a + size, n), 1) for a, size, n in ends]
        own = whole[tuple(indices)]
        data = own.new_zeros(sizes)
        data[tuple(map(slice, own.shape))] = own
        found += [
            XLAShard(data, indices, f"{t.device.type.upper()}:{device}", copy)
            for copy, device in enumerate(devices[at * count : (at + 1) * count])
            if device in local
        ]
    return sorted(found, key=lambda shard: int(shard.shard_device.rpartition(":")[2]))


def _shards(t: torch.Tensor) -> list[XLAShard]:
    if _is_uneven(t):
        return _filled_up(t)
    name, copies = t.device.type.upper(), _copies(t)
    found = []
    for part in local_shards(t):
        indices: EllipsisType | list[slice] = ...
        if part.data.shape != t.shape:
            sizes = zip(part.offsets, part.data.shape, strict=True)
            indices = [slice(first, first + size, 1) for first, size in sizes]
        copy = part.device if copies is None else copies[part.device]
        found.append(XLAShard(part.data, indices, f"{name}:{part.device}", copy))
    return found


def _copies(t: torch.Tensor) -> dict[int, int] | None:
    """Device -> which of the copies of its part it has; None if each device has a whole value."""
    if not has_parts(t):
        return None
    mesh, spec = sharding_of(t) or (None, ())
    assert mesh is not None
    sharding = mesh.sharding(spec)
    dividing = list(itertools.chain(*sharding.spec))
    copying = [axis for axis in range(len(sharding.mesh)) if axis not in dividing]
    count = math.prod(sharding.mesh[axis] for axis in copying)
    devices = torch.tensor(sharding.devices).reshape(sharding.mesh).permute(*dividing, *copying)
    return {device: at % count for at, device in enumerate(devices.flatten().tolist())}


def _load_local_shards(t: LazyTensor, shards: Sequence[XLAShard]) -> None:
    """Replace the values of a divided tensor by those of its parts on the devices of this process.

    Of parts that are copies of each other, the first is taken.

    Args:
        shards: as `local_shards` returns them, with other `data`.

    Raises:
        LocalShardsError: a part is missing or has another shape, or the tensor is not divided.

    Cost: cuts, and waits for the tensor.

    Source: `torch_xla.distributed.spmd.XLAShardedTensor.load_local_shards_`.
    """
    if _is_uneven(t) and _of_one_shape(t, shards):
        whole = t.detach().cpu()
        for shard in shards:
            whole[shard.indices if shard.indices is ... else tuple(shard.indices)] = (
                shard.unpadded_data
            )
        with torch.no_grad():
            t.copy_(whole)
        return
    there = local_shards(t)
    name, given = t.device.type.upper(), {shard.shard_device: shard.data for shard in shards}
    shapes = [tuple(part.data.shape) for part in there]
    found = [given.get(f"{name}:{part.device}") for part in there]
    if _copies(t) is None or shapes != [None if d is None else tuple(d.shape) for d in found]:
        raise LocalShardsError(
            "these parts cannot be loaded into the tensor",
            got=f"{len(shards)} parts for a tensor of {list(t.shape)}, {sharding_text(t) or 'not divided'}",
            where=source.user_line(),
            next="pass what t.local_shards returned, of a divided tensor, with other data of the same shapes",
        )
    new = NewParts(t)
    sent: set[tuple[int, ...]] = set()
    for part, data in zip(there, found, strict=True):
        if part.offsets not in sent and data is not None:
            sent.add(part.offsets)
            new.put(part.offsets, data.detach().to(t.dtype, copy=True).contiguous())


def _of_one_shape(t: torch.Tensor, shards: Sequence[XLAShard]) -> bool:
    """Whether shards have the devices and the shapes that `_filled_up` returns."""
    there = {shard.shard_device: shard.data.shape for shard in _filled_up(t)}
    return there == {shard.shard_device: shard.data.shape for shard in shards}


def _mesh_shape(t: torch.Tensor) -> tuple[int, ...] | None:
    found = sharding_of(t)
    return found[0].mesh_shape if found is not None else None


def _partition_spec(t: torch.Tensor) -> tuple[Any, ...] | None:
    found = sharding_of(t)
    return found[1] if found is not None else None


def _sharding_type(t: torch.Tensor) -> ShardingType:
    return sharding_type_of(t)


for _name, _read in {
    "global_tensor": lambda t: t,
    "local_shards": _shards,
    "mesh_shape": _mesh_shape,
    "partition_spec": _partition_spec,
    "sharding_spec": sharding_text,
    "sharding_type": _sharding_type,
}.items():
    setattr(LazyTensor, _name, property(_read))
for _name, _member in METHODS.items():
    setattr(LazyTensor, _name, _member)
LazyTensor.load_local_shards_ = _load_local_shards  # type: ignore[attr-defined]
