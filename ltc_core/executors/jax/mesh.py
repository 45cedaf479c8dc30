"""The devices of this process as a mesh, and how data lie on it.

Data are divided once somebody shards a tensor; then each program with such an input, or with a sharding in it, is one
program of all devices. XLA divides what nobody has divided, and inserts the collectives. Used by `device`, `launch` and
the rule of `SHARD`.
"""

from __future__ import annotations

import functools
from collections.abc import Hashable, Sequence
from itertools import chain
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
    """JAX's form of a sharding.

    Each axis of the mesh becomes several, one for each prime factor of its size. JAX says how outputs lie in terms of
    the first input's mesh, and fails where XLA has divided an output into fewer parts than an axis has devices.
    """
    known = devices()
    factors = [_prime_factors(size) for size in sharding.mesh]
    names = [[f"axis{k}_{n}" for n in range(len(own))] for k, own in enumerate(factors)]
    grid = np.array([known[k] for k in sharding.devices], dtype=object)
    mesh = Mesh(grid.reshape(list(chain(*factors))), list(chain(*names)))
    spec = [tuple(chain(*(names[axis] for axis in axes))) or None for axes in sharding.spec]
    return NamedSharding(mesh, PartitionSpec(*spec))


def _prime_factors(n: int) -> list[int]:
    """Prime factors of a number, the small ones first."""
    found: list[int] = []
    factor = 2
    while n > 1:
        while n % factor == 0:
            found.append(factor)
            n //= factor
        factor += 1
    return found


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
        count = len(self.devices)
        self.whole = named(Sharding(tuple(range(count)), (count,), ()))

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
