"""`torch_xla.experimental.custom_kernel`: attention, over PyTorch's own; the executor chooses the kernel."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from torch.nn.functional import scaled_dot_product_attention

from ltc_dist.compat.absent import Absent
from ltc_dist.compat.table import PALLAS
from ltc_dist.spmd import Mesh, get_global_mesh, mark_sharding

__all__ = [
    "FlashAttention",
    "flash_attention",
    "gmm",
    "jax_import_guard",
    "make_kernel_from_pallas",
    "multi_queries_paged_attention",
    "paged_attention",
    "quantized_matmul_int8",
    "ragged_paged_attention",
    "repeat_with_fixed_output_size",
    "tgmm",
    "trace_pallas",
]

gmm = Absent("gmm", PALLAS)
make_kernel_from_pallas = Absent("make_kernel_from_pallas", PALLAS)
multi_queries_paged_attention = Absent("multi_queries_paged_attention", PALLAS)
paged_attention = Absent("paged_attention", PALLAS)
quantized_matmul_int8 = Absent("quantized_matmul_int8", PALLAS)
ragged_paged_attention = Absent("ragged_paged_attention", PALLAS)
tgmm = Absent("tgmm", PALLAS)
trace_pallas = Absent("trace_pallas", PALLAS)


def jax_import_guard() -> None:
    """Does nothing: no kernel needs JAX."""


def flash_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    causal: bool = False,
    q_segment_ids: torch.Tensor | None = None,
    kv_segment_ids: torch.Tensor | None = None,
    sm_scale: float = 1.0,
    *,
    ab: torch.Tensor | None = None,
    partition_spec: Sequence[Any] | None = None,
    mesh: Mesh | None = None,
) -> torch.Tensor:
    """Attention: softmax((q k^T + ab) * sm_scale) v.

    Args:
        q: [batch, heads, queries, head size].
        k, v: [batch, heads, keys, head size].
        causal: query i sees the keys up to i only.
        q_segment_ids, kv_segment_ids: [batch, queries], [batch, keys]; a query sees the keys of its own segment only.
            Both or none.
        sm_scale: 1.0 by default, where PyTorch divides by the root of the head size.
        ab: [batch, heads, queries, keys], added before the scale.
        partition_spec: how the result is divided over a mesh.
        mesh: the mesh, by default the global one.

    Raises:
        AssertionError: only one of the segment ids is given; the text is torch_xla's.
        ValueError: there is a spec, but no mesh.

    Source: `torch_xla.experimental.custom_kernel.flash_attention`.
    """
    if (q_segment_ids is None) != (kv_segment_ids is None):
        raise AssertionError("Both q_segment_ids and kv_segment_ids should be provided.")
    visible = None
    if q_segment_ids is not None and kv_segment_ids is not None:
        visible = (q_segment_ids[:, :, None] == kv_segment_ids[:, None, :])[:, None]
    is_plain = visible is None and ab is None
    if causal and not is_plain:
        square = torch.ones(q.size(-2), k.size(-2), dtype=torch.bool, device=q.device).tril()
        visible = square if visible is None else visible & square
    mask = visible
    if ab is not None:
        mask = ab * sm_scale
        if visible is not None:
            mask = mask.masked_fill(~visible, float("-inf"))
    result = scaled_dot_product_attention(
        q, k, v, mask, is_causal=causal and is_plain, scale=sm_scale
    )
    if partition_spec is not None:
        mesh = get_global_mesh() or mesh
        if mesh is None:
            raise ValueError("partition_spec needs a mesh: mesh=, or xs.set_global_mesh")
        mark_sharding(result, mesh, partition_spec)
    return result


class FlashAttention:
    """`flash_attention` under its older name. The sizes of blocks are accepted; the executor chooses its own."""

    DEFAULT_BLOCK_SIZES: ClassVar[dict[str, int]] = {}

    @staticmethod
    def apply(
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        causal: bool = False,
        q_segment_ids: torch.Tensor | None = None,
        kv_segment_ids: torch.Tensor | None = None,
        sm_scale: float = 1.0,
        ab: torch.Tensor | None = None,
        partition_spec: Sequence[Any] | None = None,
        mesh: Mesh | None = None,
    ) -> torch.Tensor:
        """Call `flash_attention`."""
        return flash_attention(
            q,
            k,
            v,
            causal,
            q_segment_ids,
            kv_segment_ids,
            sm_scale,
            ab=ab,
            partition_spec=partition_spec,
            mesh=mesh,
        )


def repeat_with_fixed_output_size(
    input: torch.Tensor, repeats: torch.Tensor, total_repeat_length: int
) -> torch.Tensor:
    """`torch.repeat_interleave`, cut off or filled with the last element to a length; nothing is waited for.

    Args:
        input: one dim.
        repeats: of each element, one dim.
    """
    assert input.dim() == repeats.dim() == 1
    places = torch.arange(total_repeat_length, device=input.device)
    elements = torch.searchsorted(repeats.cumsum(0), places, right=True)
    return input[elements.clamp(max=len(input) - 1)]
