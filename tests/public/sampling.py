"""How much of PyTorch's databases is run: everything with `PUBLIC=all` (`make test-public`), else a part for each seed.

The seed (`tests/seed.py`) is in the name of each test.
"""

import os
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
from torch.utils._pytree import tree_map

from tests.seed import seed

__all__ = ["IS_ALL", "SEED", "chosen", "moved_to"]

IS_ALL = os.environ.get("PUBLIC") == "all"
SEED = seed()

_Item = TypeVar("_Item")


def chosen(items: Sequence[_Item], count: int) -> list[_Item]:
    """The first item, and others that are another part for each seed; all of them with PUBLIC=all."""
    if IS_ALL or len(items) <= count:
        return list(items)
    rest = items[1:]
    return [items[0], *(rest[(SEED * (count - 1) + k) % len(rest)] for k in range(count - 1))]


def moved_to(device: Any) -> Callable[[Any], Any]:
    """Make a function for trees: copies of their tensors and modules on a device, as leaves of autograd."""

    def move(item: Any) -> Any:
        if isinstance(item, torch.Tensor):
            return item.detach().clone().to(device).requires_grad_(item.requires_grad)
        return item

    return lambda tree: tree_map(move, tree)
