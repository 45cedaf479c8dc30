"""Attention as one op, as eager runs it on the CPU.

For a device that PyTorch does not know, `scaled_dot_product_attention` becomes thirty ops. Eager on the CPU calls flash
attention. So does this device, in the same cases: the op has a
gradient, is recorded as one op, and executors run it as one. `register_attention` is called once, at import.
"""

from __future__ import annotations

from typing import Any

import torch

__all__ = ["register_attention"]

aten = torch.ops.aten
Tensor = torch.Tensor
_DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
_libraries: list[Any] = []


def _attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    if not _is_valid(query, key, value, attn_mask):  # eager's error
        return torch.nn.functional.scaled_dot_product_attention(
            _on_meta(query),
            _on_meta(key),
            _on_meta(value),
            None if attn_mask is None else _on_meta(attn_mask),
        )
    if not _is_flash(query, key, value, attn_mask, dropout_p, enable_gqa):
        return aten._scaled_dot_product_attention_math.default(  # type: ignore[no-any-return]
            query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
        )[0]
    if attn_mask is not None and attn_mask.dtype is torch.bool:
        zero = torch.zeros((), dtype=query.dtype, device=query.device)
        attn_mask = torch.where(attn_mask, zero, float("-inf"))
    return aten._scaled_dot_product_flash_attention_for_cpu.default(  # type: ignore[no-any-return]
        query, key, value, dropout_p, is_causal, attn_mask=attn_mask, scale=scale
    )[0]


def _on_meta(t: Tensor) -> Tensor:
    return torch.empty(t.shape, dtype=t.dtype, device="meta")


def _is_valid(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> bool:
    """Whether eager takes these operands on any device.

    Source: `validate_sdpa_input`, in ATen/native/transformers/attention.cpp.
    """
    if not (q.dtype is k.dtype is v.dtype) or min(q.dim(), k.dim(), v.dim()) < 2:
        return False
    return mask is None or mask.dtype in (torch.bool, torch.float32, q.dtype)


def _is_flash(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, p: float, gqa: bool) -> bool:
    """Whether eager takes flash attention on the CPU.

    Source: `use_flash_attention_cpp` and what it asks, in ATen/native/transformers/sdp_utils_cpp.
    """
    if p > 0 or gqa or not (q.dim() == k.dim() == v.dim() == 4):
        return False
    if not (q.dtype is k.dtype is v.dtype) or q.dtype not in _DTYPES:
        return False
    if not torch.backends.cuda.flash_sdp_enabled():  # type: ignore[no-untyped-call]
        return False
    heads = q.shape[:2] == k.shape[:2] == v.shape[:2] and q.shape[3] == k.shape[3] == v.shape[3]
    if not heads or k.shape[2] != v.shape[2] or 0 in (*q.shape, *k.shape):
        return False
    if mask is None:
        return True
    if mask.requires_grad or mask.dim() not in (2, 4):
        return False
    wanted = (q.shape[0], q.shape[1], q.shape[2], k.shape[2])[-mask.dim() :]
    fits = all(m in (1, n) for m, n in zip(mask.shape, wanted, strict=True))
    return fits and mask.dtype in (torch.bool, torch.float32, q.dtype)


def register_attention() -> None:
    library: Any = torch.library.Library("aten", "IMPL")  # type: ignore[no-untyped-call]
    for key in ("PrivateUse1", "AutogradPrivateUse1"):
        library.impl("scaled_dot_product_attention", _attention, key)
    _libraries.append(library)
