"""Manual tensors as arrays: one more dimension, the first, with an element for each device of the mesh.

`call` makes them of whole arrays and back, and sends values between the devices; `on_each_device` calls a function on
each device's element. Data of a manual tensor keep that dimension between programs, so their number of dimensions shows
what they are. Used by `lowering`, `launch` and `device`.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
import torch
from jax import lax
from jax import numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from ltc_core.errors import ShardingError
from ltc_core.executors.jax.collectives import FOLDS
from ltc_core.executors.jax.library import devices_of_mesh
from ltc_core.executors.jax.mesh import axes_of, named
from ltc_core.executors.jax.table import Array
from ltc_core.graph.ir import Node, TensorMeta
from ltc_core.graph.manual_sharding import (
    ALL_GATHER,
    ALL_REDUCE,
    ALL_TO_ALL,
    FIRST,
    JOIN,
    PERMUTE,
    REDUCE_SCATTER,
    SPLIT,
    Misused,
)
from ltc_core.graph.sharding import Sharding

__all__ = ["call", "is_manual", "layout", "no_rule", "on_each_device"]

_AXIS = "devices"


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


def call(node: Node, x: Array, is_whole: bool) -> Array:
    """Result of SPLIT, JOIN, or an exchange.

    Args:
        is_whole: whether `x` is the same on each device, and has no dimension for them.
    """
    args = node.args[1:]
    if node.op is SPLIT:
        return _split(x, *args)
    if is_whole:
        x = jnp.broadcast_to(x, (len(devices_of_mesh()), *x.shape))
    if node.op is JOIN:
        return _join(x, *args)
    return _exchanged(node.op, x, *args)


def _split(x: Array, text: str, which: str) -> Array:
    """The part of each device. With FIRST, of several devices with one part all but the first get zeros."""
    sharding = Sharding.of(text)
    lies = named(sharding)
    copied = [n for axis in _unused(sharding) for n in axes_of(sharding, axis)]

    def take(part: Array) -> Array:
        if which == FIRST and copied:
            is_first = sum(lax.axis_index(name) for name in copied) == 0
            part = jnp.where(is_first, part, jnp.zeros_like(part))
        return jnp.expand_dims(part, 0)

    everywhere = PartitionSpec(lies.mesh.axis_names)
    parts = jax.shard_map(
        take, mesh=lies.mesh, in_specs=(lies.spec,), out_specs=everywhere, check_vma=False
    )
    return _in_order(parts(x), np.argsort(sharding.devices).tolist())


def _join(x: Array, text: str, which: str) -> Array:
    """The whole array of each device's part. If several devices have a part, that of the first, or the sum of them."""
    sharding = Sharding.of(text)
    local = x.shape[1:]
    x = _in_order(x, sharding.devices).reshape(*sharding.mesh, *local)
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


def _in_order(x: Array, order: Sequence[int]) -> Array:
    """Elements of the first dimension in another order: that of a mesh's devices, or back to that of their numbers."""
    if list(order) == list(range(len(order))):
        return x
    return x[np.array(order)]


def _unused(sharding: Sharding) -> list[int]:
    """Axes of the mesh along which the devices have equal parts."""
    used = {axis for axes in sharding.spec for axis in axes}
    return [axis for axis in range(len(sharding.mesh)) if axis not in used]


def _exchanged(op: torch._ops.OpOverload, x: Array, *args: Any) -> Array:
    """What each device gets of the values of all."""
    mesh = Mesh(np.array(devices_of_mesh(), dtype=object), [_AXIS])
    *where, text = args

    def send(own: Array) -> Array:
        found = _EXCHANGES[op](lax.squeeze(own, (0,)), json.loads(text), *where)
        return jnp.expand_dims(found, 0)

    each = PartitionSpec(_AXIS)
    there = jax.shard_map(send, mesh=mesh, in_specs=each, out_specs=each, check_vma=False)
    return lax.with_sharding_constraint(there(x), layout())


Groups = list[list[int]]


def _all_reduce(x: Array, groups: Groups, kind: str) -> Array:
    reduced = {"sum": lax.psum, "min": lax.pmin, "max": lax.pmax}.get(kind)
    if reduced is not None and x.dtype != np.bool_:
        return reduced(x, _AXIS, axis_index_groups=groups).astype(x.dtype)
    return FOLDS[kind](lax.all_gather(x, _AXIS, axis_index_groups=groups))


def _all_gather(x: Array, groups: Groups, dim: int) -> Array:
    return lax.all_gather(x, _AXIS, axis_index_groups=groups, axis=dim, tiled=True)


def _reduce_scatter(x: Array, groups: Groups, dim: int) -> Array:
    return lax.psum_scatter(x, _AXIS, axis_index_groups=groups, scatter_dimension=dim, tiled=True)


def _all_to_all(x: Array, groups: Groups, split_dim: int, concat_dim: int) -> Array:
    return lax.all_to_all(x, _AXIS, split_dim, concat_dim, axis_index_groups=groups, tiled=True)


def _permute(x: Array, pairs: Groups) -> Array:
    return lax.ppermute(x, _AXIS, pairs)


_EXCHANGES: dict[torch._ops.OpOverload, Callable[..., Array]] = {
    ALL_REDUCE: _all_reduce,
    ALL_GATHER: _all_gather,
    REDUCE_SCATTER: _reduce_scatter,
    ALL_TO_ALL: _all_to_all,
    PERMUTE: _permute,
}
