"""`nn.TransformerEncoder` with a padding mask, in the cases in which eager leaves padding out.

In inference PyTorch's encoder packs sequences of several lengths into a nested tensor, and its result has zeros in the
rows of padding. The device has no nested tensors: the layers compute padded sequences, and the rows of padding are set
to eager's values afterwards. Eager requires that the padding is at the end; the device checks that without a sync.
`register_encoder` is called once, at import.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import nn

from ltc_core.tensor.lazy_tensor import LazyTensor

__all__ = ["register_encoder"]

Tensor = torch.Tensor


def register_encoder() -> None:
    """Route calls of `nn.TransformerEncoder` on tensors of the device through `_call`.

    Its `forward` stays what TorchScript reads.
    """
    nn.TransformerEncoder.__call__ = _call  # type: ignore[method-assign]


def _call(self: nn.TransformerEncoder, *args: Any, **kwargs: Any) -> Any:
    given = dict(zip(("src", "mask", "src_key_padding_mask", "is_causal"), args, strict=False))
    given |= kwargs
    src, padding = given.get("src"), given.get("src_key_padding_mask")
    if type(src) is not LazyTensor or type(padding) is not LazyTensor:
        return nn.Module.__call__(self, *args, **kwargs)
    if given.get("mask") is not None or not _leaves_padding_out(self, src):
        return nn.Module.__call__(self, *args, **kwargs)
    kept = padding.logical_not()
    positions = torch.arange(kept.shape[1], device=kept.device)
    is_first = positions < kept.sum(1, keepdim=True)
    is_packed: Any = True
    if getattr(self, "mask_check", True):
        is_packed = (is_first == kept).all()
    else:
        given["src_key_padding_mask"] = is_first.logical_not()
    padded = copy.copy(self)
    padded.use_nested_tensor = False
    out = nn.Module.__call__(padded, **given)
    row = torch.zeros(1, 1, out.shape[-1], dtype=out.dtype, device=out.device)
    if self.norm is not None:
        row = self.norm(row)
    return torch.where((is_first.logical_not() & is_packed).unsqueeze(-1), row, out)


def _leaves_padding_out(encoder: nn.TransformerEncoder, src: Tensor) -> bool:
    """Whether eager takes its path of nested tensors, as far as that does not depend on the mask.

    Source: `nn.TransformerEncoder.forward`.
    """
    first: Any = encoder.layers[0]
    if (
        type(encoder).forward is not nn.TransformerEncoder.forward
        or not torch.backends.mha.get_fastpath_enabled()
        or not getattr(encoder, "use_nested_tensor", False)
        or first.training
        or src.dim() != 3
        or torch.is_autocast_enabled()
    ):
        return False
    attention = first.self_attn
    operands = (
        src, attention.in_proj_weight, attention.in_proj_bias, attention.out_proj.weight, attention.out_proj.bias,
        first.norm1.weight, first.norm1.bias, first.norm2.weight, first.norm2.bias,
        first.linear1.weight, first.linear1.bias, first.linear2.weight, first.linear2.bias,
    )  # fmt: skip
    return not (torch.is_grad_enabled() and any(t.requires_grad for t in operands))
