"""Manual tensors: each device of a mesh has a value of its own, and ops compute it there without communication.

`SPLIT` makes a manual tensor of the parts of a whole one, `JOIN` is its inverse; the other `OPS` send values between
the devices. The meta of a manual tensor is that of one device. What an op makes of a manual operand is manual;
`manual_values` finds these values. A whole value among the operands is the same on each device. `executors.jax` lowers
all that. Recorded by `api.sharding` and `api.manual_collectives`.
"""

from __future__ import annotations

import json
from typing import Any, NoReturn

import torch

from ltc_core.errors import ShardingError
from ltc_core.graph.ir import Graph, Node, references
from ltc_core.graph.sharding import SHARD, Sharding

__all__ = [
    "ALL",
    "ALL_GATHER",
    "ALL_REDUCE",
    "ALL_TO_ALL",
    "FIRST",
    "JOIN",
    "OPS",
    "PERMUTE",
    "REDUCE_SCATTER",
    "SPLIT",
    "Misused",
    "manual_values",
    "value_error",
]

# What becomes of a part that several devices have. SPLIT: each of them gets it, or the first of them, and the others
# get zeros. JOIN: the sum is taken, or the value of the first. So the one is the other's gradient.
ALL, FIRST = "all", "first"
_TO_DO = "disable_manual_sharding(t, partition_spec, full_shape) makes a whole tensor of it"


