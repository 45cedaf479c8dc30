"""Collectives as ops of the graph: what they take and give, and that they run in the order they were recorded.

Each takes a token of its group and writes it. So one waits for the one before, on whatever tier the graph runs, and
none is dropped because nobody looks at its result: the other processes wait for it. Which processes a group has, and
how they are reached, is handed in as a `Transport`. Recorded by `ltc_dist.collectives`, run by the executors op by op.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch

__all__ = ["OPS", "TRANSPORTS", "Transport", "ops", "plan_text"]


class Transport(Protocol):
    """The processes of one group. Tensors are plain ones, of the hardware."""

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


def plan_text(what: str, values: Sequence[torch.Tensor]) -> str:
    """Say what an op does and on what: in all members of a group the same."""
    return f"{what} {', '.join(f'{str(v.dtype)[6:]}{list(v.shape)}' for v in values)}"


# name of a group -> how it is reached. Ops name the group.
TRANSPORTS: dict[str, Transport] = {}

ops = torch.ops.ltc_collective
_library: Any = torch.library.Library("ltc_collective", "FRAGMENT")  # type: ignore[no-untyped-call]


def _define(schema: str, meta: Callable[..., Any], call: Callable[..., Any]) -> None:
    """Define an op; `call` is its transport's method for it, given all but token and group."""
    name = schema.partition("(")[0]

    def run(value: Any, token: torch.Tensor, *more: Any) -> Any:
        *rest, group = more
        return call(TRANSPORTS[group], value, *rest)

    _library.define(schema)
    _library.impl(name, meta, "Meta")
    for key in ("CPU", "CUDA"):
        _library.impl(name, run, key)


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


_define(
    "all_reduce(Tensor[] values, Tensor(a!) token, str kind, float scale, str label, str group) -> Tensor[]",
    _all_like,
    lambda to, values, kind, scale, label: to.all_reduce(values, kind, scale, label),
)
_define(
    "all_gather(Tensor value, Tensor(a!) token, int dim, int count, str group) -> Tensor",
    lambda value, token, dim, count, group: _resized(value, [(dim, lambda n: n * count)]),
    lambda to, value, dim, count: to.all_gather(value, dim),
)
_define(
    "reduce_scatter(Tensor value, Tensor(a!) token, str kind, float scale, int dim, int count, str group) -> Tensor",
    lambda value, token, kind, scale, dim, count, group: _resized(
        value, [(dim, lambda n: n // count)]
    ),
    lambda to, value, kind, scale, dim, count: to.reduce_scatter(value, kind, scale, dim),
)
_define(
    "all_to_all(Tensor value, Tensor(a!) token, int split_dim, int concat_dim, int count, str group) -> Tensor",
    lambda value, token, split_dim, concat_dim, count, group: _resized(
        value, [(split_dim, lambda n: n // count), (concat_dim, lambda n: n * count)]
    ),
    lambda to, value, split_dim, concat_dim, count: to.all_to_all(value, split_dim, concat_dim),
)
_define(
    "permute(Tensor value, Tensor(a!) token, int[] pairs, str group) -> Tensor",
    _like,
    lambda to, value, pairs: to.permute(value, pairs),
)
_define(
    "broadcast(Tensor[] values, Tensor(a!) token, int root, str group) -> Tensor[]",
    _all_like,
    lambda to, values, root: to.broadcast(values, root),
)

OPS = frozenset(
    getattr(ops, name).default
    for name in ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "permute", "broadcast")
)
