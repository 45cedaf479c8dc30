"""Shardings: how a tensor is divided over the devices of a mesh, and the op that says so in a graph.

The op `SHARD` computes nothing: its result is its operand, divided as its text says. `executors.jax` gives it to
the compiler; on any other executor it is the identity. Recorded by `api.sharding`.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import math
from collections.abc import Callable
from typing import Any

import torch

__all__ = ["SHARD", "Part", "Sharding"]


@dataclasses.dataclass(frozen=True)
class Sharding:
    """How a tensor is divided over a mesh of devices.

    Attributes:
        devices: numbers of the devices, in the order of the mesh's elements.
        mesh: its size along each of its axes.
        spec: for each dimension of the tensor the axes of the mesh that divide it; none: each device has all of it.
    """

    devices: tuple[int, ...]
    mesh: tuple[int, ...]
    spec: tuple[tuple[int, ...], ...]

    @property
    def text(self) -> str:
        return json.dumps([self.devices, self.mesh, self.spec], separators=(",", ":"))

    @staticmethod
    @functools.lru_cache(maxsize=1024)
    def of(text: str) -> Sharding:
        """The sharding of a text."""
        devices, mesh, spec = json.loads(text)
        return Sharding(tuple(devices), tuple(mesh), tuple(map(tuple, spec)))

    def parts(self, dim: int) -> int:
        """Parts that a dimension is divided into."""
        return math.prod(self.mesh[axis] for axis in self.spec[dim])


@dataclasses.dataclass(frozen=True)
class Part:
    """The part of a tensor that is on one device of this process.

    Attributes:
        device: number of the device in the mesh.
        offsets: index of the part's first element, along each dimension of the tensor.
        sizes: size of the part.
        is_chosen: true for exactly one of the equal parts on all devices of the mesh.
        read: returns a copy of the part on the CPU.
    """

    device: int
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    is_chosen: bool
    read: Callable[[], torch.Tensor]


_library: Any = torch.library.Library("ltc_sharding", "FRAGMENT")  # type: ignore[no-untyped-call]
_library.define("shard(Tensor value, str sharding) -> Tensor")
_library.impl("shard", lambda value, sharding: torch.empty_like(value), "Meta")
for _key in ("CPU", "CUDA"):
    _library.impl("shard", lambda value, sharding: value.clone(), _key)
# torch 2.9 has no fallback kernel for this key.
_library.impl("shard", torch.library.fallthrough_kernel, "AutogradPrivateUse1")

SHARD: torch._ops.OpOverload = torch.ops.ltc_sharding.shard.default
