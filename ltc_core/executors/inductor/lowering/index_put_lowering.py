"""The compiler's lowering of `index_put` in place, repaired: values that are the written memory are copied first.

PyTorch's compiler runs `index_put` in place on an operand that is not used after it, but the values may be that
operand, as in `h.index_add(0, index, h)`, or a view of it. The compiler then reads elements that the loop has
overwritten. Used by `build_artifact`, in the compiler's process only.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import torch
from torch._inductor import inductor_prims, ir
from torch._inductor.lowering import index_put_impl_, register_lowering

from ltc_core.executors.inductor.lowering.own_memory_lowering import origin

__all__ = ["register"]

aten = torch.ops.aten


def register() -> None:
    """Register the lowering of both ops."""
    register_lowering(aten.index_put_.default, type_promotion_kind=None)(_checked)
    register_lowering(inductor_prims._unsafe_index_put_, type_promotion_kind=None)(_unchecked)


def _checked(x: Any, indices: Any, values: Any, accumulate: bool = False) -> Any:
    return _lower(x, indices, values, accumulate, check=True)


def _unchecked(x: Any, indices: Any, values: Any, accumulate: bool = False) -> Any:
    return _lower(x, indices, values, accumulate, check=False)


def _lower(x: Any, indices: Any, values: Any, accumulate: bool, *, check: bool) -> Any:
    x.realize()
    memory = ir.try_get_name(x)  # type: ignore[no-untyped-call]

    def apart(t: Any) -> Any:
        return t if t is None or memory not in _memory_read(t) else ir.ExternKernel.copy_input(t)

    return index_put_impl_(  # type: ignore[no-untyped-call]
        x, [apart(t) for t in indices], apart(values), accumulate, check=check, may_realize=True
    )


def _memory_read(t: Any) -> Collection[str]:
    """Names of the buffers that the compiler reads for this operand."""
    source = origin(t)
    return [source.get_name()] if isinstance(source, ir.Buffer) else source.get_read_names()
