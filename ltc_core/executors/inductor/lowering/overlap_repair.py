"""A repair of PyTorch's compiler: it took views that overlap for views that do not, and wrote into what is still read.

Before an op is made to write in place, the compiler asks whether other views of the memory overlap with what it
writes. The answer was no for `x[1:, 1:]` and `x`, so that `x[1:, 1:].index_add(0, i, v)` changed `x`. Used by
`build_artifact`, in the compiler's process only.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Sequence
from typing import Any
from unittest import mock

import torch
from torch._inductor.fx_passes import reinplace

__all__ = ["may_overlap", "repaired"]

# All memory lies in it: views whose columns differ there end before the other begins.
_ONE_ROW = sys.maxsize


def repaired() -> Any:
    """A context in which the compiler sees all views that overlap."""
    return mock.patch.object(reinplace, "compute_overlapping_tensors", _overlapping)


def _overlapping(tensors: Sequence[torch.Tensor]) -> set[int]:
    """Positions of the tensors that may overlap with another one."""
    return {
        position
        for pair in itertools.combinations(range(len(tensors)), 2)
        if may_overlap(*(tensors[k] for k in pair))
        for position in pair
    }


def may_overlap(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether two views of one memory may have an element in common; False is certain.

    Views are apart if one ends before the other begins, or if they are other columns of the same rows.
    """
    numbers = [*a.shape, *b.shape, *a.stride(), *b.stride(), a.storage_offset(), b.storage_offset()]
    if not all(type(n) is int for n in numbers):
        return True
    if not a.numel() or not b.numel():
        return False
    strides = [
        s for t in (a, b) for n, s in zip(t.shape, t.stride(), strict=True) if n > 1 and s > 1
    ]
    return not any(_has_other_columns(a, b, row) for row in {_ONE_ROW, *strides})


def _has_other_columns(a: torch.Tensor, b: torch.Tensor, row: int) -> bool:
    """Whether both tensors lie in rows of this size, and have no column in common."""
    for t in (a, b):
        steps = [s for n, s in zip(t.shape, t.stride(), strict=True) if n > 1 and s >= row]
        if any(s % row for s in steps) or _columns(t, row)[1] >= row:
            return False
    (first, last), (other_first, other_last) = _columns(a, row), _columns(b, row)
    return last < other_first or other_last < first


def _columns(t: torch.Tensor, row: int) -> tuple[int, int]:
    """The first and the last column of a tensor in rows of this size."""
    first = int(t.storage_offset()) % row
    return first, first + sum(
        (n - 1) * s for n, s in zip(t.shape, t.stride(), strict=True) if s < row
    )
