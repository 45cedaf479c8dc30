"""Sizes that a script marks as dynamic: StableHLO that is shown of a recorded graph leaves them free.

In: tensors that have their values, marked by `torch_xla._XLAC._xla_mark_dynamic`. Out: their marks, for
`xm.get_stablehlo`. Nothing runs with such sizes: the device's programs are for the sizes that tensors have.
"""

from __future__ import annotations

from collections.abc import MutableMapping
from typing import Any
from weakref import ref

import torch
from torch.utils.weak import WeakIdKeyDictionary

from ltc_core import source
from ltc_core.errors import ExportError
from ltc_core.tensor.handles import Cell, Value
from ltc_core.tensor.lazy_tensor import LazyTensor

__all__ = ["mark", "marked"]

# A tensor -> the value that it had, and the dims. A mark ends when the tensor gets another value.
_marks: MutableMapping[Any, tuple[ref[Value], set[int]]] = WeakIdKeyDictionary()


def mark(t: torch.Tensor, dim: int) -> None:
    """Mark the size of a dim as dynamic.

    Raises:
        ExportError: the tensor is pending, a view, or not on the device; or it has no such dim.
    """
    handle = t._h if isinstance(t, LazyTensor) else None
    if type(handle) is not Cell or handle.value.buffer is None or not 0 <= dim < t.dim():
        raise ExportError(
            "the size cannot be dynamic",
            got=f"dim {dim} of {type(t).__name__} of shape {list(t.shape)} on {t.device}, expected a dim of a tensor "
            "that has its value",
            where=source.user_line(),
            next="mark the tensors that it is computed from; call xm.mark_step() first, or clone a view",
        )
    _marks[t] = ref(handle.value), {dim, *_dims(t)}


def marked() -> dict[torch.Tensor, set[int]]:
    """The dims of each tensor that is marked and has the value that it had then."""
    return {t: found for t in list(_marks) if (found := _dims(t))}


def _dims(t: Any) -> set[int]:
    value, dims = _marks.get(t, (None, set[int]()))
    return dims if value is not None and value() is t._h.value else set()
