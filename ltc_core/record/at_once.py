"""What C++ asks where ops run at once (`csrc/at_once.h`): lenses, and parts that a view op may have copied."""

from __future__ import annotations

from typing import Any

import torch

from ltc_core.graph.ir import TensorMeta
from ltc_core.graph.lens import Lens, ViewStep, apply_lens, shares_memory
from ltc_core.thread_state import in_own_state

__all__ = ["find_lens", "find_part"]

aten = torch.ops.aten


def find_lens(whole: TensorMeta, part: TensorMeta) -> Lens | None:
    """The lens from memory with the meta `whole` to a part of it; None where `whole` has gaps or overlaps."""
    if not whole.dense or whole.offset:
        return None
    step = ViewStep(aten.as_strided.default, (tuple(part.size), part.stride, part.offset))
    if whole.contiguous:
        return (step,)
    dims = range(len(whole.size))
    order = tuple(sorted(dims, key=lambda d: (-whole.stride[d], -whole.size[d])))
    return ViewStep(aten.permute.default, (order,)), step


@in_own_state
def find_part(whole: torch.Tensor, lens: Lens) -> Any:
    """The part of a real tensor that a lens leads to; None where a step of it has copied."""
    part = apply_lens(whole, lens)
    return part if shares_memory(part, whole) else None
