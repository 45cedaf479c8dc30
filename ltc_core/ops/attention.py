"""Attention as one op, as eager runs it on the CPU and on a GPU.

For a device that PyTorch does not know, `scaled_dot_product_attention` becomes thirty ops. Eager calls flash attention
on the CPU, and on a GPU a kernel that it chooses by the operands. So does this device; on a GPU it is the kernel for
all dtypes, "memory efficient attention". The op has a gradient, is recorded as one op, and executors run it as one.
`register_attention` is called once, at import.
"""

from __future__ import annotations

import functools
import sys
from typing import Any

import torch

from ltc_core.record import fast_path
from ltc_core.settings import settings

__all__ = ["register_attention"]

aten = torch.ops.aten
Tensor = torch.Tensor
_DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
# The kernel of a GPU reads 16 bytes at a time.
_ALIGNED = {torch.float32: 4, torch.float16: 8, torch.bfloat16: 8}
_ALIGNMENT = 16
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
    if settings.device == "cuda":
        if _is_efficient(query, key, value, attn_mask, dropout_p, enable_gqa):
            return _efficient(query, key, value, attn_mask, is_causal, scale)
    elif _is_flash(query, key, value, attn_mask, dropout_p, enable_gqa):
        fast_path.add_attention()  # the next ones are recorded in C++
        return aten._scaled_dot_product_flash_attention_for_cpu.default(  # type: ignore[no-any-return]
            query, key, value, dropout_p, is_causal, attn_mask=_added(attn_mask, query), scale=scale
        )[0]
    # The op adds its mask as it is, a mask of bools as zeros and ones.
    added = _added(attn_mask, query)
    return aten._scaled_dot_product_attention_math.default(  # type: ignore[no-any-return]
        query, key, value, added, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
    )[0]


def _efficient(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, is_causal: bool, scale: float | None
) -> Tensor:
    """Memory efficient attention, which wants a mask of the whole size in rows that begin at multiples of 16."""
    mask = _added(mask, q)
    if mask is not None:
        columns = mask.shape[-1]
        if columns % _ALIGNMENT:
            mask = torch.nn.functional.pad(mask, (0, -columns % _ALIGNMENT))[..., :columns]
        mask = mask.expand(q.shape[0], q.shape[1], q.shape[2], k.shape[2])
    needs_grad = torch.is_grad_enabled() and any(t.requires_grad for t in (q, k, v))
    return aten._scaled_dot_product_efficient_attention.default(  # type: ignore[no-any-return]
        q, k, v, mask, needs_grad, 0.0, is_causal, scale=scale
    )[0]


def _is_divided(query: Tensor) -> bool:
    """Whether it is a DTensor, which divides the kernel with a mask only as the ops that it stands for."""
    package = sys.modules.get("torch.distributed.tensor")
    return package is not None and isinstance(query, package.DTensor)


def _added(mask: Tensor | None, query: Tensor) -> Tensor | None:
    """The mask as what is added to the products."""
    if mask is None or mask.dtype is not torch.bool:
        return mask
    zero = torch.zeros((), dtype=query.dtype, device=query.device)
    return torch.where(mask, zero, float("-inf"))


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
    return (
        q.dtype in _DTYPES
        and torch.backends.cuda.flash_sdp_enabled()  # type: ignore[no-untyped-call]
        and _fits_one_op(q, k, v, p)
        and (not gqa or _takes_groups())
        and (gqa or q.shape[1] == k.shape[1])
        and q.shape[3] == v.shape[3]
        and (mask is None or _fits_mask(q, k, mask))
        and not (_is_divided(q) and (gqa or mask is not None))
    )


@functools.cache
def _takes_groups() -> bool:
    """Whether flash attention of this PyTorch takes fewer heads of keys and values than of queries."""
    q, k = torch.zeros(1, 2, 1, 1), torch.zeros(1, 1, 1, 1)
    flash = torch.nn.attention.SDPBackend.FLASH_ATTENTION.value
    return bool(torch._fused_sdp_choice(q, k, k, None, 0.0, False, enable_gqa=True) == flash)


def _is_efficient(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, p: float, gqa: bool
) -> bool:
    """Whether a GPU takes memory efficient attention.

    Source: `can_use_mem_efficient_attention`, in ATen/native/transformers/cuda/sdp_utils.cpp.
    """
    if q.dtype not in _ALIGNED or not torch.backends.cuda.mem_efficient_sdp_enabled():  # type: ignore[no-untyped-call]
        return False
    aligned = _ALIGNED[q.dtype]
    return (
        _fits_one_op(q, k, v, p)
        and not gqa
        and q.shape[1] == k.shape[1]
        and q.shape[3] % aligned == v.shape[3] % aligned == 0
        and (mask is None or (_fits_mask(q, k, mask) and mask.dtype in (torch.bool, q.dtype)))
    )


def _fits_one_op(q: Tensor, k: Tensor, v: Tensor, p: float) -> bool:
    """Whether there is no dropout, and each head of keys and values serves as many heads of the query."""
    if p > 0 or not (q.dim() == k.dim() == v.dim() == 4) or 0 in (*q.shape, *k.shape):
        return False
    is_one_batch = q.shape[0] == k.shape[0] == v.shape[0]
    is_grouped = k.shape[1] == v.shape[1] and q.shape[1] % k.shape[1] == 0
    return is_one_batch and is_grouped and q.shape[3] == k.shape[3] and k.shape[2] == v.shape[2]


def _fits_mask(q: Tensor, k: Tensor, mask: Tensor) -> bool:
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
