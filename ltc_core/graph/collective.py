"""Collectives as ops of the graph: their schemas, their `Transport`, and the order in which they run.

Each collective writes the token of its group. So a group's collectives run in recorded order on every executor, and
none is pruned when its result is unused: the other processes wait for it. `TRANSPORTS` holds the connected processes
of each group; the last argument of an op, a `Route`, names them. Recorded by `ltc_dist.collectives.ops`, run by the
executors op by op.

Many tensors are reduced in a few flat vectors, one for each bucket. With an `Overlapping` transport an executor may
replace the op by `all_reduce.start` for each vector and one `all_reduce.finish`, and compute between them. The data
on the wire is the same, so one process may run op by op while another runs compiled code. The last `TRAILER` elements
of a vector belong to the transport, which tells by them that all members reduce the same thing.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import torch

from ltc_core.graph.buckets import deal_backwards
from ltc_core.graph.ir import Node
from ltc_core.settings import settings

__all__ = [
    "COMBINE",
    "FINISHES",
    "OPS",
    "STARTS",
    "TRAILER",
    "TRANSPORTS",
    "Overlapping",
    "Replicated",
    "Route",
    "Routed",
    "Transport",
    "all_reduce_in_vectors",
    "is_scaled_first",
    "lines_of",
    "may_block",
    "ops",
    "packed",
    "plan_text",
    "reduction_plan",
    "rows_to_ints",
    "scaled",
    "transport_of",
    "unpacked",
]

# kind of reduction -> op that combines two tensors
COMBINE: dict[str, Callable[..., torch.Tensor]] = {
    "sum": torch.add,
    "mul": torch.mul,
    "min": torch.minimum,
    "max": torch.maximum,
    "and": torch.bitwise_and,
    "or": torch.bitwise_or,
}


TRAILER = 64  # elements


@dataclass(frozen=True)
class Route:
    """Which way a collective goes. Its text is the last argument of the op.

    Attributes:
        line: name of the transport.
        device: index of the device that recorded the op; -1 if the line's order does not depend on it.
        where: the user's line, for messages.
    """

    line: str
    device: int = -1
    where: str = ""

    def text(self) -> str:
        return f"{self.line}; device {self.device}; {self.where}"

    @staticmethod
    @functools.lru_cache(maxsize=1024)
    def of(text: str) -> Route:
        """The route of a text; a name alone is a line."""
        line, _, rest = text.partition("; device ")
        device, _, where = rest.partition("; ")
        return Route(line, int(device or -1), where)


class Transport(Protocol):
    """The connected processes of one group. Its tensors are ordinary ones, on the hardware."""

    def all_reduce(
        self, values: list[torch.Tensor], kind: str, scale: float, label: str
    ) -> list[torch.Tensor]: ...

    def all_gather(self, value: torch.Tensor, dim: int) -> torch.Tensor: ...

    def reduce_scatter(
        self, value: torch.Tensor, kind: str, scale: float, dim: int
    ) -> torch.Tensor: ...

    def all_to_all(self, value: torch.Tensor, split_dim: int, concat_dim: int) -> torch.Tensor: ...

    def permute(self, value: torch.Tensor, pairs: list[int]) -> torch.Tensor: ...

    def broadcast(self, values: list[torch.Tensor], root: int) -> list[torch.Tensor]: ...


@runtime_checkable
class Routed(Protocol):
    """Processes that want to know what is recorded where, to tell whether all run the same collectives."""

    def on(self, route: Route) -> Transport:
        """The transport of one op. Cost: 1 us."""


@runtime_checkable
class Overlapping(Transport, Protocol):
    """A transport that reduces while the process computes."""

    def start_all_reduce(self, flat: torch.Tensor, kind: str, plan: str) -> None:
        """Start to reduce a vector in place, whose last `TRAILER` elements are the transport's own.

        All members start the same vectors in the same order.

        Args:
            plan: text of the whole reduction, the same in all members.
        """

    def finish_all_reduce(self, flat: torch.Tensor) -> None:
        """Wait until a vector that was started is reduced."""


@runtime_checkable
class Replicated(Transport, Protocol):
    """A transport whose members may be the replicas of one program, which then contains the collectives."""

    def replicas(self, own: int, count: int) -> Sequence[int] | None:
        """Replica index of each member; None unless the members are all replicas.

        Args:
            own: replica index of this member.
            count: number of replicas.
        """

    def agree(self, plan: str) -> None:
        """Wait until all members are about to run the collectives of this plan.

        Raises:
            CollectiveError: a member has another plan, or has ended.
        """

    def launched(self, plan: str) -> None:
        """Wait until all members have launched the program, if waiting for its results could block other launches."""


def plan_text(what: str, values: Sequence[torch.Tensor]) -> str:
    """Text of an op and of the tensors it runs on; the same in all members of a group."""
    return f"{what} {', '.join(f'{str(v.dtype)[6:]}{list(v.shape)}' for v in values)}"


def reduction_plan(kind: str, label: str, values: Sequence[torch.Tensor]) -> str:
    """Text of a reduction, of its tensors and of the bucket size; the same in all members of a group."""
    text = plan_text(f"all_reduce {kind} of {label}:", values)
    return f"{text}; LTC_BUCKET_MB={settings.bucket_mb:g}"


def all_reduce_in_vectors(
    to: Overlapping, values: list[torch.Tensor], kind: str, scale: float, label: str
) -> list[torch.Tensor]:
    """Reduce tensors in buckets: a bucket is packed while the earlier ones are in flight."""
    plan = reduction_plan(kind, label, values)
    buckets = list(deal_backwards(values, settings.bucket_mb))
    flats, scales = [], []
    for chosen in buckets:
        flat = packed(values, chosen)
        is_first = is_scaled_first(flat.dtype, kind)
        flats.append(flat.mul_(scale) if is_first else flat)
        scales.append(1.0 if is_first else scale)
        to.start_all_reduce(flat, kind, plan)
    return _finished(to, flats, buckets, [v.shape for v in values], scales)


def is_scaled_first(dtype: torch.dtype, kind: str) -> bool:
    """Whether values are scaled before they are added: a sum of float16 may be too large where the mean is not."""
    return dtype is torch.float16 and kind == "sum"


def _finished(
    to: Overlapping,
    flats: Sequence[torch.Tensor],
    buckets: Iterable[Sequence[int]],
    shapes: Sequence[Sequence[int]],
    scales: Iterable[float],
) -> list[torch.Tensor]:
    """Wait for the vectors, scale them, and return the tensors in them."""
    results = []
    for flat, scale in zip(flats, scales, strict=True):
        to.finish_all_reduce(flat)
        results.append(scaled(flat, scale))
    return unpacked(results, buckets, shapes)


def packed(values: Sequence[torch.Tensor], chosen: Sequence[int]) -> torch.Tensor:
    """One flat vector of the chosen tensors, with a trailer of zeros."""
    first = values[chosen[0]]
    return torch.cat([*(values[k].reshape(-1) for k in chosen), first.new_zeros(TRAILER)])


def unpacked(
    flats: Sequence[torch.Tensor],
    buckets: Iterable[Sequence[int]],
    shapes: Sequence[Sequence[int]],
) -> list[torch.Tensor]:
    """The tensors that are packed in the vectors, as views of them."""
    results = [flats[0]] * len(shapes)
    for flat, chosen in zip(flats, buckets, strict=True):
        *parts, _ = flat.split_with_sizes([*(math.prod(shapes[k]) for k in chosen), TRAILER])
        for k, part in zip(chosen, parts, strict=True):
            results[k] = part.view(shapes[k])
    return results


def scaled(value: torch.Tensor, scale: float) -> torch.Tensor:
    """`value * scale` in the dtype of `value`, for integers too; may overwrite `value`."""
    if scale == 1.0:
        return value
    return value.mul_(scale) if value.is_floating_point() else (value * scale).to(value.dtype)


def rows_to_ints(rows: Iterable[Sequence[int]]) -> list[int]:
    """Rows of integers as one `int[]` argument of an op: for each row its length, then its items."""
    return [n for row in rows for n in (len(row), *row)]


def _rows(ints: Sequence[int]) -> Iterator[Sequence[int]]:
    at = 0
    while at < len(ints):
        yield ints[at + 1 : at + 1 + ints[at]]
        at += 1 + ints[at]


# name of a line (`Route.line`) -> transport
TRANSPORTS: dict[str, Transport | Routed] = {}


def transport_of(route: str) -> Transport | None:
    """The transport that the last argument of an op names, if its processes are connected."""
    way = Route.of(route)
    found = TRANSPORTS.get(way.line)
    return found.on(way) if isinstance(found, Routed) else found


ops = torch.ops.ltc_collective
_library: Any = torch.library.Library("ltc_collective", "FRAGMENT")  # type: ignore[no-untyped-call]


def _define(schema: str, meta: Callable[..., Any] | None, call: Callable[..., Any]) -> None:
    """Define an op; `call` runs it, with the transport and all arguments but token and route."""
    name = schema.partition("(")[0]

    def run(value: Any, token: torch.Tensor, *more: Any) -> Any:
        *rest, route = more
        return call(transport_of(route), value, *rest)

    _library.define(schema)
    if meta is not None:
        _library.impl(name, meta, "Meta")
    for key in ("CPU", "CUDA"):
        _library.impl(name, run, key)
    # torch 2.9 has no fallback kernel for this key.
    _library.impl(name, torch.library.fallthrough_kernel, "AutogradPrivateUse1")


def _all_like(values: list[torch.Tensor], *rest: Any) -> list[torch.Tensor]:
    return [torch.empty_like(v, memory_format=torch.contiguous_format) for v in values]


def _like(value: torch.Tensor, *rest: Any) -> torch.Tensor:
    return torch.empty_like(value, memory_format=torch.contiguous_format)


def _resized(
    value: torch.Tensor, changes: Sequence[tuple[int, Callable[[int], int]]]
) -> torch.Tensor:
    size = list(value.shape)
    for dim, change in changes:
        size[dim] = change(size[dim])
    return value.new_empty(size)


def _reduce_one(
    to: Transport, value: torch.Tensor, kind: str, scale: float, label: str
) -> torch.Tensor:
    return to.all_reduce([value], kind, scale, label)[0]


def _reduce_all(
    to: Transport, values: list[torch.Tensor], kind: str, scale: float, label: str
) -> None:
    for value, result in zip(values, to.all_reduce(values, kind, scale, label), strict=True):
        value.copy_(result)


_define(
    "all_reduce(Tensor value, Tensor(a!) token, str kind, float scale, str label, str route) -> Tensor",
    _like,
    _reduce_one,
)
_define(
    "all_reduce_(Tensor(a!)[] values, Tensor(b!) token, str kind, float scale, str label, str route) -> ()",
    lambda *args: None,
    _reduce_all,
)
# Executors insert these two ops; they are never recorded.
_define(
    "all_reduce.start(Tensor(a!) flat, Tensor(b!) token, str kind, str plan, str route) -> ()",
    None,
    lambda to, flat, kind, plan: to.start_all_reduce(flat, kind, plan),
)
_define(
    "all_reduce.finish(Tensor[] flats, Tensor(a!) token, int[] buckets, int[] shapes, float[] scales, str route)"
    " -> Tensor[]",
    None,
    lambda to, flats, buckets, shapes, scales: _finished(
        to, flats, _rows(buckets), list(_rows(shapes)), scales
    ),
)
_define(
    "all_gather(Tensor value, Tensor(a!) token, int dim, int count, str route) -> Tensor",
    lambda value, token, dim, count, route: _resized(value, [(dim, lambda n: n * count)]),
    lambda to, value, dim, count: to.all_gather(value, dim),
)
_define(
    "reduce_scatter(Tensor value, Tensor(a!) token, str kind, float scale, int dim, int count, str route) -> Tensor",
    lambda value, token, kind, scale, dim, count, route: _resized(
        value, [(dim, lambda n: n // count)]
    ),
    lambda to, value, kind, scale, dim, count: to.reduce_scatter(value, kind, scale, dim),
)
_define(
    "all_to_all(Tensor value, Tensor(a!) token, int split_dim, int concat_dim, int count, str route) -> Tensor",
    lambda value, token, split_dim, concat_dim, count, route: _resized(
        value, [(split_dim, lambda n: n // count), (concat_dim, lambda n: n * count)]
    ),
    lambda to, value, split_dim, concat_dim, count: to.all_to_all(value, split_dim, concat_dim),
)
_define(
    "permute(Tensor value, Tensor(a!) token, int[] pairs, str route) -> Tensor",
    _like,
    lambda to, value, pairs: to.permute(value, pairs),
)
_define(
    "broadcast(Tensor[] values, Tensor(a!) token, int root, str route) -> Tensor[]",
    _all_like,
    lambda to, values, root: to.broadcast(values, root),
)

STARTS = frozenset({ops.all_reduce.start})  # these do not block, all others do
FINISHES = frozenset({ops.all_reduce.finish})
OPS = frozenset(
    getattr(ops, name).default
    for name in (
        "all_reduce",
        "all_reduce_",
        "all_gather",
        "reduce_scatter",
        "all_to_all",
        "permute",
        "broadcast",
    )
).union(STARTS, FINISHES)
_BLOCKING = OPS - STARTS


def may_block(nodes: Iterable[Node]) -> bool:
    """Whether one of the nodes waits for other members of its group."""
    return any(node.op in _BLOCKING for node in nodes)


def lines_of(nodes: Iterable[Node]) -> tuple[str, ...]:
    """Names of the lines whose collectives are among the nodes."""
    return tuple({Route.of(node.args[-1]).line: None for node in nodes if node.op in OPS})
