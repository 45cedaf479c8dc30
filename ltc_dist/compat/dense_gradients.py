"""Gradients of embeddings with `sparse=True` as torch_xla gives them: dense."""

from __future__ import annotations

from typing import Any

import torch

from ltc_core.ops.composites import RULES

__all__ = ["register"]

aten = torch.ops.aten
Tensor = torch.Tensor
_library: Any = torch.library.Library("aten", "IMPL")  # type: ignore[no-untyped-call]


def register() -> None:
    """Make them dense from now on, on the device."""
    _library.impl("embedding_backward", _embedding, "AutogradPrivateUse1")
    RULES[aten._embedding_bag_backward.default] = _bag_of_offsets


def _embedding(
    grad: Tensor, indices: Tensor, num_weights: int, padding: int, scaled: bool, sparse: bool
) -> Tensor:
    return aten.embedding_dense_backward.default(grad, indices, num_weights, padding, scaled)  # type: ignore[no-any-return]


def _bag_of_offsets(
    grad: Tensor,
    indices: Tensor,
    offsets: Tensor,
    bag_of: Tensor,
    bag_size: Tensor,
    most: Tensor,
    num_weights: int,
    scaled: bool,
    mode: int,
    sparse: bool,
    weights: Tensor | None,
    padding: int = -1,
) -> Tensor:
    """As PyTorch's own, but dense. `bag_of` is the bag of each index, empty where forward did not need it."""
    if bag_of.numel() == 0:
        begins = indices.new_zeros(
            indices.numel() + 1
        )  # empty bags at the end begin behind the last index
        begins = begins.index_add(0, offsets[1:], torch.ones_like(offsets[1:]))
        bag_of = begins[:-1].cumsum(0).to(offsets.dtype)
    return aten._embedding_bag_dense_backward.default(  # type: ignore[no-any-return]
        grad, indices, bag_of, bag_size, most, num_weights, scaled, mode, weights, padding
    )
