"""GRUs and simple RNNs over a long sequence as one op of a graph: `LAYER`, and `LAYER_GRAD` for their gradients.

The kernels are those of eager. That of the gradients computes the layer again, with autograd, so nothing is
kept of the steps. It costs as much as eager's forward and backward pass.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ltc_core.thread_state import in_own_state

__all__ = ["LAYER", "LAYER_GRAD", "OPS"]

Tensor = torch.Tensor


def _shapes(
    kind: str,
    input: Tensor,
    hx: Tensor,
    params: Sequence[Tensor],
    has_biases: bool,
    num_layers: int,
    bidirectional: bool,
    batch_first: bool,
    needs_grad: Sequence[bool],
) -> tuple[Tensor, Tensor]:
    size = (*input.shape[:2], hx.shape[2] * (2 if bidirectional else 1))
    # In eager the batch comes second in memory.
    output = input.new_empty((size[1], size[0], size[2]) if batch_first else size)
    return (output.transpose(0, 1) if batch_first else output), hx.new_empty(hx.shape)


def _run(
    kind: str, input: Tensor, hx: Tensor, params: Sequence[Tensor], *layout: Any
) -> tuple[Tensor, Tensor]:
    *layout, needs_grad = layout  # type: ignore[assignment]
    # The product of a batch and a weight is another one where the weight needs a gradient.
    params = [t.detach().requires_grad_(n) for t, n in zip(params, needs_grad[2:], strict=True)]
    with torch.no_grad():
        return _layer(kind, input, hx, params, *layout)


def _layer(
    kind: str,
    input: Tensor,
    hx: Tensor,
    params: Sequence[Tensor],
    has_biases: bool,
    num_layers: int,
    *directions: bool,
) -> tuple[Tensor, Tensor]:
    eager = getattr(torch, kind)
    return eager(  # type: ignore[no-any-return]
        input, hx, params, has_biases, num_layers, 0.0, False, *directions
    )


def _shapes_of_grads(
    output_grad: Tensor | None,
    hidden_grad: Tensor | None,
    kind: str,
    input: Tensor,
    hx: Tensor,
    params: Sequence[Tensor],
    *layout: Any,
) -> list[Tensor]:
    operands = (input, hx, *params)
    return [t.new_empty(t.shape) for t, n in zip(operands, layout[-1], strict=True) if n]


@in_own_state
def _run_grads(
    output_grad: Tensor | None,
    hidden_grad: Tensor | None,
    kind: str,
    input: Tensor,
    hx: Tensor,
    params: Sequence[Tensor],
    *layout: Any,
) -> list[Tensor]:
    *layout, needs_grad = layout  # type: ignore[assignment]
    operands = zip((input, hx, *params), needs_grad, strict=True)
    own = [t.detach().requires_grad_(needed) for t, needed in operands]
    with torch.enable_grad():
        results = _layer(kind, own[0], own[1], own[2:], *layout)
    pairs = zip(results, (output_grad, hidden_grad), strict=True)
    outputs, of_outputs = zip(*(pair for pair in pairs if pair[1] is not None), strict=True)
    grads = torch.autograd.grad(outputs, [t for t in own if t.requires_grad], of_outputs)
    return [grad.contiguous() for grad in grads]


_LAYER = (
    "str kind, Tensor input, Tensor hx, Tensor[] params, bool has_biases, int num_layers, bool bidirectional, "
    "bool batch_first, bool[] needs_grad"
)
_library: Any = torch.library.Library("ltc_recurrent", "FRAGMENT")  # type: ignore[no-untyped-call]
_library.define(f"layer({_LAYER}) -> (Tensor, Tensor)")
_library.define(f"layer_grad(Tensor? output_grad, Tensor? hidden_grad, {_LAYER}) -> Tensor[]")
for _name, _of_meta, _of_cpu in (
    ("layer", _shapes, _run),
    ("layer_grad", _shapes_of_grads, _run_grads),
):
    _library.impl(_name, _of_meta, "Meta")
    _library.impl(_name, _of_cpu, "CPU")
    _library.impl(_name, torch.library.fallthrough_kernel, "AutogradPrivateUse1")

LAYER: torch._ops.OpOverload = torch.ops.ltc_recurrent.layer.default
LAYER_GRAD: torch._ops.OpOverload = torch.ops.ltc_recurrent.layer_grad.default
OPS = frozenset({LAYER, LAYER_GRAD})
