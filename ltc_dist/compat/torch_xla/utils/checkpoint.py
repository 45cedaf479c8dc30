"""`torch_xla.utils.checkpoint`: PyTorch's own activation checkpointing, which works on the device."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch.utils.checkpoint
from torch.utils.checkpoint import CheckpointFunction, get_device_states, set_device_states

__all__ = ["CheckpointFunction", "checkpoint", "get_device_states", "set_device_states"]


def checkpoint(
    function: Callable[..., Any], *args: Any, use_reentrant: bool = True, **kwargs: Any
) -> Any:
    """Call a function and keep none of its activations; backward computes them again, with the same random numbers.

    Args:
        use_reentrant: False, which torch_xla refuses, works too.
        kwargs: `preserve_rng_state`, and without `use_reentrant` the keyword arguments of the function.
    """
    return torch.utils.checkpoint.checkpoint(function, *args, use_reentrant=use_reentrant, **kwargs)
