"""Whether other tensors lie in a tensor's memory: known by Python's counts of references, of which it is made."""

from __future__ import annotations

from ltc_core.tensor.alive import alive
from ltc_core.tensor.handles import Cell, base_of
from ltc_core.tensor.lazy_tensor import LazyTensor, has_no_other_reference

__all__ = ["is_alone"]


def is_alone(t: LazyTensor) -> bool:
    """Whether no other tensor lies in the memory of `t`.

    Cost: 3 us if only `t` refers to its memory; else it looks at every object of the process (`alive`).
    """
    return has_no_other_reference(t) or not any(
        other is not t and _is_in(other, base_of(t._h)) for other in alive(LazyTensor)
    )


def _is_in(t: LazyTensor, base: Cell) -> bool:
    handle = getattr(t, "_h", None)  # none yet, where another thread is making it
    return handle is not None and base_of(handle) is base
