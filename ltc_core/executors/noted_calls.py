"""A set of ops and of calls of ops, by which an executor remembers what its compiler does not take."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from ltc_core.graph.ir import Node, Ref, Scalar, TensorMeta, Write

__all__ = ["NotedCalls"]

_Op = torch._ops.OpOverload
_Metas = Mapping[int, TensorMeta]


class NotedCalls:
    """A set of ops, and of calls of ops. Calls with equal shapes, dtypes and arguments are one call."""

    def __init__(self) -> None:
        self.ops: set[_Op] = set()
        self._calls: set[tuple[Any, ...]] = set()
        self._ops_of_calls: set[_Op] = set()

    def note_call(self, node: Node, metas: _Metas) -> None:
        self._calls.add(_call(node, metas))
        self._ops_of_calls.add(node.op)

    def has(self, node: Node, metas: _Metas) -> bool:
        if node.op in self.ops:
            return True
        return node.op in self._ops_of_calls and _call(node, metas) in self._calls


def _call(node: Node, metas: _Metas) -> tuple[Any, ...]:
    """Key of a call: op and arguments, with metas in place of the operands."""

    def described(item: Any) -> Any:
        if isinstance(item, Ref):
            return metas.get(item)
        if isinstance(item, Write):
            return metas.get(node.writes[item.base]), str(item.lens)
        if isinstance(item, Scalar):
            return Scalar
        if isinstance(item, list | tuple):
            return tuple(map(described, item))
        return repr(item)

    named = tuple((name, described(item)) for name, item in node.kwargs.items())
    return node.op, described(node.args), named
