"""Decompositions of fused ops: attention, forward and backward, and layers of encoders in inference.

A rule takes the arguments of its op and returns the op's results. `FOR_XLA` is for XLA, which has no kernels for
these ops (`executors.torch_xla.launch`). `FOR_INDUCTOR` is for PyTorch's compiler
(`executors.inductor.lowering.lower`): a rule returns None where the op's kernel is faster than the decomposition.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

__all__ = ["FOR_XLA", "FOR_INDUCTOR", "attention", "attention_backward", "wide"]

Tensor = torch.Tensor
# Up to this many scores, which fit the second-level cache (1 MiB a core here), the decomposition is faster than flash
# attention. GPT of `benchmarks.peers`, 64 tokens: 16.6 ms a step with the decomposition, 18.2 with the op.
_MAX_SCORES = 256 * 256
_NARROW = (torch.float16, torch.bfloat16)


def _scores(
    query: Tensor, key: Tensor, causal: bool, mask: Tensor | None, scale: float | None
) -> Tensor:
    factor = 1 / math.sqrt(query.shape[-1]) if scale is None else scale
    scores = torch.matmul(query, key.transpose(-2, -1)) * factor
    if mask is not None:
        scores = scores + mask
    if causal:
        rows = torch.arange(query.shape[2], device=query.device).unsqueeze(1)
        columns = torch.arange(key.shape[2], device=query.device)
        scores = torch.where(columns <= rows, scores, float("-inf"))
    return scores


def wide(*tensors: Tensor) -> list[Tensor]:
    """The tensors, with float16 and bfloat16 converted to float32, in which ATen's kernels compute."""
    return [t.float() if t.dtype in _NARROW else t for t in tensors]


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    dropout: float = 0.0,
    causal: bool = False,
    attn_mask: Tensor | None = None,
    scale: float | None = None,
) -> list[Tensor]:
    """Output and log-sum-exp of the scores, both with flash attention's strides."""
    dtype = query.dtype
    query, key, value = wide(query, key, value)
    key, value = _for_each_head(query, key), _for_each_head(query, value)
    scores = _scores(query, key, causal, attn_mask, scale)
    top = scores.amax(-1, keepdim=True)
    if attn_mask is not None:
        # For a row that is masked out, the op returns zeros as output and as log-sum-exp.
        top = torch.where(top == float("-inf"), 0.0, top)
    total = (scores - top).exp().sum(-1, keepdim=True)
    if attn_mask is not None:
        total = torch.where(total == 0, 1.0, total)
    log_total = total.log() + top
    # The same expression as in the backward, so that a graph with both computes the weights once.
    out = torch.matmul((scores - log_total).exp(), value).to(dtype)
    return [_heads_inside(out), _heads_inside(log_total.squeeze(-1))]


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
) -> list[Tensor]:
    """Gradients of query, key and value."""
    dtype, num_groups = query.dtype, key.shape[1]
    grad, query, key, value, out, log_total = wide(grad, query, key, value, out, log_total)
    key, value = _for_each_head(query, key), _for_each_head(query, value)
    factor = 1 / math.sqrt(query.shape[-1]) if scale is None else scale
    scores = _scores(query, key, causal, attn_mask, scale)
    weights = (scores - log_total.unsqueeze(-1)).exp()
    grad_weights = torch.matmul(grad, value.transpose(-2, -1))
    grad_scores = weights * (grad_weights - (grad * out).sum(-1, keepdim=True)) * factor
    results = (
        torch.matmul(grad_scores, key),
        _sum_of_groups(torch.matmul(grad_scores.transpose(-2, -1), query), num_groups),
        _sum_of_groups(torch.matmul(weights.transpose(-2, -1), grad), num_groups),
    )
    return [_heads_inside(t.to(dtype)) for t in results]


def _for_each_head(query: Tensor, t: Tensor) -> Tensor:
    """Keys or values for each head of the query; several in a row may share one."""
    count = query.shape[1] // t.shape[1]
    return t if count == 1 else t.repeat_interleave(count, dim=1)


def _sum_of_groups(grad: Tensor, num_groups: int) -> Tensor:
    n, heads, *rest = grad.shape
    return grad if heads == num_groups else grad.reshape(n, num_groups, -1, *rest).sum(2)


def _heads_inside(t: Tensor) -> Tensor:
    """`t`, of shape (batch, head, token, ...), in the memory order (batch, token, head, ...)."""
    return t.transpose(1, 2).contiguous().transpose(1, 2)


