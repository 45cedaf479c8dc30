"""Values that wait on the host until it is known how they are divided over the devices of a mesh.

A model is moved to the device before its parameters are sharded. Sent at once, each would be whole on one device for a
moment, which may have no room for it. So such a value is sent by what uses it first: a program, or `shard`, which sends
each device its part. Used by `device`.
"""

from __future__ import annotations

from typing import Any

import torch

__all__ = ["Unsent", "held"]


class Unsent:
    """Data of a tensor: on the host at first, then on the device.

    Attributes:
        held: a CPU tensor of the stored dtype, which nobody writes, or the array that it became.
    """

    __slots__ = ("held",)

    def __init__(self, tensor: torch.Tensor) -> None:
        self.held: Any = tensor


def held(data: Any) -> Any:
    """Data of a value, wherever they are: a CPU tensor, or an array."""
    return data.held if type(data) is Unsent else data
