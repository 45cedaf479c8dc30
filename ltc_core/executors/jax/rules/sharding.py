"""How a result is divided over the devices of a mesh."""

from __future__ import annotations

from jax import lax

from ltc_core.executors.jax.mesh import named
from ltc_core.executors.jax.table import RULES, Array, Call
from ltc_core.graph.sharding import SHARD, Sharding

__all__: list[str] = []


def shard(c: Call, x: Array, text: str) -> Array:
    return lax.with_sharding_constraint(x, named(Sharding.of(text)))


RULES[SHARD] = shard
