"""Handles: what a lazy tensor holds instead of storage.

A `Value` is one immutable value: pending in the running trace (its epoch and number there) or backed by a
buffer. A `Cell` is mutable memory: the value it has now, shared by all tensors that alias it as a whole. A
`View` is a part of a cell, seen through a lens. An in-place op gives the cell a new value; views follow.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ltc_core.graph.ir import Lens, TensorMeta

if TYPE_CHECKING:
    from ltc_core.tensor.buffer import Buffer

Trace = Any  # `trace.Trace`, which stands on this file

__all__ = ["Cell", "Handle", "Value", "View", "base_of", "lens_of"]


class Value:
    """A value: number `index` of the trace of this `epoch`, or, once that is cut, the contents of `buffer`.

    With neither it is the contents of memory nobody has written yet.
    """

    __slots__ = ("__weakref__", "buffer", "epoch", "index")

    buffer: Buffer | None

    def __init__(self, epoch: int, index: int) -> None:
        self.epoch = epoch
        self.index = index
        self.buffer = None

    @classmethod
    def of(cls, buffer: Buffer) -> Value:
        value = cls(-1, -1)
        value.buffer = buffer
        return value


class Cell:
    """Memory that tensors share: its value, and how often that was replaced."""

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
    """A part of a cell. `value` caches the part's value in the running trace at `version` of the cell."""

    __slots__ = ("base", "lens", "meta", "trace", "value", "version")

    def __init__(self, base: Cell, lens: Lens, meta: TensorMeta, value: Value) -> None:
        self.trace = base.trace
        self.base = base
        self.lens = lens
        self.meta = meta
        self.value = value
        self.version = base.version


Handle = Cell | View


def base_of(handle: Handle) -> Cell:
    return handle if type(handle) is Cell else handle.base  # type: ignore[union-attr]


def lens_of(handle: Handle) -> Lens:
    return () if type(handle) is Cell else handle.lens  # type: ignore[union-attr]
