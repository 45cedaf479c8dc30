"""`torch_xla.experimental.xla_marker`: the op `torch.ops.xla.mark_tensor`, which marks tensors of a composite."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ltc_core import source
from ltc_core.errors import ExportError
from ltc_core.graph.composite import MARK, Boundary

__all__ = [
    "BoundaryMetadata",
    "deserialize_composite_attr",
    "mark_tensor",
    "serialize_composite_attr",
]

BoundaryMetadata = Boundary
_KINDS = (str, float, int, bool)


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def serialize_composite_attr(attr: dict[str, Any] | None) -> tuple[tuple[str, Any], ...] | None:
    """Attributes of a composite as `mark_tensor` takes them.

    Raises:
        ExportError: a name is no string, or a value is no string, number, truth value or list of one kind of these
            without strings.
    """
    if attr is None:
        return None
    if not isinstance(attr, dict) or not all(map(_is_attribute, attr.items())):
        raise ExportError(
            "a composite has other attributes than StableHLO can have",
            got=repr(attr),
            where=source.user_line(),
            next="give a dict of strings, numbers, truth values, or lists of numbers or truth values",
        )
    return tuple(attr.items())


def _is_attribute(item: tuple[Any, Any]) -> bool:
    name, value = item
    if not isinstance(value, (list, tuple)):
        return isinstance(name, str) and type(value) in _KINDS
    return isinstance(name, str) and len({*map(type, value)}) == 1 and type(value[0]) in _KINDS[1:]


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def deserialize_composite_attr(attr: Sequence[tuple[str, Any]] | None) -> dict[str, Any] | None:
    """What `serialize_composite_attr` was given."""
    return None if attr is None else dict(attr)


def mark_tensor(
    x: torch.Tensor, name: str, pos: int, id: str, is_input: bool, attr: Any = None
) -> torch.Tensor:
    """Mark a tensor as an input or a result of a composite; returns a copy of it, to be used in its place.

    Args:
        x: of any shape and dtype, on any device.
        name: of the composite.
        pos: which input or result it is.
        id: the same for all tensors of one composite.
        attr: what `serialize_composite_attr` returned, with the first result.
    """
    boundary = Boundary(name, pos, id, is_input, deserialize_composite_attr(attr))
    return MARK(x, boundary.text)  # type: ignore[no-any-return]


# Kept: the op is there as long as its library.
_torch_library: Any = torch.library
_library = _torch_library.Library("xla", "FRAGMENT")
_library.define(
    "mark_tensor(Tensor x, str name, int pos, str id, bool is_input, Any? attr=None) -> Tensor"
)
_library.impl("mark_tensor", mark_tensor, "CompositeImplicitAutograd")
