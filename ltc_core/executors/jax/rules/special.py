"""Fourier transforms and distances."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from jax import numpy as jnp

from ltc_core.executors.jax.table import Array, Call, lowers

__all__: list[str] = []

# ATen's numbers for how a Fourier transform is scaled: not, by 1 / sqrt(n), by 1 / n.
_BY_ROOT, _BY_COUNT = 1, 2


def _scaled(x: Array, count: int, how: int) -> Array:
    if how == _BY_ROOT:
        return x / math.sqrt(count)
    return x / count if how == _BY_COUNT else x


@lowers("_fft_r2c")
def fft_r2c(c: Call, x: Array, dims: Sequence[int], how: int, onesided: bool) -> Array:
    count = math.prod(x.shape[d] for d in dims)
    if not onesided:
        return _scaled(jnp.fft.fftn(x, axes=tuple(dims)), count, how)
    return _scaled(jnp.fft.rfftn(x, axes=tuple(dims)), count, how)


@lowers("_fft_c2c")
def fft_c2c(c: Call, x: Array, dims: Sequence[int], how: int, forward: bool) -> Array:
    count = math.prod(x.shape[d] for d in dims)
    if forward:
        return _scaled(jnp.fft.fftn(x, axes=tuple(dims)), count, how)
    return _scaled(jnp.fft.ifftn(x, axes=tuple(dims), norm="forward"), count, how)


@lowers("_fft_c2r")
def fft_c2r(c: Call, x: Array, dims: Sequence[int], how: int, last: int) -> Array:
    sizes = [*(x.shape[d] for d in dims[:-1]), last]
    found = jnp.fft.irfftn(x, s=sizes, axes=tuple(dims), norm="forward")
    return _scaled(found, math.prod(sizes), how)


@lowers("_cdist_forward")
def cdist(c: Call, x: Array, y: Array, p: float, mode: int | None) -> Array:
    return _norm(jnp.abs(x[..., :, None, :] - y[..., None, :, :]), p)


@lowers("_pdist_forward")
def pdist(c: Call, x: Array, p: float = 2) -> Array:
    first, second = np.triu_indices(x.shape[0], 1)
    return _norm(jnp.abs(x[first] - x[second]), p)


def _norm(away: Array, p: float) -> Array:
    if p == 0:
        return jnp.sum(away != 0, -1)
    if p == math.inf:
        return jnp.max(away, -1)
    if p == 1:
        return jnp.sum(away, -1)
    if p == 2:
        return jnp.sqrt(jnp.sum(away * away, -1))
    return jnp.sum(away**p, -1) ** (1 / p)
