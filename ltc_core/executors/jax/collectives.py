"""Collectives of all processes of a job as ops of a program, which then spans one device of each process.

A program with collectives is traced under JAX's shard_map: each process passes its own arrays as its parts of arrays of
the whole job, and takes its parts of the results. Such a program must be the same in all processes. So before each run
the processes compare theirs, by one small message through the group's `Transport`: where programs differ, the
collectives run on the host, whose messages tell who is at which one. Collectives of smaller groups always do. Used by
`device`, `launch` and `lowering`.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
import torch
from jax import lax
from jax import numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from ltc_core.executors.inductor import tier_report
from ltc_core.executors.jax.library import devices_of_ranks, why_alone
from ltc_core.executors.jax.table import Array
from ltc_core.graph import collective
from ltc_core.graph.collective import Route, is_scaled_first, ops, transport_of
from ltc_core.graph.ir import Node, Ref, TensorMeta, Write
from ltc_core.program.subgraph import Subgraph
from ltc_core.settings import settings

__all__ = ["AXIS", "FOLDS", "Collectives", "Joint", "call", "has_collectives"]

aten = torch.ops.aten
AXIS = "ranks"
_EACH = PartitionSpec(AXIS)
_INTEGERS = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}
# Views of all elements. A gradient is reduced through such ones, and its elements may be reduced in any order.
_REARRANGING = frozenset(
    {
        aten.t.default,
        aten.transpose.int,
        aten.permute.default,
        aten.view.default,
        aten.unsqueeze.default,
        aten.squeeze.dim,
        aten.squeeze.default,
        aten.alias.default,
        aten.detach.default,
    }
)
_ON_HOST = "they run on the host, through gloo, between two programs"


def has_collectives(subgraph: Subgraph) -> bool:
    """Whether nodes of a subgraph are collectives."""
    return any(node.op in collective.OPS for node in subgraph.graph.nodes)


class Collectives:
    """What programs that span the processes need: the mesh of one device of each, and arrays that lie on it.

    Attributes:
        devices: one of each process.
        is_off: whether all collectives run on the host; the same in all processes.
    """

    def __init__(self) -> None:
        self.devices = devices_of_ranks()
        self._line = ",".join(str(rank) for rank in range(len(self.devices)))
        self.is_off = not self.devices
        if why_alone():
            self._tell(why_alone())
        if self.devices:
            self.mesh = Mesh(np.array(self.devices, dtype=object), [AXIS])
            self._lies = NamedSharding(self.mesh, _EACH)

    def reduces_in_graph(self, node: Node) -> bool:
        """Whether a node's collective can be an op of a program; the same in all processes."""
        if self.is_off or Route.of(node.args[-1]).line != self._line:
            return False
        rule = _RULES.get(node.op)
        return rule is not None and _is_plain(node) and _takes(node)

    def turn_off(self) -> None:
        """Run collectives on the host from now on: the processes divide their programs at different ones."""
        self.is_off = True
        self._tell("the processes run programs with different collectives")

    def note_unlike(self, where: str) -> None:
        """Say that the collectives of a program run on the host, because other processes run another program."""
        self._tell(f"the programs of the processes differ beside them, such as that of {where}")

    def _tell(self, why: str) -> None:
        tier_report.refuse(
            f"collectives of all processes: {why}", _ON_HOST, is_printed=settings.explain
        )

    # -- arrays of the job ----------------------------------------------------------------------

    @property
    def count(self) -> int:
        return len(self.devices)

    @property
    def is_cpu(self) -> bool:
        return bool(self.devices[0].platform == "cpu")

    def described(self, size: Sequence[int], dtype: Any) -> Any:
        """How a program is told of an input of this size in each process."""
        return jax.ShapeDtypeStruct(self._size(size), dtype, sharding=self._lies)

    def whole(self, data: Any) -> Any:
        """The array of the job of which `data` are this process's part. Cost: 25 us.

        The arrays that a program has returned cannot be kept for the next run: each holds its part.
        """
        part = data if data.ndim else jnp.reshape(data, (1,))
        return jax.make_array_from_single_device_arrays(self._size(data.shape), self._lies, [part])

    def _size(self, size: Sequence[int]) -> tuple[int, ...]:
        first, *rest = size or (1,)
        return (first * self.count, *rest)

    def spanning(
        self, run: Callable[..., list[Array]], sizes: Sequence[Sequence[int]], ranks: Sequence[int]
    ) -> Callable[..., Any]:
        """`run`, which computes with parts, as a function of arrays of the job.

        Args:
            sizes: of the inputs.
            ranks: number of dimensions of each output. One without dimensions is not divided: each process has its own.
        """

        def of_parts(*parts: Array) -> list[Array]:
            return run(*(x.reshape(size) for x, size in zip(parts, sizes, strict=True)))

        outs = [_EACH if rank else PartitionSpec() for rank in ranks]
        return jax.shard_map(  # type: ignore[no-any-return]
            of_parts, mesh=self.mesh, in_specs=_EACH, out_specs=outs, check_vma=False
        )


