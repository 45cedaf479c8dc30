"""`torch_xla.experimental.xla_quantized_matmul`: products with weights of int8, over PyTorch's ops.

The op `torch.ops.xla.quantized_matmul` is made of other ops on each device, the CPU too: weights take a byte each where
they are stored, and are converted where they are multiplied.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.ao.quantization.fx._decomposed  # torch_xla's import registers torch.ops.quantized_decomposed, too
from torch import nn
from torch.nn import functional as F

__all__ = ["XlaQuantizedLinear", "quantized_matmul"]

Tensor = torch.Tensor

_SCHEMA = (
    "quantized_matmul(Tensor x, Tensor w, Tensor scale, Tensor? zero_point=None, int? block_size=-1, "
    "bool? int4_weight=False, bool? quantize_activation=False) -> Tensor"
)
_INT8_MAX = 127


def quantized_matmul(
    x: Tensor,
    w: Tensor,
    scaler: Tensor,
    zero_point: Tensor | None = None,
    block_size: int = -1,
    int4_weight: bool = False,
    quantize_activation: bool = False,
) -> Tensor:
    """Product of `x` and a weight that was quantized by output channel, or by blocks of input channels.

    Args:
        x: [..., input channels].
        w: int8; [output channels, input channels], or [blocks, block size, output channels].
        scaler: [output channels], or [blocks, output channels].
        zero_point: of the size of `scaler`, and multiplied by it.
        block_size: -1: one scale for each output channel.
        int4_weight: accepted; such weights are stored as int8, too.
        quantize_activation: round `x` to int8, with a scale for each row; sums are int32.

    Raises:
        AssertionError: a size or a dtype does not fit.
    """
    blocks = None if block_size == -1 else block_size
    num_out = w.shape[0] if blocks is None else w.shape[-1]
    _require_fitting(x.shape[-1], num_out, blocks, w, scaler, zero_point)
    if blocks is not None:
        assert not quantize_activation, (
            "Blockwise quantization does not support activation quantization."
        )
        x = x.unflatten(-1, (-1, blocks))  # type: ignore[no-untyped-call]
        out = torch.einsum("scn,...sc,sn->...n", w.to(x.dtype), x, scaler)
        return out if zero_point is None else out - x.sum(-1) @ zero_point
    if not quantize_activation:
        out = F.linear(x, w.to(x.dtype)) * scaler
        return out if zero_point is None else out - x.sum(-1, keepdim=True) * zero_point
    scale = x.abs().amax(-1, keepdim=True) / _INT8_MAX
    rounded = (x / scale).round().to(torch.int8)
    out = torch._int_mm(rounded.reshape(-1, x.shape[-1]), w.t())
    out = out.reshape(*x.shape[:-1], num_out) * scaler
    if zero_point is not None:
        out = out - rounded.sum(-1, keepdim=True) * zero_point
    return out * scale


def _require_fitting(
    num_in: int,
    num_out: int,
    blocks: int | None,
    w: Tensor,
    scaler: Tensor,
    zero_point: Tensor | None,
) -> None:
    if blocks is None:
        size: list[int] = [num_out, num_in]
        scales = [num_out]
    else:
        assert num_in % blocks == 0, (
            f"input_dim should be divisible by block_size, got input_dim: {num_in}, block_size: {blocks}."
        )
        size, scales = [num_in // blocks, blocks, num_out], [num_in // blocks, num_out]
    assert w.dtype == torch.int8, f"Weight dtype is expected to be torch.int8, got {w.dtype}."
    assert list(w.shape) == size, f"Weight shape is expected to be {size}, got {list(w.shape)}."
    for name, t in (("weight scaler", scaler), ("zero_point", zero_point)):
        assert t is None or list(t.shape) == scales, (
            f"{name} shape is expected to be {scales}, got {list(t.shape)}."
        )


class XlaQuantizedLinear(nn.Module):
    """A linear layer without a bias whose weight is quantized; see `quantized_matmul`."""

    def __init__(
        self,
        input_dim: int,
        output_dim: int,
        is_symmetric: bool = False,
        block_size: int = -1,
        int4_weight: bool = False,
        quantize_activation: bool = False,
    ) -> None:
        super().__init__()
        self.input_dim, self.output_dim = input_dim, output_dim
        self.is_symmetric, self.block_size = is_symmetric, block_size
        self.int4_weight, self.quantize_activation = int4_weight, quantize_activation
        self.register_buffer("weight", torch.zeros(output_dim, input_dim, dtype=torch.int8))
        self.register_buffer("weight_scaler", torch.zeros(output_dim))
        self.register_buffer("zero_point", None if is_symmetric else torch.zeros(output_dim))

    def load_quantized_weight(
        self, weight: Tensor, weight_scaler: Tensor, zero_point: Tensor | None = None
    ) -> None:
        """Take a quantized weight, with sizes as in `quantized_matmul`."""
        blocks = None if self.block_size == -1 else self.block_size
        _require_fitting(self.input_dim, self.output_dim, blocks, weight, weight_scaler, zero_point)
        self.weight, self.weight_scaler, self.zero_point = weight, weight_scaler, zero_point

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = torch.ops.xla.quantized_matmul(
            x,
            self.weight,
            self.weight_scaler,
            self.zero_point,
            block_size=self.block_size,
            int4_weight=self.int4_weight,
            quantize_activation=self.quantize_activation,
        )
        return found


# Kept: the op is there as long as its library.
_torch_library: Any = torch.library
_library = _torch_library.Library("xla", "FRAGMENT")
_library.define(_SCHEMA)
_library.impl("quantized_matmul", quantized_matmul, "CompositeImplicitAutograd")
