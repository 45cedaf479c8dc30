"""The shards of parameters: how they are cut, gathered from all processes, and what gradients become."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from ltc_core.graph.buckets import deal
from ltc_core.settings import settings
from ltc_dist.collectives.ops import all_gather, reduce_scatter
from ltc_dist.collectives.process_group import Groups

__all__ = ["ShardLayout", "gathered", "scattered"]


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


def gathered(
    shards: Sequence[torch.Tensor], dtype: torch.dtype | None, count: int, groups: Groups
) -> list[torch.Tensor]:
    """For each shard, the vector that those of all processes make, in `dtype` or its own.

    Cost: recorded; a message for each LTC_BUCKET_MB.
    """
    mine = [shard.reshape(-1).to(dtype or shard.dtype) for shard in shards]
    if count == 1:
        return [part.clone() for part in mine]
    found = list(mine)
    for chosen in deal(mine, settings.bucket_mb):
        parts = [mine[k] for k in chosen]
        flat = all_gather(parts[0] if len(parts) == 1 else torch.cat(parts), 0, groups)
        rows = flat.view(count, -1).split_with_sizes([part.numel() for part in parts], 1)
        for k, part in zip(chosen, rows, strict=True):
            found[k] = part.reshape(-1)
    return found


def scattered(
    parts: Sequence[torch.Tensor], scale: float, groups: Groups, bucket_mb: float
) -> list[torch.Tensor]:
    """For each matrix of `ShardLayout.parts`, this process's row of the sum over the processes, times `scale`.

    Args:
        bucket_mb: MiB of a message at most; 0 for LTC_BUCKET_MB.
    """
    found = list(parts)
    for chosen in deal(parts, bucket_mb or settings.bucket_mb):
        rows = [parts[k] for k in chosen]
        flat = rows[0] if len(rows) == 1 else torch.cat(rows, 1)
        mine = reduce_scatter("sum", flat, scale, 0, len(flat), groups).view(-1)
        for k, part in zip(
            chosen, mine.split_with_sizes([row.shape[1] for row in rows]), strict=True
        ):
            found[k] = part
    return found
