"""How much a node works: its floating point operations, and the bytes that it reads and writes.

The formulas are PyTorch's (`torch.utils.flop_counter`): matrix products, convolutions and attention. Any other op
counts one operation for each element that it makes. Views do nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch.utils.flop_counter import flop_registry

from ltc_core.graph.arguments import map_leaves
from ltc_core.graph.ir import Node, Ref, TensorMeta, Write, references

__all__ = ["bytes_of", "flops_of"]


def _linear(x: Any, weight: Any, *bias: Any, out_val: Any) -> int:
    return 2 * int(x.numel()) * int(weight.shape[0])


_FORMULAS = {**flop_registry, torch.ops.aten.linear: _linear}


def flops_of(node: Node, metas: Mapping[int, TensorMeta]) -> int:
    """Floating point operations of a node."""
    if node.view:
        return 0
    made = [meta for meta in node.outs if meta is not None]
    formula = _FORMULAS.get(node.op.overloadpacket)
    if formula is not None:
        found = _by_formula(formula, node, metas)
        if found is not None:
            return found
    return sum(meta.numel for meta in made if meta.dtype.is_floating_point)


def _by_formula(formula: Any, node: Node, metas: Mapping[int, TensorMeta]) -> int | None:
    """What PyTorch's formula gives for the shapes of a node; None if it does not take them."""

    def shown(item: Any) -> Any:
        if isinstance(item, Ref):
            return metas[int(item)].meta_tensor()
        if isinstance(item, Write):
            return metas[node.writes[item.base]].meta_tensor()
        return item

    outs = [meta.meta_tensor() if meta is not None else None for meta in node.outs]
    args = [map_leaves(shown, argument) for argument in node.args]
    named = {name: map_leaves(shown, item) for name, item in node.kwargs.items()}
    out = tuple(outs) if len(outs) > 1 else outs[0]
    try:
        return int(formula(*args, **named, out_val=out))
    except (AssertionError, IndexError, RuntimeError, TypeError, ValueError):
        return None  # an overload with other arguments than the formula's


def bytes_of(node: Node, metas: Mapping[int, TensorMeta]) -> int:
    """Bytes that a node reads and writes, each value once."""
    if node.view:
        return 0
    read = sum(metas[value].nbytes for value in set(references(node)) if value in metas)
    return read + sum(meta.nbytes for meta in node.outs if meta is not None)
