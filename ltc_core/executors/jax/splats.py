"""Constants of one value: the broadcast of a scalar constant becomes a constant of the whole shape.

In: a module of StableHLO, as JAX writes it. Out: the same module, changed; its text says what shape each operand
that is a number has, as that of torch_xla. Used by `stablehlo`.
"""

from __future__ import annotations

from typing import Any

from jaxlib.mlir import ir
from jaxlib.mlir.dialects import stablehlo

__all__ = ["fold"]


def fold(module: Any) -> None:
    """Replace the broadcasts of scalar constants in a module."""
    with module.context, ir.Location.unknown():
        for function in list(module.body.operations):
            _fold(function.operation)


def _fold(op: Any) -> None:
    for region in op.regions:
        for block in region.blocks:
            for inner in [each.operation for each in block.operations]:
                _fold(inner)
                if inner.name == "stablehlo.broadcast_in_dim":
                    _replace(inner)


def _replace(broadcast: Any) -> None:
    operand, result = broadcast.operands[0], broadcast.results[0]
    made_by = operand.owner
    if isinstance(made_by, ir.Block) or made_by.name != "stablehlo.constant":
        return
    value = ir.DenseElementsAttr(made_by.attributes["value"])
    if not value.is_splat:
        return
    with ir.InsertionPoint(broadcast), broadcast.location:
        whole = ir.DenseElementsAttr.get_splat(result.type, value.get_splat_value())
        result.replace_all_uses_with(stablehlo.ConstantOp(whole).result)
    broadcast.erase()
    if not any(True for _ in operand.uses):
        made_by.erase()
