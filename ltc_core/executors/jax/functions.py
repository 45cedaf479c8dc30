"""Functions of JAX that a script calls with tensors: each is traced once, and kept for `graph.jax_call`."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
import torch
from jax._src import config
from jax.extend.core import jaxpr_as_fun

from ltc_core.executors.jax.arrays import as_array, as_tensor
from ltc_core.executors.jax.table import dtype_of
from ltc_core.graph.jax_call import FUNCTIONS, Function

__all__ = ["add_function", "configuration"]


def configuration() -> object:
    """The settings of JAX that a trace depends on."""
    return config.trace_context()


def add_function(call: Callable[..., Sequence[Any]], operands: Sequence[torch.Tensor]) -> str:
    """Trace a function of arrays like these tensors, which returns a list of arrays; returns its name.

    JAX makes 32 bits of 64, as the script's configuration of JAX says, unless a tensor has 64.
    """
    specs = [jax.ShapeDtypeStruct(tuple(t.shape), dtype_of(t.dtype)) for t in operands]
    with jax.enable_x64(config.enable_x64.value or any(s.dtype.itemsize == 8 for s in specs)):
        closed = jax.make_jaxpr(call)(*specs)
    of_arrays = jaxpr_as_fun(closed)
    jitted = jax.jit(of_arrays)

    def run(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        with jax.enable_x64(True):
            return [as_tensor(data) for data in jitted(*map(as_array, tensors))]

    text = str(closed)
    sha = hashlib.sha256(text.encode())
    # An object of this process, such as a callback: the text does not tell which.
    if " at 0x" in text:
        sha.update(os.urandom(16))
    for constant in closed.consts:
        sha.update(np.asarray(jax.device_get(constant)).tobytes())
    name = sha.hexdigest()[:24]
    results = tuple((tuple(a.shape), _dtype(a.dtype)) for a in closed.out_avals)
    FUNCTIONS.setdefault(name, Function(of_arrays, run, results))
    return name


def _dtype(dtype: Any) -> torch.dtype:
    return as_tensor(np.empty(0, dtype)).dtype
