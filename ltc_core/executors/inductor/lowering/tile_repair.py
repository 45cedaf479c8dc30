"""A repair of PyTorch's compiler: in tiles of two dims, it added values at wrong positions, also beyond the memory.

Where the elements of an operand lie along another dim than those of the result, as in channels-last images, a loop runs
over tiles: vectors along one dim, elements along the other one. For sums at computed positions (folding, the gradient
of unfolding, `index_put` that accumulates) the position within the tile was put into the index twice. Used by
`build_artifact`, in the compiler's process only.
"""

from __future__ import annotations

from typing import Any
from unittest import mock

from torch._inductor.codegen.cpp import CppTile2DKernel

__all__ = ["repaired"]

_transform = CppTile2DKernel.transform_indexing


def repaired() -> Any:
    """A context in which the position within the tile is put into an index once."""
    return mock.patch.object(CppTile2DKernel, "transform_indexing", _transform_once)


def _transform_once(kernel: Any, index: Any) -> Any:
    is_done = kernel.inner_itervar() in index.free_symbols
    return index if is_done else _transform(kernel, index)
