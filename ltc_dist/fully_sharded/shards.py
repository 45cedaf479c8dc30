"""The shards of parameters, and how they are cut."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

__all__ = ["ShardLayout", "is_shard"]


class ShardLayout:
    """How one or more parameters of one dtype become a vector, padded with zeros, of which each process has a part.

    Attributes:
        shapes: of the parameters.
        numels: their numbers of elements.
        count: number of processes.
        local_shape: of each process's part.
        local_numel: its number of elements.
        options: the other arguments, for a layout over other processes.

    Args:
        multiple: the part of a process has a multiple of so many elements.
        is_on_dim_0: keep the shape of the one parameter, and divide its rows.
    """

    def __init__(
        self,
        shapes: Sequence[torch.Size],
        count: int,
        multiple: int = 1,
        is_on_dim_0: bool = False,
    ) -> None:
        self.shapes = list(shapes)
        self.numels = [shape.numel() for shape in shapes]
        self.count = count
        self.options = {"multiple": multiple, "is_on_dim_0": is_on_dim_0}
        if is_on_dim_0 and self.shapes[0]:
            rows, *rest = self.shapes[0]
            self.local_shape = torch.Size([-(-rows // count), *rest])
        else:
            self.local_shape = torch.Size([-(-sum(self.numels) // (count * multiple)) * multiple])
        self.local_numel = math.prod(self.local_shape)

    def parts(self, values: Sequence[torch.Tensor]) -> torch.Tensor:
        """Make a matrix of parameters or their gradients: a row for each process."""
        vectors = [value.reshape(-1) for value in values]
        flat = vectors[0] if len(vectors) == 1 else torch.cat(vectors)
        lacking = self.count * self.local_numel - flat.numel()
        if lacking:
            flat = torch.nn.functional.pad(flat, (0, lacking))
        return flat.view(self.count, self.local_numel)

    def shard(self, values: Sequence[torch.Tensor], position: int) -> torch.Tensor:
        """The part of one process, in memory of its own."""
        return self.parts(values)[position].clone().view(self.local_shape)

    def whole(self, flat: torch.Tensor) -> list[torch.Tensor]:
        """The parameters, as views of the vector that all parts make."""
        found, at = [], 0
        for shape, numel in zip(self.shapes, self.numels, strict=True):
            found.append(flat[at : at + numel].view(shape))
            at += numel
        return found


def is_shard(parameter: torch.Tensor) -> bool:
    """Whether a parameter is the shard of others: the parameter of a `FullyShardedDataParallel`."""
    return hasattr(parameter, "_is_sharded")
