"""A repair of PyTorch's compiler: a write went into the memory that a later write had put in its place.

A write that covers a whole tensor, as `y[y > 8] = 0` does, gives the tensor the memory of the new elements. An earlier
write into a part of it, as `y[index] = v`, kept the tensor as its target, so it went into the new memory too, and the
elements before it were read where those after it were meant. Used by `build_artifact`, in the compiler's process only.
"""

from __future__ import annotations

import copy
from typing import Any
from unittest import mock

from torch._inductor import ir

__all__ = ["repaired"]

_init = ir.MutationLayoutSHOULDREMOVE.__init__


def repaired() -> Any:
    """A context in which a write keeps the memory that its target has when the write is lowered."""
    return mock.patch.object(ir.MutationLayoutSHOULDREMOVE, "__init__", _init_fixed)


def _init_fixed(layout: Any, target: Any) -> None:
    _init(layout, _fixed(target))


def _fixed(target: Any) -> Any:
    """The target through boxes and views of its own, which no other write gives other memory."""
    if not isinstance(target, ir.MutableBox | ir.BaseView):
        return target
    found = copy.copy(target)
    # Views are frozen dataclasses.
    object.__setattr__(found, "data", _fixed(target.data))
    return found