class Joint:
    """A program of all processes: whether all are about to run it.

    Args:
        subgraph: the subgraph.
        text: of the program, as the compiler gets it.

    Attributes:
        digest: of the text.
        where: the user's line that recorded its first collective.
    """

    def __init__(self, subgraph: Subgraph, text: str) -> None:
        metas = subgraph.graph.metas()
        nodes = [node for node in subgraph.graph.nodes if node.op in collective.OPS]
        plans = "\n".join(_plan(node, metas) for node in nodes)
        self._route = str(nodes[0].args[-1])
        self.where = Route.of(self._route).where
        self.digest = _digest(text)
        self._own = torch.tensor([*_digest(plans), *self.digest], dtype=torch.uint8)

    def agree(self) -> tuple[bool, bool]:
        """Wait for all processes; whether all have the same collectives, and the same program.

        Raises:
            CollectiveError: a process is at something else than a program with collectives, or has ended.

        Cost: a message of 128 bytes to each process.
        """
        transport = transport_of(self._route)
        assert transport is not None
        both = torch.cat([self._own, 255 - self._own])
        [found] = transport.all_reduce([both], "max", 1.0, "the programs that run")
        highest, lowest = found.chunk(2)
        collectives, program = (highest == 255 - lowest).chunk(2)
        return bool(collectives.all()), bool(program.all())

    def do_all(self, yes: bool) -> bool:
        """Wait for all processes, right after `agree`; whether all of them say yes."""
        transport = transport_of(self._route)
        assert transport is not None
        own = torch.tensor([yes], dtype=torch.uint8)
        [found] = transport.all_reduce([own], "min", 1.0, "the programs on disk")
        return bool(found.all())


def _digest(text: str) -> bytes:
    return hashlib.sha256(text.encode()).digest()


def _plan(node: Node, metas: Mapping[int, TensorMeta]) -> str:
    """Text of a collective and its operands; the same in all members."""
    sent = ", ".join(str(metas[number]) for number in _operands(node))
    return f"{node.op} {node.args[2:-1]} of {sent}"


def _operands(node: Node) -> list[int]:
    """The numbers of the values that a collective sends."""
    given = node.args[0]
    items = given if isinstance(given, list | tuple) else [given]
    return [node.writes[item.base] if isinstance(item, Write) else int(item) for item in items]


def _is_plain(node: Node) -> bool:
    """Whether a collective reads and writes whole tensors, with their elements in any order."""
    given = node.args[0]
    items = [*(given if isinstance(given, list | tuple) else [given]), node.args[1]]
    return all(
        isinstance(item, Ref)
        or (isinstance(item, Write) and all(step.op in _REARRANGING for step in item.lens))
        for item in items
    )