def _split_meta(value: torch.Tensor, sharding: str, which: str) -> torch.Tensor:
    own = Sharding.of(sharding)
    return value.new_empty([size // own.parts(dim) for dim, size in enumerate(value.shape)])


def _join_meta(value: torch.Tensor, sharding: str, which: str) -> torch.Tensor:
    own = Sharding.of(sharding)
    return value.new_empty([size * own.parts(dim) for dim, size in enumerate(value.shape)])


def _size_of_group(groups: str) -> int:
    return len(json.loads(groups)[0])


def _resized(value: torch.Tensor, sizes: dict[int, int]) -> torch.Tensor:
    return value.new_empty([sizes.get(dim, size) for dim, size in enumerate(value.shape)])


def _same_meta(value: torch.Tensor, *args: object) -> torch.Tensor:
    return _resized(value, {})


def _all_gather_meta(value: torch.Tensor, dim: int, groups: str) -> torch.Tensor:
    return _resized(value, {dim: value.shape[dim] * _size_of_group(groups)})


def _reduce_scatter_meta(value: torch.Tensor, dim: int, groups: str) -> torch.Tensor:
    return _resized(value, {dim: value.shape[dim] // _size_of_group(groups)})


def _all_to_all_meta(
    value: torch.Tensor, split_dim: int, concat_dim: int, groups: str
) -> torch.Tensor:
    count = _size_of_group(groups)
    return _all_gather_meta(
        _resized(value, {split_dim: value.shape[split_dim] // count}), concat_dim, groups
    )


def _on_host(value: torch.Tensor, *args: object) -> NoReturn:
    raise ShardingError(
        "manual tensors cannot be made, joined or sent on the host",
        got="a program with manual tensors that runs op by op, after its compiled form has failed",
        next="see the error before; LTC_EXECUTOR=jax compiles such programs",
    )


_library: Any = torch.library.Library("ltc_sharding", "FRAGMENT")  # type: ignore[no-untyped-call]
_metas: dict[str, Any] = {
    "split(Tensor value, str sharding, str which)": _split_meta,
    "join(Tensor value, str sharding, str which)": _join_meta,
    # Groups: lists of the numbers of devices, all of one length, with each device in one; pairs: [from, to]. Both JSON.
    "all_reduce(Tensor value, str kind, str groups)": _same_meta,
    "all_gather(Tensor value, int dim, str groups)": _all_gather_meta,
    "reduce_scatter(Tensor value, int dim, str groups)": _reduce_scatter_meta,
    "all_to_all(Tensor value, int split_dim, int concat_dim, str groups)": _all_to_all_meta,
    "permute(Tensor value, str pairs)": _same_meta,
}
for _schema, _meta in _metas.items():
    _name = _schema.partition("(")[0]
    _library.define(f"{_schema} -> Tensor")
    _library.impl(_name, _meta, "Meta")
    for _key in ("CPU", "CUDA"):
        _library.impl(_name, _on_host, _key)
    # torch 2.9 has no fallback kernel for this key.
    _library.impl(_name, torch.library.fallthrough_kernel, "AutogradPrivateUse1")

SPLIT: torch._ops.OpOverload = torch.ops.ltc_sharding.split.default
JOIN: torch._ops.OpOverload = torch.ops.ltc_sharding.join.default
ALL_REDUCE: torch._ops.OpOverload = torch.ops.ltc_sharding.all_reduce.default
ALL_GATHER: torch._ops.OpOverload = torch.ops.ltc_sharding.all_gather.default
REDUCE_SCATTER: torch._ops.OpOverload = torch.ops.ltc_sharding.reduce_scatter.default
ALL_TO_ALL: torch._ops.OpOverload = torch.ops.ltc_sharding.all_to_all.default
PERMUTE: torch._ops.OpOverload = torch.ops.ltc_sharding.permute.default
OPS = frozenset({SPLIT, JOIN, ALL_REDUCE, ALL_GATHER, REDUCE_SCATTER, ALL_TO_ALL, PERMUTE})


class Misused(Exception):
    """A node does with a manual tensor what cannot be done; nothing has run.

    Attributes:
        node: the node.
        error: for the user.
    """

    def __init__(self, node: Node, error: ShardingError) -> None:
        super().__init__(str(error))
        self.node = node
        self.error = error


def manual_values(graph: Graph, inputs: frozenset[int]) -> frozenset[int]:
    """Numbers of the manual values of a graph, from those of its inputs.

    Raises:
        Misused: a manual value is split or sharded, or written into memory that is whole.
    """
    found = set(inputs)
    made: dict[int, Node] = {}
    read: set[int] = set()
    for node in graph.nodes:
        is_manual = any(value in found for value in references(node))
        if is_manual and node.op in (SPLIT, SHARD):
            error = ShardingError(
                "a manual tensor cannot be divided over a mesh: it is the part of one device",
                got=f"{node.op._opname} of a tensor of shape {_shape(node)}",
                where=node.line,
                next=f"{_TO_DO}, which can be divided",
            )
            raise Misused(node, error)
        own = range(node.first, node.first + len(node.outs))
        made.update(dict.fromkeys(own, node))
        is_manual = node.op is not JOIN and (is_manual or node.op in OPS)
        for value in node.writes if is_manual else ():
            if value not in found and not _is_scratch(value, made, read):
                error = ShardingError(
                    f"{node.op} writes a manual tensor into one that is the same on all devices",
                    got=f"memory of shape {_shape(node)}, which would differ between devices",
                    where=node.line,
                    next="enable_manual_sharding(w, (None, ...)) of a parameter before it is used with manual tensors "
                    "makes its gradient the sum over all devices; other memory: write into its manual tensor",
                )
                raise Misused(node, error)
        if is_manual:
            found.update(own)
        read.update(references(node)[len(node.writes) :])
    return frozenset(found)


def _shape(node: Node) -> tuple[int, ...]:
    return next((tuple(meta.size) for meta in reversed(node.outs) if meta is not None), ())


def _is_scratch(value: int, made: dict[int, Node], read: set[int]) -> bool:
    """Whether a value is a constant that the graph makes, such as zeros that a gradient is written into.

    One that an op has read is none: a parameter may begin as ones.
    """
    while value in made and value not in read:
        node = made[value]
        if not node.writes:
            return not references(node) and "generator" not in node.kwargs
        if "generator" in node.kwargs:
            return False
        value = node.writes[max(value - node.first_write, 0)]
    return False


def value_error(what: str, where: str) -> ShardingError:
    """The error of something that needs one value of a tensor, where each device has its own."""
    return ShardingError(
        f"{what}: each device has a value of its own",
        where=where,
        next=f"{_TO_DO}; ltc_dist.spmd.local_shards(t) are the values of the devices",
    )
