"""CPU tensors as what JAX uploads, and data of JAX as CPU tensors. Used by `device` and `stablehlo`."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
import torch

from ltc_core.executors.jax.table import dtype_of

__all__ = ["as_array", "as_tensor"]

Tensor = torch.Tensor
_NOT_OF_NUMPY = (torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2)


def as_array(t: Tensor) -> Any:
    """A CPU tensor as an array of NumPy, in the same memory if it is packed."""
    t = t.detach().contiguous()
    if t.dtype in _NOT_OF_NUMPY:
        bits = torch.int16 if t.dtype.itemsize == 2 else torch.uint8
        return t.view(bits).numpy().view(dtype_of(t.dtype))
    return t.resolve_conj().resolve_neg().numpy()


def as_tensor(data: Any) -> Tensor:
    """A copy of data, which may be divided, as a tensor."""
    found = np.array(jax.device_get(data))
    if found.dtype.kind == "V":  # a type of `ml_dtypes`
        dtype = next(t for t in _NOT_OF_NUMPY if dtype_of(t) == found.dtype)
        return torch.from_numpy(found.view(np.int16 if found.itemsize == 2 else np.uint8)).view(
            dtype
        )
    return torch.from_numpy(found)
