"""`torch_xla.experimental.xla_dynamic_reshape_ops`: `view` and `expand` whose free size is named by a tensor's."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

__all__ = ["dynamic_expand", "dynamic_view"]


def dynamic_expand(
    input: torch.Tensor,
    size: Sequence[int],
    src_tensor: torch.Tensor,
    src_dim: int,
    target_dim: int,
) -> torch.Tensor:
    """`input.expand(size)`, with the size of `src_tensor` along `src_dim` as that along `target_dim`."""
    sizes = list(size)
    sizes[target_dim] = src_tensor.shape[src_dim]
    return input.expand(sizes)


def dynamic_view(
    input: torch.Tensor,
    size: Sequence[int],
    src_tensor: torch.Tensor,
    src_dim: int,
    target_dim: int,
    mul_scaler: float,
) -> torch.Tensor:
    """`input.view(size)`, whose size along `target_dim` is a multiple of that of `src_tensor` along `src_dim`."""
    sizes = list(size)
    sizes[target_dim] = src_tensor.shape[src_dim] * int(mul_scaler)
    return input.view(sizes)


# Kept: the ops are there as long as their library.
_torch_library: Any = torch.library
_library = _torch_library.Library("xla", "FRAGMENT")
_FROM = "Tensor src_tensor, int src_dim, int target_dim"
for _name, _more, _rule in (
    ("dynamic_expand", "", dynamic_expand),
    ("dynamic_view", ", float mul_scaler", dynamic_view),
):
    _library.define(f"{_name}(Tensor input, SymInt[] size, {_FROM}{_more}) -> Tensor")
    _library.impl(_name, _rule, "CompositeImplicitAutograd")
