"""Buckets: many tensors are grouped, and a collective runs on one flat vector for each group.

In: dtypes and sizes of the tensors. Out: for each bucket, the positions of its tensors. Used by `collective`,
`program.passes.overlap` and `ltc_dist.collectives`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Protocol

import torch

__all__ = ["deal", "deal_backwards"]

_FIRST_MB = 1.0  # the first bucket is small, so that its reduction starts early
# With less, a second bucket costs more than it gains (GPT of `benchmarks.peers`, 3.3 MiB, two processes: 3 %).
_SPLIT_MB = 4.0


class _Sized(Protocol):
    @property
    def dtype(self) -> torch.dtype: ...
    @property
    def nbytes(self) -> int: ...


def deal(values: Sequence[_Sized], cap_mb: float) -> Iterator[list[int]]:
    """Group tensors, in order, into buckets of one dtype and at most `cap_mb` MiB; a larger tensor is a bucket alone.

    Returns:
        For each bucket, the positions of its tensors.
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
    """Group gradients into buckets of one dtype, in the order in which backward makes them: the last one first.

    A bucket is full at `cap_mb` MiB. If the gradients of a dtype have more than 4 MiB, its first bucket is full at
    1 MiB.

    Returns:
        For each bucket, the positions of its gradients.

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
