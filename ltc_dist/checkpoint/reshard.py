"""State of divided parameters for another number of processes: the saved shards are cut anew.

It is that of a ZeroRedundancyOptimizer, or of what `fully_sharded.checkpointed` wraps. A parameter's state is a vector,
padded with zeros to a length that the number of processes divides; each process has saved one shard of it. A process of
a job of another size reads the saved shards that its own shard overlaps. Numbers such as `step` are the same in all
shards. `why_not` refuses what is neither. Called by `reading`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import torch

from ltc_core.serialization.directory import StoredTensor
from ltc_dist.fully_sharded.shards import ShardLayout

__all__ = ["is_sharded", "reshard", "why_not"]

_SHARDED = {"base_state", "param_groups", "shape_info", "shard"}
_WEIGHTS = "sharded_master_weights"


def is_sharded(keys: Collection[str]) -> bool:
    """Whether a state with these keys is that of divided parameters."""
    return _SHARDED <= set(keys)


def why_not(states: Sequence[dict[str, Any]]) -> str:
    """Why shards cannot be cut anew; "" if they can. All processes find the same.

    Args:
        states: by rank, with a StoredTensor for each tensor.

    Cost: reads the tensors of one number, of all ranks.
    """
    first, count = states[0], len(states)
    for rank, state in enumerate(states):
        if list(state["shard"]) != [rank, count]:
            position, size = state["shard"]
            return (
                f"rank {rank} saved shard {position} of {size}, expected shard {rank} of {count}: sharding_groups "
                "split the processes, or other processes did not save theirs"
            )
    flat = _flat_keys(first)
    expected = _facts(first, flat)
    for rank, state in enumerate(states[1:], start=1):
        where = _difference(expected, _facts(state, flat))
        if where:
            return f"rank {rank} saved another {where} than rank 0"
    return _why_not_flat(first, flat)


def reshard(states: Sequence[dict[str, Any]], rank: int, world_size: int) -> dict[str, Any]:
    """Return the state of one process of `world_size`, with its tensors on the CPU; `why_not` must be "".

    Args:
        states: by rank, with a StoredTensor for each tensor.

    Raises:
        CheckpointError: a file is damaged; names it.

    Cost: reads the shards that overlap the new one; host memory of the new state and one saved shard.
    """
    first = states[0]
    flat = _flat_keys(first)

    def cut(index: int, *path: Any) -> torch.Tensor:
        pieces = [_at(state, path) for state in states]
        shape = _local_shape(first, index, world_size)
        return _cut(pieces, math.prod(first["shape_info"][index]), rank, shape)

    found = {key: _read(first[key]) for key in first if key not in ("base_state", _WEIGHTS)}
    found |= {"shard": [rank, world_size], "ranks": list(range(world_size))}
    found["base_state"] = {
        index: {
            key: cut(index, "base_state", index, key) if key in flat else _read(value)
            for key, value in row.items()
        }
        for index, row in first["base_state"].items()
    }
    if _WEIGHTS in first:
        found[_WEIGHTS] = {index: cut(index, _WEIGHTS, index) for index in first[_WEIGHTS]}
    return found


def _cut(
    pieces: Sequence[StoredTensor], num_elements: int, rank: int, shape: torch.Size
) -> torch.Tensor:
    """Shard of one vector, in its shape: read the pieces that it overlaps, without their padding, and pad it."""
    old, new = math.prod(pieces[0].shape), math.prod(shape)
    start, end = (min(edge * new, num_elements) for edge in (rank, rank + 1))
    parts = []
    at = start
    while at < end:
        number, offset = divmod(at, old)
        length = min(end, (number + 1) * old) - at
        parts.append(pieces[number].read().detach().reshape(-1)[offset : offset + length])
        at += length
    parts.append(torch.zeros(new - (end - start), dtype=pieces[0].dtype))
    return torch.cat(parts).view(shape)


def _local_shape(state: Mapping[str, Any], index: Any, count: int) -> torch.Size:
    """Of the shard of a parameter, in a job of `count` processes."""
    options = state.get("layouts", {}).get(index, {})  # a ZeroRedundancyOptimizer has none
    return ShardLayout([torch.Size(state["shape_info"][index])], count, **options).local_shape


def _flat_keys(state: Mapping[str, Any]) -> set[Any]:
    """Keys of the parameters' state that have the shape of the shard, for each parameter that has them."""
    found: dict[Any, bool] = {}
    for index, row in state["base_state"].items():
        shape = tuple(_local_shape(state, index, state["shard"][1]))
        for key, value in row.items():
            is_flat = isinstance(value, StoredTensor) and tuple(value.shape) == shape
            found[key] = found.get(key, True) and is_flat
    return {key for key, is_flat in found.items() if is_flat}


def _why_not_flat(state: Mapping[str, Any], flat: Collection[Any]) -> str:
    """Why some state is neither a shard of a vector nor a number; "" if there is none such."""
    for index, row in state["base_state"].items():
        for key, value in row.items():
            shapes: list[tuple[int, ...]] = []
            _mapped(value, lambda tensor: shapes.append(tensor.shape))  # noqa: B023
            large = [shape for shape in shapes if math.prod(shape) != 1]
            if key not in flat and large:
                return (
                    f"{key!r} of parameter {index} has a tensor of shape {large[0]}; expected vectors as long as the "
                    "shard, and numbers"
                )
    return ""


def _facts(state: Mapping[str, Any], flat: Collection[Any]) -> dict[str, Any]:
    """What must be the same in all processes: numbers by value, shards by their dtype and shape."""

    def kind(tensor: StoredTensor) -> Any:
        return tensor.dtype, tensor.shape

    def number(tensor: StoredTensor) -> Any:
        is_number = math.prod(tensor.shape) == 1
        return kind(tensor), repr(tensor.read().tolist()) if is_number else ""

    rows = {
        f"parameter {index}": {
            key: _mapped(value, kind if key in flat else number) for key, value in row.items()
        }
        for index, row in state["base_state"].items()
    }
    groups = {f"group {k}": _mapped(g, number) for k, g in enumerate(state["param_groups"])}
    shapes = {"shape_info": {k: tuple(shape) for k, shape in state["shape_info"].items()}}
    shapes["layouts"] = state.get("layouts", {})
    return {**shapes, **groups, **rows, _WEIGHTS: _mapped(state.get(_WEIGHTS), kind)}


def _difference(one: Any, other: Any, where: str = "") -> str:
    """Where two trees differ first, such as 'lr of group 0'; "" if they do not."""
    if isinstance(one, dict) and isinstance(other, dict):
        for key in [*one, *(key for key in other if key not in one)]:
            place = f"{key} of {where}" if where else str(key)
            if key not in one or key not in other:
                return place
            found = _difference(one[key], other[key], place)
            if found:
                return found
        return ""
    is_same = one == other or (one != one and other != other)  # NaN
    return "" if is_same else where or "state"


def _at(tree: Any, path: Sequence[Any]) -> Any:
    for key in path:
        tree = tree[key]
    return tree


def _read(tree: Any) -> Any:
    return _mapped(tree, lambda tensor: tensor.read())


def _mapped(tree: Any, leaf: Callable[[StoredTensor], Any]) -> Any:
    """A tree with `leaf(tensor)` in the place of each StoredTensor."""
    if isinstance(tree, StoredTensor):
        return leaf(tree)
    if isinstance(tree, dict):
        return {key: _mapped(value, leaf) for key, value in tree.items()}
    if type(tree) in (list, tuple):
        return type(tree)(_mapped(value, leaf) for value in tree)
    return tree
