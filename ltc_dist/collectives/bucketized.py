"""Collectives on many tensors at once, packed into a few long vectors: fewer messages for small tensors."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from ltc_core.errors import CollectiveError
from ltc_core.graph.buckets import deal
from ltc_core.settings import settings
from ltc_dist.collectives.ops import all_gather, all_reduce, place_of, reduce_scatter, written_to
from ltc_dist.collectives.process_group import Groups, group_of

__all__ = ["all_gather_bucketized", "all_reduce_bucketized_gradients", "reduce_scatter_bucketized"]

Tensors = Sequence[torch.Tensor]


def all_reduce_bucketized_gradients(
    gradients: Tensors,
    scale: float,
    groups: Groups = None,
    pin_layout: bool = True,
    bucket_cap_mb: float = 0,
) -> None:
    """Sum gradients over the processes, times `scale`, in place.

    Args:
        bucket_cap_mb: MiB of a vector at most; 0 for LTC_BUCKET_MB.

    Source: `torch_xla.core.xla_model.all_reduce_bucketized_gradients`.
    """
    for chosen in deal(gradients, bucket_cap_mb or settings.bucket_mb):
        all_reduce("sum", [gradients[k] for k in chosen], scale, groups)


def all_gather_bucketized(
    input_list: Tensors,
    dim: int = 0,
    groups: Groups = None,
    output: Tensors | None = None,
    pin_layout: bool = False,
    bucket_cap_mb: float = 160,
) -> list[torch.Tensor]:
    """For each tensor, return those of all processes, concatenated along `dim`.

    Args:
        output: tensors that the results are written to as well.
        bucket_cap_mb: MiB of a vector at most.

    Source: `torch_xla.core.xla_model.all_gather_bucketized`.
    """
    count = len(group_of(groups).members)
    results = list(input_list)
    places = [place_of(dim, value) if value.dim() else None for value in input_list]
    for chosen in deal(input_list, bucket_cap_mb):
        flat = torch.cat([input_list[k].reshape(-1) for k in chosen])
        gathered = all_gather(flat, 0, groups).view(count, -1)
        sizes = [input_list[k].numel() for k in chosen]
        for k, part in zip(chosen, gathered.split_with_sizes(sizes, 1), strict=True):
            rows = part.reshape(count, *input_list[k].shape)
            place = places[k]
            if place is not None:
                rows = rows.movedim(0, place).flatten(place, place + 1)
            results[k] = rows
    return _into(output, results)


def reduce_scatter_bucketized(
    reduce_type: str,
    input_list: Tensors,
    scale: float,
    scatter_dim: int,
    shard_count: int,
    groups: Groups = None,
    output: Tensors | None = None,
    pin_layout: bool = False,
    bucket_cap_mb: float = 160,
) -> list[torch.Tensor]:
    """Reduce each tensor, and return this process's part of it along `scatter_dim`.

    Args:
        shard_count: the number of processes of the group.
        output: tensors that the results are written to as well.
        bucket_cap_mb: MiB of a vector at most.

    Raises:
        CollectiveError: a size that the number of processes does not divide.

    Source: `torch_xla.core.xla_model.reduce_scatter_bucketized`.
    """
    for value in input_list:
        if value.shape[place_of(scatter_dim, value)] % shard_count:
            raise CollectiveError(
                f"dim {scatter_dim} of a tensor cannot be dealt out to the group",
                got=f"{list(value.shape)}, {shard_count} parts",
                next="a size that the number of processes divides",
            )
    results = list(input_list)
    for chosen in deal(input_list, bucket_cap_mb):
        parts = [_rows(input_list[k], scatter_dim, shard_count) for k in chosen]
        flat = torch.cat([part.reshape(shard_count, -1) for part in parts], 1)
        mine = reduce_scatter(reduce_type, flat, scale, 0, shard_count, groups).view(-1)
        sizes = [math.prod(part.shape[1:]) for part in parts]
        for k, part, found in zip(chosen, parts, mine.split_with_sizes(sizes), strict=True):
            results[k] = found.view(part.shape[1:])
    return _into(output, results)


def _rows(value: torch.Tensor, dim: int, count: int) -> torch.Tensor:
    """Stack the parts of a tensor along a dimension."""
    place = place_of(dim, value)
    parts = torch.unflatten(value, place, (count, value.shape[place] // count))
    return parts.movedim(place, 0)


def _into(output: Tensors | None, results: list[torch.Tensor]) -> list[torch.Tensor]:
    if output is None:
        return results
    return [written_to(place, result) for place, result in zip(output, results, strict=True)]
