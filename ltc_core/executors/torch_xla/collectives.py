"""Collectives as ops of an XLA program, for groups whose members are all replicas of PJRT.

The replicas are the chips of a slice, each with its process, or the devices of one process. Collectives of other groups
run on the host between two programs, through their `Transport`; `reduces_in_graph` decides. In a trace, the rules call
torch_xla's ops. Before a program with collectives is launched, the members agree on them, because XLA waits forever for
a member that does not come. Used by `launch` and `executor`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from ltc_core.graph import collective
from ltc_core.graph.collective import (
    Replicated,
    is_scaled_first,
    ops,
    plan_text,
    reduction_plan,
)
from ltc_core.graph.ir import Node

__all__ = ["Collectives", "plan_of"]

Tensor = torch.Tensor


class Collectives:
    """The collectives of one device.

    Args:
        library: torch_xla's library.
        device: torch_xla's name of the device.
    """

    def __init__(self, library: Any, device: str) -> None:
        self._library = library
        self._device = device
        self._own = int(library._xla_get_device_ordinal(device))
        self._count = int(library._xla_num_global_devices())

    def reduces_in_graph(self, node: Node) -> bool:
        """Whether a node's collective can be an op of a program."""
        replicas = self._replicas(node)
        if replicas is None:
            return False
        if node.op in (ops.all_reduce.default, ops.all_reduce_.default):
            metas = [meta for meta in node.outs[:-1] if meta is not None]
            return _scale(node) == 1.0 or all(meta.dtype.is_floating_point for meta in metas)
        # XLA orders the results of the other collectives by replica, so the members must be in that order.
        return node.op in _RULES and list(replicas) == sorted(replicas)

    def call(self, node: Node, args: Sequence[Any]) -> Any:
        """Trace a collective."""
        replicas = self._replicas(node)
        assert replicas is not None
        result = _RULES[node.op](self, replicas, *args)
        # The token is always an output. It is computed from the result, so that XLA does not remove the collective.
        came = args[0] if result is None else result
        first = came if isinstance(came, Tensor) else came[0]
        if first.numel():
            args[1].copy_(first.reshape(-1)[:1].to(torch.uint8))
        return result

    def launch(self, plans: Mapping[str, str], start: Callable[[], Any]) -> Any:
        """Start a program once all members of its groups are about to. `plans` is line -> plan of its collectives."""
        transports = [(_replicated(line), plan) for line, plan in plans.items()]
        for transport, plan in transports:
            transport.agree(plan)
        result = start()
        for transport, plan in transports:
            transport.launched(plan)
        return result

    def begin(self) -> None:
        """Begin or end a trace: XLA's token, which orders the collectives of one trace, is reset."""
        self._library._set_all_reduce_token(self._device, None)

    def _replicas(self, node: Node) -> Sequence[int] | None:
        transport = collective.transport_of(node.args[-1])
        if not isinstance(transport, Replicated):
            return None
        return transport.replicas(self._own, self._count)

    # -- rules: the replicas, then the arguments of the op -------------------------------------

    def all_reduce(
        self,
        replicas: Sequence[int],
        value: Tensor,
        token: Any,
        kind: str,
        scale: float,
        *rest: Any,
    ) -> Tensor:
        if is_scaled_first(value.dtype, kind):
            value, scale = value * scale, 1.0
        return self._library._xla_all_reduce(kind, value, scale, [], True)  # type: ignore[no-any-return]

    def all_reduce_(
        self,
        replicas: Sequence[int],
        values: list[Tensor],
        token: Any,
        kind: str,
        scale: float,
        *rest: Any,
    ) -> None:
        if all(is_scaled_first(value.dtype, kind) for value in values):
            reduced, scale = [value * scale for value in values], 1.0
        else:
            reduced = [value.clone() for value in values]
        self._library._xla_all_reduce_inplace(kind, reduced, scale, [], True)  # as one op
        for value, result in zip(values, reduced, strict=True):
            value.copy_(result)

    def broadcast(
        self, replicas: Sequence[int], values: list[Tensor], token: Any, root: int, route: str
    ) -> list[Tensor]:
        # An input and not a constant, because all replicas run the same program.
        is_root = torch.tensor([self._own == replicas[root]])
        [chosen] = self._library._xla_tensors_from_aten([is_root], [self._device])
        return [
            self.all_reduce(replicas, torch.where(chosen, _as_number(v), 0), token, "sum", 1.0).to(
                v.dtype
            )
            for v in values
        ]

    def all_gather(
        self, replicas: Sequence[int], value: Tensor, token: Any, dim: int, count: int, route: str
    ) -> Tensor:
        found = self._library._xla_all_gather(
            _as_number(value), dim, count, [list(replicas)], True, None, None
        )
        return found.to(value.dtype)  # type: ignore[no-any-return]

    def reduce_scatter(
        self, replicas: Sequence[int], value: Tensor, token: Any, kind: str, scale: float, dim: int, count: int,
        route: str,
    ) -> Tensor:  # fmt: skip
        found, _ = self._library._xla_reduce_scatter(
            kind, value, self._token(), scale, dim, count, [list(replicas)], True, None, None
        )
        return found  # type: ignore[no-any-return]

    def all_to_all(
        self, replicas: Sequence[int], value: Tensor, token: Any, split_dim: int, concat_dim: int, count: int,
        route: str,
    ) -> Tensor:  # fmt: skip
        found, _ = self._library._xla_all_to_all(
            value, self._token(), split_dim, concat_dim, count, [list(replicas)], True
        )
        return found  # type: ignore[no-any-return]

    def permute(
        self, replicas: Sequence[int], value: Tensor, token: Any, pairs: list[int], route: str
    ) -> Tensor:
        routes = [list(route) for route in zip(pairs[::2], pairs[1::2], strict=True)]
        found, _ = self._library._xla_collective_permute(value, self._token(), routes)
        return found  # type: ignore[no-any-return]

    def _token(self) -> Any:
        return self._library._get_all_reduce_token(self._device)


def _replicated(line: str) -> Replicated:
    transport = collective.transport_of(line)
    assert isinstance(transport, Replicated)
    return transport


def _as_number(value: Tensor) -> Tensor:
    return value.to(torch.uint8) if value.dtype is torch.bool else value


def _scale(node: Node) -> float:
    return float(node.args[3])


def plan_of(node: Node, seen: Sequence[Tensor]) -> str:
    """Text of a collective and its operands; the same in all members."""
    if node.op in (ops.all_reduce.default, ops.all_reduce_.default):
        return reduction_plan(node.args[2], node.args[4], seen)
    return plan_text(
        f"{node.op._opname} {[a for a in node.args if type(a) in (int, float, str)][:-1]} of", seen
    )


_RULES: dict[torch._ops.OpOverload, Callable[..., Any]] = {
    ops.all_reduce.default: Collectives.all_reduce,
    ops.all_reduce_.default: Collectives.all_reduce_,
    ops.broadcast.default: Collectives.broadcast,
    ops.all_gather.default: Collectives.all_gather,
    ops.reduce_scatter.default: Collectives.reduce_scatter,
    ops.all_to_all.default: Collectives.all_to_all,
    ops.permute.default: Collectives.permute,
}
