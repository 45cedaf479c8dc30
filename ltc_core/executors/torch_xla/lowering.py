"""How each op is traced: by torch_xla's lowering, by a rule, by PyTorch's decomposition, or not at all (on the host).

Most of it is learned during traces: ops without a lowering, calls whose result has another shape than recorded, calls
that XLA refuses. Ops that torch_xla lowers to wrong numbers have a rule in `rules`. An op without a lowering is
decomposed if PyTorch has a decomposition; else it runs on the host. Used by `executor` and `launch`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Set
from typing import Any

import torch
from torch._decomp import decomposition_table

from ltc_core.executors.noted_calls import NotedCalls
from ltc_core.executors.torch_xla.rules import RULES
from ltc_core.graph.arguments import leaves
from ltc_core.graph.ir import Node, TensorMeta, Write

__all__ = ["LOWERING"]

aten = torch.ops.aten
_Op = torch._ops.OpOverload
_Metas = Mapping[int, TensorMeta]

# Views that torch_xla traces as copies: a write through one would be lost, or go to wrong elements.
_COPIES = frozenset(
    {
        aten._conj.default,
        aten._neg_view.default,
        aten.as_strided.default,
        aten.diagonal.default,
        aten.unfold.default,
        aten.view.dtype,
        aten.view_as_complex.default,
    }
)


class _Lowering:
    """What is known of torch_xla's lowerings so far; one for the process."""

    def __init__(self) -> None:
        self._refused = NotedCalls()  # run on the host
        self._decomposed = NotedCalls()  # traced as PyTorch's decomposition

    @property
    def refused_ops(self) -> frozenset[str]:
        """Names of the ops that always run on the host."""
        return frozenset(map(str, self._refused.ops))

    def refuses(self, node: Node, metas: _Metas) -> bool:
        """Whether a node has to run on the host."""
        if node.writes and _writes_through_copy(node):
            return True
        return self._refused.has(node, metas)

    def rule(self, node: Node, metas: _Metas) -> Callable[..., Any] | None:
        """Function that is traced for a node; None for its op."""
        if self._decomposed.has(node, metas):
            return decomposition_table[node.op]
        return RULES.get(node.op)

    def refuse_call(self, node: Node, metas: _Metas) -> None:
        """Run calls like this one on the host from now on."""
        self._refused.note_call(node, metas)

    def learn(self, node: Node, metas: _Metas, on_host: Set[str]) -> bool:
        """Note a node for which torch_xla ran ops on the host; whether its decomposition can be traced instead.

        An op without an XLA kernel is never lowered. If it has one, only calls like this one are not lowered.
        """
        is_lowered = node.op.has_kernel_for_dispatch_key(torch._C.DispatchKey.XLA)
        never = not is_lowered and f"aten::{node.op._opname}" in on_host
        is_known = node.op in RULES or self._decomposed.has(node, metas)
        can_be_decomposed = node.op in decomposition_table and not is_known
        noted = self._decomposed if can_be_decomposed else self._refused
        if never:
            noted.ops.add(node.op)
        else:
            noted.note_call(node, metas)
        return can_be_decomposed


def _writes_through_copy(node: Node) -> bool:
    items = leaves(node.args, *node.kwargs.values())
    return any(s.op in _COPIES for item in items if type(item) is Write for s in item.lens)


LOWERING = _Lowering()
