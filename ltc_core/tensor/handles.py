"""Handles: what a lazy tensor holds instead of storage.

A `Value` is one immutable value: pending in the running trace (its epoch and number there) or backed by a
buffer. A `Cell` is mutable memory: its current value, shared by all tensors that alias the whole of it. A `View`
is the part of a cell that a lens selects. An in-place op rebinds the cell to a new value; views of the cell read the
new value. Made by `record`, held by `lazy_tensor`; `runtime.device_context` gives values their buffers.

The classes here say what the types are. Where there is a C++ compiler, `csrc/ltc_objects.cpp` takes their place, with
the same attributes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ltc_core.graph.ir import Lens, TensorMeta
from ltc_core.tensor.native_objects import native

if TYPE_CHECKING:
    from ltc_core.tensor.buffer import Buffer

Trace = Any  # `record.trace.Trace`, which imports this file

__all__ = ["Cell", "Handle", "Value", "View", "base_of", "lens_of"]


class Value:
    """A value: number `index` in the trace of `epoch`; after the cut of that trace, the contents of `buffer`.

    With neither it is not recorded yet: uninitialized memory, or a view.
    """

    __slots__ = ("__weakref__", "buffer", "epoch", "index")

    buffer: Buffer | None

    def __init__(self, epoch: int, index: int) -> None:
        self.epoch = epoch
        self.index = index
        self.buffer = None

    @staticmethod
    def of(buffer: Buffer) -> Value:
        value = Value(-1, -1)
        value.buffer = buffer
        return value


class Cell:
    """Memory that tensors share: its current value; `version` counts how often the value was replaced."""

    __slots__ = ("meta", "trace", "value", "version")

    def __init__(self, trace: Trace, value: Value, meta: TensorMeta) -> None:
        self.trace = trace
        self.value = value
        self.meta = meta
        self.version = 0

    def rebind(self, value: Value) -> None:
        self.value = value
        self.version += 1


class View:
    """A part of a cell. `value` caches its value in the running trace, as of `version` of the cell."""

    __slots__ = ("base", "lens", "meta", "trace", "value", "version")

    def __init__(self, base: Cell, lens: Lens, meta: TensorMeta, value: Value) -> None:
        self.trace = base.trace
        self.base = base
        self.lens = lens
        self.meta = meta
        self.value = value
        self.version = base.version


Handle = Cell | View

if not TYPE_CHECKING and native is not None:
    Value, Cell, View = native.Value, native.Cell, native.View


def base_of(handle: Handle) -> Cell:
    return handle if type(handle) is Cell else handle.base  # type: ignore[union-attr]


def lens_of(handle: Handle) -> Lens:
    return () if type(handle) is Cell else handle.lens  # type: ignore[union-attr]