def _takes(node: Node) -> bool:
    """Whether a rule takes the dtypes and the arguments of a collective."""
    sent = [meta.dtype for meta in node.outs[:-1] if meta is not None]  # the last is the token
    if node.op is ops.permute.default:
        return _is_one_to_one(node.args[2])
    if node.op in (ops.all_gather.default, ops.all_to_all.default):
        return all(not _is_small_float(dtype) for dtype in sent)
    if node.op is ops.broadcast.default:
        return all(not (dtype.is_complex or _is_small_float(dtype)) for dtype in sent)
    kind = node.args[2]
    if kind in ("and", "or"):
        return all(not (dtype.is_floating_point or dtype.is_complex) for dtype in sent)
    return all(
        not (dtype.is_complex or dtype is torch.bool or _is_small_float(dtype)) for dtype in sent
    )


def _is_small_float(dtype: torch.dtype) -> bool:
    return dtype.is_floating_point and dtype.itemsize == 1


def _is_one_to_one(pairs: Sequence[int]) -> bool:
    sources, targets = pairs[::2], pairs[1::2]
    return (
        len(sources) > 0 and len(set(sources)) == len(sources) and len(set(targets)) == len(targets)
    )


# -- rules: the values, then the arguments of the op but token and route -----------------------------


def call(node: Node, values: Mapping[int, Array], count: int, is_cpu: bool) -> list[Array]:
    """Trace a collective: its results, then the new values of what it writes."""
    given = [values[number] for number in _operands(node)]
    found = _RULES[node.op](_Way(count, is_cpu), given, node, *node.args[2:-1])
    return [*found, values[node.writes[-1]]]  # the token


class _Way:
    """How values are reduced between `count` processes."""

    def __init__(self, count: int, is_cpu: bool) -> None:
        self._count = count
        self._is_cpu = is_cpu

    def reduced(self, xs: Sequence[Array], kind: str) -> list[Array]:
        """Values reduced over the processes, those of a dtype as one vector on a CPU.

        XLA combines the all-reduces of a GPU and a TPU itself. On a CPU it does not: 20 of 1,000 float32 took 214 ms
        between four processes on two cores, as one vector 33.
        """
        if not self._is_cpu:
            return [_COMBINED[kind](x) for x in xs]
        found: list[Array] = list(xs)
        for dtype in dict.fromkeys(x.dtype for x in xs):
            chosen = [k for k, x in enumerate(xs) if x.dtype == dtype and x.size]
            if not chosen:
                continue
            flat = self._flat(jnp.concatenate([xs[k].reshape(-1) for k in chosen]), kind)
            at = 0
            for k in chosen:
                found[k] = flat[at : at + xs[k].size].reshape(xs[k].shape)
                at += xs[k].size
        return found

    def _flat(self, flat: Array, kind: str) -> Array:
        """A vector reduced on a CPU: each process reduces a part, so that all get equal bits.

        An all-reduce of gloo in XLA's client waits for its peer's TCP: of 20,000 float32 it took 45 ms between two
        processes, and 0.4 ms in these two halves.
        """
        if kind != "sum":
            return FOLDS[kind](lax.all_gather(flat, AXIS))
        missing = -flat.size % self._count
        even = jnp.pad(flat, (0, missing))
        part = lax.psum_scatter(even, AXIS, tiled=True)
        return lax.all_gather(part, AXIS, tiled=True)[: flat.size]


def _folded(fold: Any) -> Callable[[Array], Array]:
    return lambda rows: fold.reduce(rows, axis=0)


# kind -> how the rows of a matrix become one row
FOLDS: dict[str, Callable[[Array], Array]] = {
    "sum": lambda rows: jnp.sum(rows, axis=0, dtype=rows.dtype),
    "mul": lambda rows: jnp.prod(rows, axis=0, dtype=rows.dtype),
    "min": lambda rows: jnp.min(rows, axis=0),
    "max": lambda rows: jnp.max(rows, axis=0),
    "and": _folded(jnp.bitwise_and),
    "or": _folded(jnp.bitwise_or),
}
# kind -> the reduction where XLA combines several
_COMBINED: dict[str, Callable[[Array], Array]] = {
    **{
        kind: lambda x, fold=fold: fold(lax.all_gather(x, AXIS))  # type: ignore[misc]
        for kind, fold in FOLDS.items()
    },
    "sum": lambda x: lax.psum(x, AXIS),
    "min": lambda x: lax.pmin(x, AXIS),
    "max": lambda x: lax.pmax(x, AXIS),
}


