"""The random generators of a process as one value: PyTorch's, Python's, numpy's if it is in use, the device's."""

from __future__ import annotations

import random
import sys
from typing import Any

import torch

import ltc_core as ltc

__all__ = ["get", "put"]


def get() -> dict[str, Any]:
    """Return the states. The device's is a tensor there: nothing is waited for."""
    found: dict[str, Any] = {
        "torch": torch.get_rng_state(),
        "python": random.getstate(),
        "device": ltc.get_rng_state(),
    }
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        name, keys, *rest = numpy.random.get_state()
        found["numpy"] = (str(name), torch.from_numpy(keys.astype("int64")), *rest)
    return found


def put(state: dict[str, Any]) -> None:
    """Set the generators to states from `get`."""
    torch.set_rng_state(state["torch"])
    random.setstate(state["python"])
    ltc.set_rng_state(state["device"])
    numpy = sys.modules.get("numpy")
    if numpy is not None and "numpy" in state:
        name, keys, *rest = state["numpy"]
        numpy.random.set_state((name, keys.numpy().astype("uint32"), *rest))
