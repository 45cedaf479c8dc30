"""CPU tensors without dims as numbers: `x / torch.tensor(8.0)` is recorded as `x / 8.0`.

For an op that promotes dtypes, a tensor without dims counts as little as a number, if both are floating point. As a
number it is not uploaded, and programs for it serve other numbers, too. `use_number` of `record/csrc/operands.h` does
the same before Python is called.
"""

from __future__ import annotations

from typing import Any

import torch

from ltc_core.graph.op_schema import OpSchema
from ltc_core.tensor.lazy_tensor import LazyTensor

__all__ = ["with_number"]

_NAMES = frozenset(
    f"{name}{suffix}" for name in ("add", "sub", "mul", "div") for suffix in ("", "_")
)


def with_number(schema: OpSchema, args: Any) -> tuple[Any, ...] | None:
    """The arguments, with a number in the place of a CPU tensor; None if there is none that may be one."""
    if schema.name not in _NAMES or schema.op._overloadname != "Tensor":
        return None
    first, second, *others = args
    # Of half precision, ATen rounds a first factor, and no second one.
    is_turned = schema.name == "mul" and _is_number(first) and _is_larger(second)
    if is_turned and second.itemsize >= 4:
        first, second = second, first
    if _is_number(second) and _is_larger(first):
        return (first, second.item(), *others)
    return None


def _is_number(t: Any) -> bool:
    if type(t) is not torch.Tensor or t.device.type != "cpu" or t.is_neg():
        return False
    return t.dim() == 0 and t.dtype.is_floating_point and t.layout is torch.strided


def _is_larger(t: Any) -> bool:
    return type(t) is LazyTensor and t.dim() > 0 and t.dtype.is_floating_point
