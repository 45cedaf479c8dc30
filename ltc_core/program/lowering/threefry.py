"""Threefry-2x32 with 20 rounds: a counter-based random generator, and its keys.

A block of two 32-bit words is a function of a key and a counter. The host derives one 64-bit key for each draw from the
state of a stream (`next_key`). Element i of a draw, in row-major order, has the words of block (i, 0). So the numbers
depend on the key and the index only: the same seed, or a state that is restored, gives the same numbers. Used by
`random_draws` and `random_keys`.

Source: Salmon, Moraes, Dror, Shaw: "Parallel random numbers: as easy as 1, 2, 3", SC 2011.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

__all__ = ["constant", "count", "next_key", "threefry", "upper_bits", "words"]

_ROTATIONS = ((13, 15, 26, 6), (17, 29, 16, 24))  # groups of four rounds use these rows in turn
_PARITY = 0x1BD11BDA
_LONGEST_RANGE = 1024


def next_key(state: Tensor) -> tuple[Tensor, Tensor]:
    """Key, int32[2], from the state of a PyTorch CPU generator, and the state after it. `state` is not written.

    Cost: 6 us.
    """
    generator = torch.Generator()
    generator.set_state(state)
    key = torch.randint(-(2**31), 2**31, (2,), dtype=torch.int32, generator=generator)
    return key, generator.get_state()


# The code below is written for the lowerings of torch_xla 2.9 on int32: `x >> 3` is a division that rounds to zero,
# `bitwise_right_shift(x, 3)` computes in int64, `bitwise_right_shift(x, tensor)` is a shift. A Python number becomes an
# input of the program, a range a constant. XLA can fuse constant shifts, a mask and an or into one rotation.


def constant(value: int, like: Tensor) -> Tensor:
    """0-dim tensor of `value`, modulo the range of its dtype, with dtype and device of `like`: a program constant."""
    return torch.arange(value, value - 1, -1, dtype=like.dtype, device=like.device).reshape(())


def upper_bits(word: Tensor, bits: int) -> Tensor:
    """The upper `bits` bits of words, as non-negative numbers."""
    shift = constant(word.dtype.itemsize * 8 - bits, word)
    return torch.bitwise_right_shift(word, shift) & constant((1 << bits) - 1, word)


def threefry(key: Tensor, c0: Tensor, c1: Tensor) -> tuple[Tensor, Tensor]:
    """The two words of each block (c0, c1) under a key.

    Args:
        key: int32[2].
        c0, c1: int32 of any shapes that broadcast.
    """
    k0, k1 = key[0], key[1]
    keys = (k0, k1, k0 ^ k1 ^ constant(_PARITY, key))
    rotations = {
        r: (constant(r, key), constant(32 - r, key), constant((1 << r) - 1, key))
        for r in (*_ROTATIONS[0], *_ROTATIONS[1])
    }
    x0, x1 = c0 + k0, c1 + k1
    for group in range(5):
        for r in _ROTATIONS[group % 2]:
            left, right, mask = rotations[r]
            x0 = x0 + x1
            lower = torch.bitwise_right_shift(x1, right) & mask
            x1 = (torch.bitwise_left_shift(x1, left) | lower) ^ x0
        x0 = x0 + keys[(group + 1) % 3]
        x1 = x1 + (keys[(group + 2) % 3] + constant(group + 1, key))
    return x0, x1


def words(key: Tensor, shape: Sequence[int]) -> tuple[Tensor, Tensor]:
    """Two random words for each element of a shape; elements whose indices are 2**32 apart get the same words."""
    return threefry(key, _places(shape, key), constant(0, key))


def _places(shape: Sequence[int], like: Tensor) -> Tensor:
    """Row-major index of each element of a shape, modulo 2**32."""
    places = constant(0, like)
    for size in shape:
        places = places.unsqueeze(-1) * constant(size, like) + count(size, like)
    return places


def count(size: int, like: Tensor) -> Tensor:
    """The range 0 .. size - 1. A long one is made of two short ones, because torch_xla writes each into the program."""
    if size <= _LONGEST_RANGE:
        return torch.arange(size, dtype=like.dtype, device=like.device)
    row = 1 << (math.isqrt(size - 1).bit_length())
    rows = torch.arange(-(-size // row), dtype=like.dtype, device=like.device)
    columns = torch.arange(row, dtype=like.dtype, device=like.device)
    return (rows.unsqueeze(-1) * constant(row, like) + columns).flatten()[:size]
