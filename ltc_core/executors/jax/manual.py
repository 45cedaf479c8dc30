"""Manual tensors as arrays: one more dimension, the first, with an element for each device of the mesh.

`split` and `join` make them of whole arrays and back; `on_each_device` calls a function on each device's element. Data
of a manual tensor keep that dimension between programs, so their number of dimensions shows what they are. Used by
`lowering`, `launch` and `device`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax import lax
from jax import numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from ltc_core.errors import ShardingError
from ltc_core.executors.jax.library import devices_of_mesh
from ltc_core.executors.jax.mesh import axes_of, named
from ltc_core.executors.jax.table import Array
from ltc_core.graph.ir import Node, TensorMeta
from ltc_core.graph.manual_sharding import FIRST, Misused
from ltc_core.graph.sharding import Sharding

__all__ = ["is_manual", "join", "layout", "no_rule", "on_each_device", "split"]


def is_manual(data: Any, meta: TensorMeta) -> bool:
    """Whether data of the device are those of a manual tensor of this meta."""
    return bool(data.ndim > len(meta.size))


def no_rule(node: Node, why: str) -> Misused:
    """What is raised for an op on manual tensors that cannot be lowered: the host cannot run it on each device."""
    error = ShardingError(
        f"{node.op} cannot run on manual tensors",
        got=why,
        where=node.line,
        next="disable_manual_sharding before it; on a whole tensor an op without a rule runs on the host",
    )
    return Misused(node, error)


def layout() -> NamedSharding:
    """How arrays of manual tensors lie: one element of the first dimension on each device, in the order of numbers."""
    count = len(devices_of_mesh())
    return named(Sharding(tuple(range(count)), (count,), ((0,),)))


def on_each_device(
    run: Callable[[Sequence[Array]], Sequence[Array]],
    inputs: Sequence[Array],
    are_manual: Sequence[bool],
) -> list[Array]:
    """Results of a function on each device's element of the manual inputs, and on the whole of the others."""
    lies = layout()
    whole = PartitionSpec()

    def call(*given: Array) -> list[Array]:
        own = [lax.squeeze(x, (0,)) if m else x for x, m in zip(given, are_manual, strict=True)]
        return [jnp.expand_dims(found, 0) for found in run(own)]

    specs = tuple(lies.spec if m else whole for m in are_manual)
    there = jax.shard_map(
        call, mesh=lies.mesh, in_specs=specs, out_specs=lies.spec, check_vma=False
    )
    return there(*inputs)  # type: ignore[no-any-return]


def split(x: Array, text: str, which: str) -> Array:
    """The part of each device. With FIRST, of several devices with one part all but the first get zeros."""
    sharding = Sharding.of(text)
    lies = named(sharding)
    copied = [n for axis in _unused(sharding) for n in axes_of(sharding, axis)]

    def call(part: Array) -> Array:
        if which == FIRST and copied:
            is_first = sum(lax.axis_index(name) for name in copied) == 0
            part = jnp.where(is_first, part, jnp.zeros_like(part))
        return jnp.expand_dims(part, 0)

    everywhere = PartitionSpec(lies.mesh.axis_names)
    parts = jax.shard_map(
        call, mesh=lies.mesh, in_specs=(lies.spec,), out_specs=everywhere, check_vma=False
    )
    return parts(x)


def join(x: Array, text: str, which: str, is_whole: bool) -> Array:
    """The whole array of each device's part. If several devices have a part, that of the first, or the sum of them.

    Args:
        is_whole: whether `x` is the same on each device, and has no dimension for them.
    """
    sharding = Sharding.of(text)
    if is_whole:
        x = jnp.broadcast_to(x, (math.prod(sharding.mesh), *x.shape))
    local = x.shape[1:]
    x = x.reshape(*sharding.mesh, *local)
    unused = _unused(sharding)
    if which == FIRST:
        x = x[tuple(0 if axis in unused else slice(None) for axis in range(len(sharding.mesh)))]
    elif unused:
        x = x.sum(tuple(unused), dtype=x.dtype)
    left = [axis for axis in range(len(sharding.mesh)) if axis not in unused]
    order: list[int] = []
    for dim, axes in enumerate(sharding.spec):
        order += [*(left.index(axis) for axis in axes), len(left) + dim]
    sizes = [n * sharding.parts(dim) for dim, n in enumerate(local)]
    return lax.with_sharding_constraint(x.transpose(order).reshape(sizes), named(sharding))


def _unused(sharding: Sharding) -> list[int]:
    """Axes of the mesh along which the devices have equal parts."""
    used = {axis for axes in sharding.spec for axis in axes}
    return [axis for axis in range(len(sharding.mesh)) if axis not in used]
