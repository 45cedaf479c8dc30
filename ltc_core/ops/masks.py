"""Indexing by a mask: `x[mask]` is recorded, as indexing by the positions where the mask is true.

Their number is known only when the mask is: it is read, which cuts. A mask is read once, whatever is indexed by it, in
backward too. ATen's kernels look for the same positions.
"""

from __future__ import annotations

from typing import Any
from weakref import WeakKeyDictionary

import torch

from ltc_core import metrics
from ltc_core.graph.op_schema import OpSchema
from ltc_core.record.recorder import recorder
from ltc_core.runtime.devices import real, upload_all
from ltc_core.tensor.handles import Cell, Value
from ltc_core.tensor.lazy_tensor import LazyTensor
from ltc_core.thread_state import in_own_state

__all__ = ["index"]

aten = torch.ops.aten

_record = recorder(OpSchema.of(aten.index.Tensor))
# Of whole tensors, whose values do not change; a write gives a tensor another value.
_positions: WeakKeyDictionary[Value, list[LazyTensor]] = WeakKeyDictionary()


def index(args: Any, kwargs: Any) -> Any:
    """Record `aten::index`. A mask that does not fit, or of bytes, stays: eager raises or warns."""
    x, indices = args
    if type(x) is LazyTensor and any(_is_mask(i) for i in indices):
        found: list[Any] = []
        for item in indices:
            if not _is_mask(item):
                found.append(item)
            elif _fits(item, x, len(found)):
                found += _where(item)
            else:
                return _record(args, kwargs)
        return aten.index.Tensor(x, found)  # C++ records it
    return _record(args, kwargs)


def _is_mask(item: Any) -> bool:
    return type(item) is LazyTensor and item.dtype is torch.bool


def _fits(mask: LazyTensor, x: LazyTensor, dim: int) -> bool:
    """Whether a mask is one for the dims of `x` from `dim` on."""
    size = mask.shape
    is_there = 0 < len(size) <= len(x.shape) - dim
    return is_there and x.shape[dim : dim + len(size)] == size and mask.device == x.device


def _where(mask: LazyTensor) -> list[LazyTensor]:
    """For each dim of a mask the positions where it is true, int64 [count]. Cost: syncs."""
    handle = mask._h
    is_whole = type(handle) is Cell
    known = _positions.get(handle.value) if is_whole else None
    if known is None:
        metrics.count("aten::nonzero")
        known = upload_all(_true_positions(real(handle, "nonzero")), mask.device.index)
        if is_whole:
            _positions[handle.value] = known
    return known


@in_own_state
def _true_positions(mask: torch.Tensor) -> list[torch.Tensor]:
    return [column.contiguous() for column in mask.nonzero(as_tuple=True)]
