"""View ops on real tensors, and writes through them.

A view of a lazy tensor is a lens: the view steps (op and arguments) from the whole tensor to the part. `apply_view`
applies one step to a real tensor. `open_lens` returns the part, for an op that writes it in place. The strides of the
real tensor may differ from those recorded. A step that cannot alias there makes a copy, and `close_lens` writes the
copy back. Used by `record.make_node`, `ops.fallback` and the executors.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

__all__ = [
    "NOT_OF_ELEMENTS",
    "RESHAPING",
    "Lens",
    "Pending",
    "ViewStep",
    "apply_lens",
    "apply_view",
    "close_lens",
    "open_lens",
    "real_view",
    "shares_memory",
    "steps_to_memory",
]

aten = torch.ops.aten


class ViewStep(NamedTuple):
    """One view op with its arguments; `which` selects a result if the op returns several."""

    op: torch._ops.OpOverload
    args: tuple[Any, ...]
    which: int | None = None

    def __repr__(self) -> str:
        select = "" if self.which is None else f"[{self.which}]"
        return f"{self.op._opname}{self.args}{select}"


Lens = tuple[ViewStep, ...]


def lenses_of(
    op: torch._ops.OpOverload, static: tuple[Any, ...], count: int, many: bool
) -> tuple[tuple[ViewStep], ...]:
    """The lens of each result of a view op; `many` if it returns a list."""
    return tuple((ViewStep(op, static, i if many else None),) for i in range(count))


class Pending(NamedTuple):
    """A step of a lens that made a copy: `part` must be written back into `whole`."""

    whole: torch.Tensor
    step: ViewStep
    part: torch.Tensor


def _as_strided(t: torch.Tensor, size: Any, stride: Any, offset: int | None = None) -> torch.Tensor:
    """`as_strided` on packed memory, whatever the layout of the real tensor is."""
    t = t.contiguous()
    return t.as_strided(size, stride, t.storage_offset() + (offset or 0))


def _view_dtype(t: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    if t.dtype.itemsize != dtype.itemsize:
        t = t.contiguous()
    return t.view(dtype)


def _view_as_complex(t: torch.Tensor) -> torch.Tensor:
    return torch.view_as_complex(t.contiguous())


def _conj(t: torch.Tensor) -> torch.Tensor:
    return torch.conj_physical(t)


_Replacements = dict[torch._ops.OpOverload, Callable[..., torch.Tensor]]
_RESHAPING: _Replacements = {
    aten.view.default: lambda t, size: t.reshape(size),
    aten._unsafe_view.default: lambda t, size: t.reshape(size),
    aten._reshape_alias.default: lambda t, size, stride: t.reshape(size),
}
_NOT_OF_ELEMENTS: _Replacements = {
    aten.view.dtype: _view_dtype,
    aten.as_strided.default: _as_strided,
    aten.view_as_complex.default: _view_as_complex,
    aten._conj.default: _conj,
    aten._neg_view.default: torch.neg,
}
# Replacements of view ops that raise for some strides, or only set a bit (conj, neg). The other ops run as they are.
_ON_REAL = _RESHAPING | _NOT_OF_ELEMENTS
# View ops whose part is not made of elements of the memory that they see, at the strides that their meta says.
NOT_OF_ELEMENTS = tuple(_NOT_OF_ELEMENTS)
# View ops that copy where the strides forbid a view.
RESHAPING = tuple(_RESHAPING)

# Steps that always copy on real tensors -> function that turns the part back into the whole.
_INVERSE: dict[torch._ops.OpOverload, Callable[[torch.Tensor], torch.Tensor]] = {
    aten._conj.default: torch.conj_physical,
    aten._neg_view.default: torch.neg,
}


def real_view(op: torch._ops.OpOverload) -> Callable[..., Any]:
    """Function that runs view op `op` on a real tensor of any strides."""
    return _ON_REAL.get(op, op)


def apply_view(t: torch.Tensor, step: ViewStep) -> torch.Tensor:
    """Apply one step of a lens to a real tensor; the result is a copy if the strides forbid a view."""
    result = real_view(step.op)(t, *step.args)
    return result if step.which is None else result[step.which]  # type: ignore[no-any-return]


def apply_lens(t: torch.Tensor, lens: Lens) -> torch.Tensor:
    for step in lens:
        t = apply_view(t, step)
    return t


def shares_memory(a: torch.Tensor, b: torch.Tensor) -> bool:
    return bool(a.untyped_storage()._cdata == b.untyped_storage()._cdata)


def steps_to_memory(t: torch.Tensor, lens: Lens) -> Lens:
    """The steps of `lens` up to the last one that copies: the strides after it refer to that copy.

    Args:
        t: the whole tensor, on the device `meta`.
    """
    if not any(step.op in _ON_REAL for step in lens):
        return ()
    last = 0
    for number, step in enumerate(lens, 1):
        part = apply_view(t, step)
        if not shares_memory(part, t):
            last = number
        t = part
    return lens[:last]


def open_lens(t: torch.Tensor, lens: Lens) -> tuple[torch.Tensor, list[Pending]]:
    """The part of `t` that `lens` selects, for writing in place, and the copies that `close_lens` must write back."""
    pending = []
    for step in lens:
        part = apply_view(t, step)
        if not shares_memory(part, t):
            pending.append(Pending(t, step, part))
        t = part
    return t, pending


def close_lens(pending: list[Pending]) -> None:
    """Write the copies back into the whole tensor, innermost first."""
    for whole, step, part in reversed(pending):
        _write_back(whole, step, part)


def _write_back(t: torch.Tensor, step: ViewStep, part: torch.Tensor) -> None:
    inverse = _INVERSE.get(step.op)
    if inverse is not None:
        t.copy_(inverse(part))
    elif step.op is aten.as_strided.default:
        packed = t.contiguous().clone()
        size, stride, *offset = step.args
        packed.as_strided(size, stride, offset[0] if offset and offset[0] else 0).copy_(part)
        t.copy_(packed)
    elif step.op is aten.view.dtype:
        t.copy_(part.view(t.dtype))
    elif step.op is aten.view_as_complex.default:
        t.copy_(torch.view_as_real(part))
    else:
        t.copy_(part.reshape(t.shape))
