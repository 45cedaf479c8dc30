"""That all members of a group are at the same collective: told by a trailer that every message carries.

The identity of a collective is a number of 32 bits, made of the device that recorded it, its plan, and the identity of
the collective before it on its line. So members that were at different collectives without noticing, as the roots of
two broadcasts, notice it at the next one. A trailer is `TRAILER` elements in the dtype of the message: the identity's
bits and their complements. Whatever is reduced ("sum", "mul", "min", "max", "and", "or"), in any dtype and by any
number of members: of a bit and its complement exactly one is zero afterwards if all members had the same bit, and none
or both if not. c10d's fingerprints (TORCH_DISTRIBUTED_DEBUG=DETAIL) cost a message for each collective, and do not tell
apart tensors of one size. Used by `transport`.
"""

from __future__ import annotations

import functools
import zlib

import torch

from ltc_core.graph.collective import TRAILER

__all__ = ["identity", "is_agreed", "trailer"]

_BITS = TRAILER // 2


def identity(before: int, device: int, plan: str) -> int:
    """The identity of the collective that follows the one with the identity `before`. Cost: 1 us."""
    return zlib.crc32(b"%d %d" % (before, device), _digest(plan))


@functools.lru_cache(maxsize=1024)
def _digest(plan: str) -> int:
    return zlib.crc32(plan.encode())


def trailer(of: int, like: torch.Tensor) -> torch.Tensor:
    """The trailer of an identity, in the dtype of a message and on its hardware. Cost: 5 us."""
    bits = [of >> k & 1 for k in range(_BITS)]
    return torch.tensor([*bits, *(1 - b for b in bits)], dtype=like.dtype, device=like.device)


def is_agreed(reduced: torch.Tensor) -> bool:
    """Whether all members had the same identity, by their reduced trailers. Cost: 5 us, and waits for a GPU."""
    is_zero = (reduced == 0).tolist()
    return all(a is not b for a, b in zip(is_zero[:_BITS], is_zero[_BITS:], strict=True))
