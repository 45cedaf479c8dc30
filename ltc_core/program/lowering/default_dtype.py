"""Ops on integers compute in the default dtype that they were recorded with, whatever it is where they run.

It may have changed before a graph runs, and the compiler's process has PyTorch's own, float32. Called by `retrace` and
by the reference executor for each node that `uses_default_dtype`.
"""

from __future__ import annotations

from typing import Any

import torch

from ltc_core.graph.arguments import map_leaves
from ltc_core.graph.ir import Node
from ltc_core.program.scalar_inputs import base_name

__all__ = ["in_recorded_dtype"]


def in_recorded_dtype(
    node: Node, args: Any, kwargs: dict[str, Any], default: torch.dtype
) -> tuple[Any, dict[str, Any]]:
    """Arguments with which a node computes in the dtype that it was recorded with, where `default` is the present one.

    An op that has an argument `dtype` gets it; the integers and booleans of any other op are converted before it.
    """
    assert node.outs[0] is not None
    dtype = node.outs[0].dtype
    real = dtype.to_real() if dtype.is_complex else dtype
    if real is default:
        return args, kwargs
    names = [argument.name for argument in node.op._schema.arguments]
    if "dtype" in names:
        is_given = names.index("dtype") < len(args) or kwargs.get("dtype") is not None
        return args, kwargs if is_given else {**kwargs, "dtype": dtype}
    is_selection = base_name(node.op) == "where"

    def converted(item: Any) -> Any:
        if not isinstance(item, torch.Tensor) or (is_selection and item.dtype is torch.bool):
            return item
        return item.to(real)

    named = {name: map_leaves(converted, a) for name, a in kwargs.items()}
    return [map_leaves(converted, a) for a in args], named
