"""`torch_xla.distributed.spmd.xla_sharded_tensor`: marked tensors with torch_xla's attributes.

A marked tensor is an ordinary tensor of the device, so the attributes are those of all its tensors.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch

from ltc_core.tensor.lazy_tensor import LazyTensor
from ltc_dist.compat.torch_xla.distributed.spmd.xla_sharding import ShardingType, sharding_type_of
from ltc_dist.compat.xla_text import sharding_text
from ltc_dist.spmd import is_manual, local_shards, sharding_of

__all__ = ["XLAShard", "XLAShardedTensor"]


@dataclasses.dataclass
class XLAShard:
    """A part of a tensor, with the name of its device."""

    data: torch.Tensor
    shard_device: str

    @property
    def unpadded_data(self) -> torch.Tensor:
        """The part: parts are not padded here."""
        return self.data


class _Marked(type):
    def __instancecheck__(cls, instance: object) -> bool:
        return isinstance(instance, torch.Tensor) and (
            sharding_of(instance) is not None or is_manual(instance)
        )


class XLAShardedTensor(metaclass=_Marked):
    """For `isinstance`: whether a tensor is marked. Made by `mark_sharding` only."""


def _shards(t: torch.Tensor) -> list[XLAShard]:
    device = t.device.type.upper()
    return [XLAShard(part.data, f"{device}:{part.device}") for part in local_shards(t)]


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