def encoder_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    embed_dim: int,
    num_heads: int,
    qkv_weight: Tensor,
    qkv_bias: Tensor,
    proj_weight: Tensor,
    proj_bias: Tensor,
    mask: Tensor | None = None,
    need_weights: bool = True,
    average_attn_weights: bool = True,
    mask_type: int | None = None,
) -> list[Tensor]:
    """Output, and the weights if they are asked for, of `nn.MultiheadAttention` in inference.

    Source: `native_multi_head_attention_cpu` of ATen. A mask is true where a score is left out. It is one of
    (token, token) for type 0, of (batch, token) for type 1, and of all scores for type 2.
    """
    qkv = [
        torch.matmul(x, w.t())
        for x, w in zip((query, key, value), qkv_weight.chunk(3), strict=True)
    ]
    q, k, v = (
        (x + b).view(*x.shape[:2], num_heads, -1).transpose(1, 2)
        for x, b in zip(qkv, qkv_bias.chunk(3), strict=True)
    )
    scores = torch.matmul(q * (1 / math.sqrt(q.shape[-1])), k.transpose(-2, -1))
    if mask is not None:
        mask = mask.to(torch.bool)
        scores = scores.masked_fill(mask[:, None, None] if mask_type == 1 else mask, float("-inf"))
    weights = scores.softmax(-1)
    out = torch.matmul(weights, v).transpose(1, 2).flatten(2)
    out = torch.matmul(out, proj_weight.t()) + proj_bias
    if not need_weights:
        return [out]
    return [out, weights.mean(1) if average_attn_weights else weights]


def encoder_layer(
    src: Tensor,
    embed_dim: int,
    num_heads: int,
    qkv_weight: Tensor,
    qkv_bias: Tensor,
    proj_weight: Tensor,
    proj_bias: Tensor,
    use_gelu: bool,
    norm_first: bool,
    eps: float,
    norm_weight_1: Tensor,
    norm_bias_1: Tensor,
    norm_weight_2: Tensor,
    norm_bias_2: Tensor,
    ffn_weight_1: Tensor,
    ffn_bias_1: Tensor,
    ffn_weight_2: Tensor,
    ffn_bias_2: Tensor,
    mask: Tensor | None = None,
    mask_type: int | None = None,
) -> list[Tensor]:
    """Output of `nn.TransformerEncoderLayer` in inference.

    Source: `transformer_encoder_layer_forward` of ATen.
    """

    def norm(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        return torch.nn.functional.layer_norm(x, (embed_dim,), weight, bias, eps)

    x = norm(src, norm_weight_1, norm_bias_1) if norm_first else src
    x = src + encoder_attention(
        x, x, x, embed_dim, num_heads, qkv_weight, qkv_bias, proj_weight, proj_bias, mask, False, True, mask_type
    )[0]  # fmt: skip
    x = x if norm_first else norm(x, norm_weight_1, norm_bias_1)
    hidden = norm(x, norm_weight_2, norm_bias_2) if norm_first else x
    hidden = torch.matmul(hidden, ffn_weight_1.t()) + ffn_bias_1
    hidden = torch.nn.functional.gelu(hidden) if use_gelu else hidden.relu()
    x = x + (torch.matmul(hidden, ffn_weight_2.t()) + ffn_bias_2)
    return [x if norm_first else norm(x, norm_weight_2, norm_bias_2)]


def _pays(query: Tensor, key: Tensor, dropout: float, mask: Tensor | None) -> bool:
    short = query.shape[2] * key.shape[2] <= _MAX_SCORES
    return short and dropout == 0.0 and mask is None and query.dtype is torch.float32


def _where_it_pays(rule: Callable[..., list[Tensor]]) -> Callable[..., list[Tensor] | None]:
    signature = inspect.signature(rule)

    def run(*args: Any, **kwargs: Any) -> list[Tensor] | None:
        given = signature.bind(*args, **kwargs)
        given.apply_defaults()
        named = given.arguments
        if not _pays(named["query"], named["key"], named["dropout"], named["attn_mask"]):
            return None
        return rule(*args, **kwargs)

    return run


Rule = Callable[..., Sequence[Tensor] | None]
_ATTENTION: dict[str, Callable[..., list[Tensor]]] = {
    "_scaled_dot_product_flash_attention_for_cpu": attention,
    "_scaled_dot_product_flash_attention_for_cpu_backward": attention_backward,
}
FOR_XLA: dict[str, Rule] = {
    **_ATTENTION,
    "_native_multi_head_attention": encoder_attention,
    "_transformer_encoder_layer_fwd": encoder_layer,
}
FOR_INDUCTOR: dict[str, Rule] = {name: _where_it_pays(rule) for name, rule in _ATTENTION.items()}
