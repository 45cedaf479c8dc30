"""Ops that are compiled as what they consist of, because the parts fuse better than the whole runs.

Each rule is called as its op would be and gives the op's results; it may say that it does not apply (None).
Used by `lower`, in the compiler's process only.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch

__all__ = ["SPELLED_OUT"]

Tensor = torch.Tensor
# Scores that fit the second-level cache (1 MiB a core here) are not worth flash attention's passes over them.
# GPT of design section 6, 64 tokens: 16.6 ms a step spelled out, 18.2 with the op.
_MAX_SCORES = 256 * 256


def _applies(query: Tensor, key: Tensor, dropout: float, mask: Tensor | None) -> bool:
    short = query.shape[2] * key.shape[2] <= _MAX_SCORES
    return short and dropout == 0.0 and mask is None and query.dtype is torch.float32


def _scores(query: Tensor, key: Tensor, causal: bool, scale: float | None) -> Tensor:
    factor = 1 / math.sqrt(query.shape[-1]) if scale is None else scale
    scores = torch.matmul(query, key.transpose(-2, -1)) * factor
    if causal:
        rows = torch.arange(query.shape[2], device=query.device).unsqueeze(1)
        columns = torch.arange(key.shape[2], device=query.device)
        scores = torch.where(columns <= rows, scores, float("-inf"))
    return scores


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    dropout: float = 0.0,
    causal: bool = False,
    attn_mask: Tensor | None = None,
    scale: float | None = None,
) -> Sequence[Tensor] | None:
    """Give (output, logarithm of the sum of exponentials), with flash attention's strides."""
    if not _applies(query, key, dropout, attn_mask):
        return None
    scores = _scores(query, key, causal, scale)
    top = scores.amax(-1, keepdim=True)
    log_total = (scores - top).exp().sum(-1, keepdim=True).log() + top
    # The same weights as in the backward: they are computed once.
    out = torch.matmul((scores - log_total).exp(), value)
    return _heads_inside(out), _heads_inside(log_total.squeeze(-1))


def attention_backward(
    grad: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    log_total: Tensor,
    dropout: float,
    causal: bool,
    attn_mask: Tensor | None = None,
    scale: float | None = None,
) -> Sequence[Tensor] | None:
    """Give the gradients of query, key and value."""
    if not _applies(query, key, dropout, attn_mask):
        return None
    factor = 1 / math.sqrt(query.shape[-1]) if scale is None else scale
    weights = (_scores(query, key, causal, scale) - log_total.unsqueeze(-1)).exp()
    grad_weights = torch.matmul(grad, value.transpose(-2, -1))
    grad_scores = weights * (grad_weights - (grad * out).sum(-1, keepdim=True)) * factor
    results = (
        torch.matmul(grad_scores, key),
        torch.matmul(grad_scores.transpose(-2, -1), query),
        torch.matmul(weights.transpose(-2, -1), grad),
    )
    return [_heads_inside(t) for t in results]


def _heads_inside(t: Tensor) -> Tensor:
    """Lay (batch, head, token, ...) out as (batch, token, head, ...)."""
    return t.transpose(1, 2).contiguous().transpose(1, 2)


SPELLED_OUT: dict[str, Callable[..., Sequence[Tensor | None] | None]] = {
    "_scaled_dot_product_flash_attention_for_cpu": attention,
    "_scaled_dot_product_flash_attention_for_cpu_backward": attention_backward,
}
