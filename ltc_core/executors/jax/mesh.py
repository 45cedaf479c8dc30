"""The devices of this process as a mesh, and how data lie on it.

Data are divided once somebody shards a tensor; then each program with such an input, or with a sharding in it, is one
program of all devices. XLA divides what nobody has divided, and inserts the collectives. Used by `device`, `launch` and
the rule of `SHARD`.
"""

from __future__ import annotations

import functools
from collections.abc import Hashable, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from ltc_core.executors.jax.library import devices
from ltc_core.graph.sharding import Sharding

__all__ = ["DeviceMesh", "is_divided", "named"]


def is_divided(data: Any) -> bool:
    """Whether data lie on several devices."""
    return len(data.sharding.device_set) > 1


@functools.lru_cache(maxsize=1024)
def named(sharding: Sharding) -> NamedSharding:
    """JAX's form of a sharding."""
    known = devices()
    grid = np.array([known[k] for k in sharding.devices], dtype=object).reshape(sharding.mesh)
    names = [f"axis{k}" for k in range(len(sharding.mesh))]
    spec = [tuple(names[axis] for axis in axes) or None for axes in sharding.spec]
    return NamedSharding(Mesh(grid, names), PartitionSpec(*spec))


@functools.lru_cache(maxsize=4096)
def _text(sharding: Any, num_dims: int) -> str:
    """Text that is equal for equal divisions, whatever names their axes have."""
    return str(sharding._to_xla_hlo_sharding(num_dims))


class DeviceMesh:
    """All devices of this process.

    Attributes:
        is_used: whether a tensor was ever sharded.
    """

    def __init__(self) -> None:
        self.devices = devices()
        self.is_used = False
        self.whole = NamedSharding(
            Mesh(np.array(self.devices, dtype=object), ["all"]), PartitionSpec()
        )

    def placement(self, inputs: Sequence[Any]) -> Hashable:
        """How inputs are divided; None if none is. Cost: 1 us an input once a tensor was sharded, else nothing."""
        if not self.is_used:
            return None
        found = tuple(_text(x.sharding, x.ndim) if is_divided(x) else "" for x in inputs)
        return found if any(found) else None

    def text_of(self, shardings: Sequence[Any], num_dims: Sequence[int]) -> str:
        """Text of how the inputs of a program lie, for the key of programs on disk."""
        if not self.is_used:
            return ""
        return " ".join(_text(at, count) for at, count in zip(shardings, num_dims, strict=True))

    def spread(self, data: Any) -> Any:
        """Data on all devices: as they are divided, else a copy on each."""
        return data if is_divided(data) else jax.device_put(data, self.whole)
