"""A batch: tensors in whatever structure a dataset or a collate function gives them.

`to_device` uploads the tensors and keeps the structure and everything else; `num_bytes` counts them. Used by
`prefetch`.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Mapping
from types import ModuleType
from typing import Any

import torch

from ltc_core.runtime.devices import upload_all

__all__ = ["mapped", "num_bytes", "to_device"]


def to_device(batch: Any, device: torch.device) -> Any:
    """Give the batch with its tensors on `device`.

    Tensors are found in lists, tuples, named tuples, mappings and dataclasses, and in what an object of another class
    has as attributes; an object with a method `to` (a packed sequence, a tokenizer's output) is moved by it. Objects
    without tensors stay what they are.

    Cost: one copy of each tensor; one transfer for all plain ones.
    """
    plain: dict[int, torch.Tensor] = {}

    def note(movable: Any) -> Any:
        if _is_plain(movable):
            plain[id(movable)] = movable
        return movable

    mapped(batch, note)
    there = dict(zip(plain, upload_all(list(plain.values()), device.index or 0), strict=True))

    def move(movable: Any) -> Any:
        found = there.get(id(movable))
        return movable.to(device) if found is None else found

    return mapped(batch, move)


def _is_plain(movable: Any) -> bool:
    """Tell whether moving a tensor is no more than copying its values."""
    return (
        type(movable) is torch.Tensor
        and movable.device.type == "cpu"
        and movable.layout is torch.strided
        and not (movable.requires_grad or movable.is_conj() or movable.is_neg())
    )


def num_bytes(batch: Any) -> int:
    """Count the bytes of the tensors in a batch, as if they were dense."""
    total = 0

    def count(movable: Any) -> Any:
        nonlocal total
        if isinstance(movable, torch.Tensor):
            total += movable.numel() * movable.element_size()
        elif isinstance(movable, Mapping):
            total += sum(num_bytes(v) for v in movable.values())
        elif isinstance(movable, tuple):
            total += sum(num_bytes(v) for v in movable)
        return movable

    mapped(batch, count)
    return total


def mapped(item: Any, move: Callable[[Any], Any], enters: bool = True) -> Any:
    """Give a structure with what `move` gives in the place of each tensor, and of each object with a method `to`.

    Args:
        enters: look for tensors among the attributes of other objects.
    """
    if callable(getattr(item, "to", None)) and not isinstance(item, type):
        return move(item)
    if isinstance(item, tuple):
        items = [mapped(i, move, enters) for i in item]
        return type(item)(*items) if hasattr(item, "_fields") else _like(item, tuple, items)
    if isinstance(item, list):
        return _like(item, list, [mapped(i, move, enters) for i in item])
    if isinstance(item, Mapping):
        return _like(item, dict, {k: mapped(v, move, enters) for k, v in item.items()})
    if dataclasses.is_dataclass(item) and not isinstance(item, type):
        moved = copy.copy(item)
        for field in dataclasses.fields(item):
            object.__setattr__(moved, field.name, mapped(getattr(item, field.name), move, enters))
        return moved
    if not enters or isinstance(item, type | ModuleType) or not hasattr(item, "__dict__"):
        return item
    return _with_attributes(item, move)


def _with_attributes(item: Any, move: Callable[[Any], Any]) -> Any:
    """Give a copy of an object whose attributes have tensors, else the object.

    Objects among the attributes are not entered: they may refer to each other in circles.
    """
    has_tensors = False

    def noting(movable: Any) -> Any:
        nonlocal has_tensors
        has_tensors = True
        return move(movable)

    found = {name: mapped(value, noting, enters=False) for name, value in vars(item).items()}
    if not has_tensors:
        return item
    moved = copy.copy(item)
    vars(moved).update(found)
    return moved


def _like(item: Any, plain: type, content: Any) -> Any:
    """Make a collection of the type of `item`, or a plain one if that type cannot be made from its content."""
    if type(item) is plain:
        return plain(content)
    try:
        if isinstance(item, Mapping) and hasattr(
            item, "update"
        ):  # keeps what else it has: a default factory
            made = copy.copy(item)
            made.update(content)
            return made
        return type(item)(content)
    except TypeError:
        return plain(content)
