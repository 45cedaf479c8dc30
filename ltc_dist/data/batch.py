"""A batch: tensors in whatever structure a dataset or a collate function gives them.

`to_device` uploads the tensors and keeps the structure; `num_bytes` sums their bytes. Used by
`prefetch`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ltc_core.runtime.devices import upload_all
from ltc_core.serialization.tree import leaves, map_leaves

__all__ = ["map_movable", "num_bytes", "to_device"]


def to_device(batch: Any, device: torch.device) -> Any:
    """Return the batch with its tensors on `device`.

    Tensors are found in lists, tuples, named tuples, mappings and dataclasses, and in what an object of another class
    has as attributes; an object with a method `to` (a packed sequence, a tokenizer's output) is moved by it. Objects
    without tensors stay what they are.

    Cost: one copy of each tensor; one transfer for all plain ones.
    """
    plain = [item for item in leaves(_is_movable, batch, objects=1) if _is_plain(item)]
    uploaded = upload_all(plain, device.index or 0)
    there = {id(item): on_device for item, on_device in zip(plain, uploaded, strict=True)}

    def move(item: Any) -> Any:
        found = there.get(id(item))
        return item.to(device) if found is None else found

    return map_movable(move, batch)


def map_movable(move: Callable[[Any], Any], batch: Any) -> Any:
    """Return the batch with `move(item)` in the place of each tensor, and of each object with a method `to`."""
    return map_leaves(_is_movable, move, batch, objects=1)


def num_bytes(batch: Any) -> int:
    """Bytes of the tensors in a batch, as if they were dense; one that stands there twice counts once."""
    tensors = leaves(lambda item: isinstance(item, torch.Tensor), batch, objects=1)
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def _is_movable(item: Any) -> bool:
    return callable(getattr(item, "to", None)) and not isinstance(item, type)


def _is_plain(item: Any) -> bool:
    """Whether moving an item is no more than copying a tensor's values."""
    return (
        type(item) is torch.Tensor
        and item.device.type == "cpu"
        and item.layout is torch.strided
        and not (item.requires_grad or item.is_conj() or item.is_neg())
    )
