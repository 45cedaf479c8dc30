"""Shapes and types of `torch_xla.core.xla_builder`, and tensors on the device `meta` that have them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ltc_dist.compat.xla_ops import DTYPES
from ltc_dist.compat.xla_text import KINDS

__all__ = ["Shape", "Type"]


class Type:
    """XLA's names of dtypes."""

    F32, F64, BF16, F16 = "f32", "f64", "bf16", "f16"
    U8, S8, U16, S16, U32, S32, U64, S64 = "u8", "s8", "u16", "s16", "u32", "s32", "u64", "s64"
    C64, C128, PRED = "c64", "c128", "pred"


class Shape:
    """Type and sizes of a tensor, or a list of these."""

    def __init__(self, shape: Any) -> None:
        self.shape = shape

    @classmethod
    def create(
        cls, dtype: str, sizes: Sequence[int], dynamic_dimensions: Sequence[int] | None = None
    ) -> Shape:
        dynamic = (
            {} if dynamic_dimensions is None else {"dynamic_dimensions": tuple(dynamic_dimensions)}
        )
        return cls({"type": str(dtype), "sizes": tuple(sizes), **dynamic})

    @classmethod
    def of(cls, value: Any) -> Shape:
        if isinstance(value, tuple):
            return cls([cls.of(v).shape for v in value])
        return cls.create(KINDS[value.dtype], value.shape)

    def meta(self) -> Any:
        """A tensor of this shape on the device `meta`, or a tuple of them."""
        if self.is_tuple():
            return tuple(Shape(shape).meta() for shape in self.shape)
        return torch.empty(self.sizes, dtype=DTYPES[self.dtype], device="meta")

    def is_tuple(self) -> bool:
        return isinstance(self.shape, list | tuple)

    def tuple_size(self) -> int:
        assert self.is_tuple()
        return len(self.shape)

    def tuple_shape(self, index: int) -> Any:
        assert self.is_tuple()
        return self.shape[index]

    def is_dynamic(self) -> bool:
        return self.dynamic_dimensions is not None

    def as_scalar(self) -> Shape:
        return Shape.create(self.dtype, ())

    @property
    def rank(self) -> int:
        return len(self.sizes)

    @property
    def sizes(self) -> tuple[int, ...]:
        return self._part("sizes")  # type: ignore[no-any-return]

    @property
    def dynamic_dimensions(self) -> tuple[int, ...] | None:
        return self._part("dynamic_dimensions")  # type: ignore[no-any-return]

    @property
    def dtype(self) -> str:
        return self._part("type")  # type: ignore[no-any-return]

    def _part(self, name: str) -> Any:
        assert not self.is_tuple()
        return self.shape.get(name)