def _scaled(x: Array, scale: float) -> Array:
    """`x * scale` in the dtype of `x`, computed as PyTorch does: halves and integers in float32."""
    if scale == 1.0:
        return x
    if x.dtype == np.float64:
        return x * np.float64(scale)
    return (x.astype(np.float32) * np.float32(scale)).astype(x.dtype)


def _all_reduce(
    way: _Way, given: list[Array], node: Node, kind: str, scale: float, label: str
) -> list[Array]:
    metas = [meta for meta in node.outs[: len(given)] if meta is not None]
    first = [is_scaled_first(meta.dtype, kind) for meta in metas]
    xs = [_scaled(x, scale) if f else x for x, f in zip(given, first, strict=True)]
    found = way.reduced(xs, kind)
    return [x if f else _scaled(x, scale) for x, f in zip(found, first, strict=True)]


def _reduce_scatter(
    way: _Way, given: list[Array], node: Node, kind: str, scale: float, dim: int, count: int
) -> list[Array]:
    [x] = given
    meta = node.outs[0]
    assert meta is not None
    is_first = is_scaled_first(meta.dtype, kind)
    x = _scaled(x, scale) if is_first else x
    if kind == "sum":
        found = lax.psum_scatter(x, AXIS, scatter_dimension=dim, tiled=True)
    else:
        size = x.shape[dim] // count
        [whole] = way.reduced([x], kind)
        found = lax.dynamic_slice_in_dim(whole, lax.axis_index(AXIS) * size, size, dim)
    return [found if is_first else _scaled(found, scale)]


def _broadcast(way: _Way, given: list[Array], node: Node, root: int) -> list[Array]:
    """The values of one process: the others add zeros to their bits."""
    is_root = lax.axis_index(AXIS) == root
    bits = [_bits(x) for x in given]
    found = way.reduced([jnp.where(is_root, x, jnp.zeros_like(x)) for x in bits], "sum")
    return [_of_bits(x, like.dtype) for x, like in zip(found, given, strict=True)]


def _bits(x: Array) -> Array:
    if x.dtype == np.bool_:
        return x.astype(np.uint8)
    return lax.bitcast_convert_type(x, _INTEGERS[x.dtype.itemsize])


def _of_bits(x: Array, dtype: Any) -> Array:
    return x.astype(dtype) if dtype == np.bool_ else lax.bitcast_convert_type(x, dtype)


def _all_gather(way: _Way, given: list[Array], node: Node, dim: int, count: int) -> list[Array]:
    return [lax.all_gather(given[0], AXIS, axis=dim, tiled=True)]


def _all_to_all(
    way: _Way, given: list[Array], node: Node, split_dim: int, concat_dim: int, count: int
) -> list[Array]:
    return [lax.all_to_all(given[0], AXIS, split_dim, concat_dim, tiled=True)]


def _permute(way: _Way, given: list[Array], node: Node, pairs: Sequence[int]) -> list[Array]:
    return [lax.ppermute(given[0], AXIS, list(zip(pairs[::2], pairs[1::2], strict=True)))]


_RULES: dict[torch._ops.OpOverload, Callable[..., list[Array]]] = {
    ops.all_reduce.default: _all_reduce,
    ops.all_reduce_.default: _all_reduce,
    ops.broadcast.default: _broadcast,
    ops.all_gather.default: _all_gather,
    ops.reduce_scatter.default: _reduce_scatter,
    ops.all_to_all.default: _all_to_all,
    ops.permute.default: _permute,
}
