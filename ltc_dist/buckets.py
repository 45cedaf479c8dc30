"""Many tensors dealt out to a few long vectors."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

__all__ = ["deal"]


def deal(values: Sequence[torch.Tensor], cap_mb: float) -> Iterator[list[int]]:
    """Deal tensors into groups of one dtype and at most `cap_mb` MiB, in order; one larger stands alone.

    Returns:
        The positions of each group.
    """
    by_dtype: dict[torch.dtype, list[int]] = {}
    for k, value in enumerate(values):
        by_dtype.setdefault(value.dtype, []).append(k)
    for positions in by_dtype.values():
        chosen: list[int] = []
        size = 0
        for k in positions:
            nbytes = values[k].numel() * values[k].itemsize
            if chosen and size + nbytes > cap_mb * 2**20:
                yield chosen
                chosen, size = [], 0
            chosen.append(k)
            size += nbytes
        yield chosen
