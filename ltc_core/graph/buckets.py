"""Many tensors dealt out to a few long vectors."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Protocol

import torch

__all__ = ["deal", "deal_backwards"]

_FIRST_MB = 1.0  # what is ready first goes in a small vector, so that something is under way early
# Of less, a second vector costs more than that gains (GPT of design section 6, 3.3 MiB, two processes: 3 % of a step).
_SPLIT_MB = 4.0


class _Sized(Protocol):
    @property
    def dtype(self) -> torch.dtype: ...
    @property
    def nbytes(self) -> int: ...


def deal(values: Sequence[_Sized], cap_mb: float) -> Iterator[list[int]]:
    """Deal tensors into groups of one dtype and at most `cap_mb` MiB, in order; one larger stands alone.

    Returns:
        The positions of each group.
    """
    for positions in _by_dtype(values):
        chosen: list[int] = []
        size = 0
        for k in positions:
            if chosen and size + values[k].nbytes > cap_mb * 2**20:
                yield chosen
                chosen, size = [], 0
            chosen.append(k)
            size += values[k].nbytes
        yield chosen


def deal_backwards(values: Sequence[_Sized], cap_mb: float) -> Iterator[list[int]]:
    """Deal gradients into groups of one dtype, in the order in which backward makes them: the last one first.

    A group is full once it has `cap_mb` MiB, the first one of more than 4 MiB with 1 MiB.

    Returns:
        The positions of each group.

    Source: the buckets of `torch.nn.parallel.DistributedDataParallel`.
    """
    for positions in _by_dtype(values):
        chosen: list[int] = []
        is_split = sum(values[k].nbytes for k in positions) > _SPLIT_MB * 2**20
        size, full = 0, (min(_FIRST_MB, cap_mb) if is_split else cap_mb) * 2**20
        for k in reversed(positions):
            chosen.append(k)
            size += values[k].nbytes
            if size >= full:
                yield chosen
                chosen, size, full = [], 0, cap_mb * 2**20
        if chosen:
            yield chosen


def _by_dtype(values: Sequence[_Sized]) -> list[list[int]]:
    found: dict[torch.dtype, list[int]] = {}
    for k, value in enumerate(values):
        found.setdefault(value.dtype, []).append(k)
    return list(found.values())
