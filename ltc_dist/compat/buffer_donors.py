"""Buffers that a script donates, and placeholders: tensors with a shape and without memory.

In: tensors that `torch.ops.xla.dynamo_set_buffer_donor_` has marked. Out: `donate`, called at the end of a step, drops
the value of each marked tensor that the step reads, so that the step's program may reuse its memory. The tensor is a
placeholder from then on. Used by `torch_xla._XLAC`, `xm.mark_step` and `xb.create_placeholder_tensor`.
"""

from __future__ import annotations

from collections.abc import Callable, MutableMapping, Sequence
from typing import Any
from weakref import ref

import torch
from torch.utils.weak import WeakIdKeyDictionary

from ltc_core import metrics, source
from ltc_core.api.verbs import DeviceLike, lazy_device, pending
from ltc_core.errors import DonatedError, NoValueError, PlaceholderError, to_raise
from ltc_core.graph.ir import TensorMeta, references
from ltc_core.runtime.devices import context, context_of
from ltc_core.tensor.buffer import Buffer
from ltc_core.tensor.handles import Cell, Value, base_of
from ltc_core.tensor.lazy_tensor import LazyTensor, wrap

__all__ = [
    "donate",
    "handles_of",
    "is_deleted",
    "is_donor",
    "is_placeholder",
    "make_placeholder",
    "positions",
    "register",
    "set_donor",
    "watch",
]


# A marked tensor -> the value that it had. A mark ends when the tensor gets another value, which frees this one.
_donors: MutableMapping[Any, ref[Value]] = WeakIdKeyDictionary()
_num_marks = 0  # that were made
_library: Any = torch.library.Library("xla", "FRAGMENT")  # type: ignore[no-untyped-call]


def register() -> None:
    """Define `torch.ops.xla.dynamo_set_buffer_donor_`, which marks a tensor, or removes the mark."""
    _library.define("dynamo_set_buffer_donor_(Tensor(a!) t, bool should_donor) -> Tensor(a!)")
    _library.impl("dynamo_set_buffer_donor_", _mark, "CompositeImplicitAutograd")


def _mark(t: torch.Tensor, should_donor: bool) -> torch.Tensor:
    set_donor(t, should_donor)
    return t


def set_donor(t: torch.Tensor, is_donated: bool) -> bool:
    """Mark a tensor, or remove its mark. Returns False for a tensor that is pending or on another device."""
    if not isinstance(t, LazyTensor) or base_of(t._h).value.buffer is None:
        return False
    metrics.count("XlaSetBufferDonation")
    _donors.pop(t, None)
    if is_donated:
        global _num_marks
        _num_marks += 1
        _donors[t] = ref(base_of(t._h).value)
    return True


def is_donor(t: torch.Tensor) -> bool:
    """Whether a tensor is marked and has the value that it had then."""
    if not isinstance(t, LazyTensor) or t not in _donors:
        return False
    return _donors[t]() is base_of(t._h).value


def donate(device: DeviceLike = None) -> None:
    """Make placeholders of the marked tensors whose values the pending ops read.

    Args:
        device: whose pending ops; those of all devices by default.
    """
    for t in _that_are_read(device):
        del _donors[t]
        base_of(t._h).rebind(
            _without_memory(t, DonatedError, "its buffer is deleted: it was donated")
        )


def watch() -> Callable[[], bool]:
    """Return a function that says whether, since then, a tensor was marked, or a marked one got another value.

    It also says so if the pending ops read the value of a marked tensor.
    """
    marked, number = [t for t in list(_donors) if is_donor(t)], _num_marks

    def is_used() -> bool:
        is_ended = any(not is_donor(t) for t in marked)
        return is_ended or number != _num_marks or bool(_that_are_read())

    return is_used


def positions(tensors: Sequence[torch.Tensor]) -> list[int]:
    """Which of the values that tensors are computed from are those of marked tensors, in the order of their use."""
    lazy = [t for t in tensors if isinstance(t, LazyTensor)]
    marked = {base_of(t._h).value.index for t in _that_are_read(lazy[0].device if lazy else None)}
    graph, _ = pending(lazy)
    read = dict.fromkeys(number for node in graph.nodes for number in references(node))
    return [at for at, number in enumerate(read) if number in marked]


def _that_are_read(device: DeviceLike = None) -> list[LazyTensor]:
    """The marked tensors whose values the pending ops read. Marks that have ended are forgotten."""
    read: dict[int, set[int]] = {}
    found = []
    for t in list(_donors):
        cell, index = base_of(t._h), t.device.index
        if not is_donor(t):
            del _donors[t]
        elif device is None or torch.device(device) == t.device:
            if index not in read:
                graph, _ = pending(None, t.device)
                read[index] = {number for node in graph.nodes for number in references(node)}
            if cell.value.epoch == cell.trace.epoch and cell.value.index in read[index]:
                found.append(t)
    return found


def make_placeholder(
    shape: Sequence[int], dtype: torch.dtype, device: DeviceLike = None
) -> torch.Tensor:
    """A tensor of the device with a shape and a dtype, but no memory: graphs are recorded with it, and not run."""
    trace = context((lazy_device() if device is None else torch.device(device)).index or 0).trace
    empty = torch.empty(tuple(shape), dtype=dtype, device="meta")
    meta = TensorMeta.of(empty.shape, empty.stride(), 0, dtype)
    t = wrap(Cell(trace, Value(-1, -1), meta))
    base_of(t._h).value = _without_memory(t, PlaceholderError, "it is a placeholder")
    return t


def is_placeholder(t: torch.Tensor) -> bool:
    """Whether a tensor has no memory: a placeholder, or one whose buffer was donated."""
    return isinstance(t, LazyTensor) and isinstance(_error_of(t), NoValueError)


def is_deleted(t: torch.Tensor) -> bool:
    """Whether a tensor's buffer was donated."""
    return isinstance(t, LazyTensor) and isinstance(_error_of(t), DonatedError)


def handles_of(tensors: Sequence[torch.Tensor]) -> list[int]:
    """Number of each tensor's buffer; tensors that share a buffer have the same number.

    Raises:
        DonatedError: a buffer was donated.
    """
    numbers = []
    for t in tensors:
        assert isinstance(t, LazyTensor), "tensors of the device have handles"
        value, error = base_of(t._h).value, _error_of(t)
        if isinstance(error, DonatedError):
            raise to_raise(error)
        numbers.append(id(value if value.buffer is None else value.buffer))
    return numbers


def _error_of(t: LazyTensor) -> BaseException | None:
    buffer = base_of(t._h).value.buffer
    return None if buffer is None else buffer.error


def _without_memory(t: LazyTensor, kind: type[NoValueError], why: str) -> Value:
    error = kind(
        f"the tensor has no value: {why}",
        got=f"{str(t.dtype).removeprefix('torch.')}{list(t.shape)} on {t.device}",
        where=source.user_line(),
        next="read the results of the step instead; remove the mark of a buffer that is read after the step",
    )
    return Value.of(Buffer.failed(context_of(t._h).memory, error))
