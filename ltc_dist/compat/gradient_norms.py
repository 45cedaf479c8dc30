"""`torch.nn.utils.clip_grad_norm_` without gradients as torch_xla has it: the norm, 0, is on the device."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.nn import utils

from ltc_core.tensor.lazy_tensor import LazyTensor

__all__ = ["register"]

_clip: Callable[..., torch.Tensor] = utils.clip_grad.clip_grad_norm_


def register() -> None:
    """Replace the function."""
    utils.clip_grad_norm_ = utils.clip_grad.clip_grad_norm_ = clip_grad_norm_


@functools.wraps(_clip)
def clip_grad_norm_(
    parameters: torch.Tensor | Iterable[torch.Tensor], *args: Any, **kwargs: Any
) -> torch.Tensor:
    given = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
    norm = _clip(given, *args, **kwargs)
    if isinstance(norm, LazyTensor) or not any(isinstance(p, LazyTensor) for p in given):
        return norm
    return norm.to(next(p.device for p in given if isinstance(p, LazyTensor)))
