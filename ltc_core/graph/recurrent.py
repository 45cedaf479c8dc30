"""Recurrent layers over whole sequences as one op of a graph: `LAYER`, and `LAYER_GRAD` for their gradients.

The sequences are those of a padded batch, or packed ones (`torch.nn.utils.rnn.PackedSequence`). The kernels are those
of eager. What autograd keeps of the steps lives as long as the tensor of the output: `LAYER_GRAD` finds it there. Where
the output is another tensor by then, such as a copy, the layer is computed again.
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
    batch_sizes: Tensor | None,
    hx: Sequence[Tensor],
    params: Sequence[Tensor],
    has_biases: bool,
    num_layers: int,
    bidirectional: bool,
    batch_first: bool,
    needs_grad: Sequence[bool],
    keeps_steps: bool,
) -> list[Tensor]:
    size = [*input.shape[:-1], hx[0].shape[2] * (2 if bidirectional else 1)]
    if batch_first:  # in eager the batch comes second in memory
        output = input.new_empty((size[1], size[0], size[2])).transpose(0, 1)
    else:
        output = input.new_empty(size)
    return [output, *(state.new_empty(state.shape) for state in hx)]


@in_own_state
def _run(
    kind: str,
    input: Tensor,
    batch_sizes: Tensor | None,
    hx: Sequence[Tensor],
    params: Sequence[Tensor],
    *layout: Any,
) -> list[Tensor]:
    *layout, needs_grad, keeps_steps = layout  # type: ignore[assignment]
    with torch.set_grad_enabled(keeps_steps):
        own, results = _tracked(kind, input, batch_sizes, hx, params, layout, needs_grad)
    given = [result.detach() for result in results]
    if keeps_steps:
        given[0].__dict__[_STEPS] = own, results
    return given


def _tracked(
    kind: str,
    input: Tensor,
    batch_sizes: Tensor | None,
    hx: Sequence[Tensor],
    params: Sequence[Tensor],
    layout: Sequence[Any],
    needs_grad: Sequence[bool],
) -> tuple[list[Tensor], list[Tensor]]:
    """Leaves in the place of the operands, and the results; which need a gradient also decides eager's kernels."""
    operands = zip((input, *hx, *params), needs_grad, strict=True)
    own = [t.detach().requires_grad_(needed) for t, needed in operands]
    states, weights = own[1 : 1 + len(hx)], own[1 + len(hx) :]
    return own, _layer(kind, own[0], batch_sizes, states, weights, *layout)


def _layer(
    kind: str,
    input: Tensor,
    batch_sizes: Tensor | None,
    hx: Sequence[Tensor],
    params: Sequence[Tensor],
    has_biases: bool,
    num_layers: int,
    bidirectional: bool,
    batch_first: bool,
) -> list[Tensor]:
    eager = getattr(torch, kind)
    state = tuple(hx) if kind == "lstm" else hx[0]
    layers = has_biases, num_layers, 0.0, False, bidirectional
    if batch_sizes is None:
        return list(eager(input, state, params, *layers, batch_first))
    return list(eager(input, batch_sizes, state, params, *layers))


def _shapes_of_grads(
    grads: Sequence[Tensor | None],
    output: Tensor,
    kind: str,
    input: Tensor,
    batch_sizes: Tensor | None,
    hx: Sequence[Tensor],
    params: Sequence[Tensor],
    *layout: Any,
) -> list[Tensor]:
    operands = (input, *hx, *params)
    return [t.new_empty(t.shape) for t, n in zip(operands, layout[-1], strict=True) if n]


@in_own_state
def _run_grads(
    grads: Sequence[Tensor | None],
    output: Tensor,
    kind: str,
    input: Tensor,
    batch_sizes: Tensor | None,
    hx: Sequence[Tensor],
    params: Sequence[Tensor],
    *layout: Any,
) -> list[Tensor]:
    *layout, needs_grad = layout  # type: ignore[assignment]
    kept = output.__dict__.pop(_STEPS, None)
    if kept is None:
        with torch.enable_grad():
            kept = _tracked(kind, input, batch_sizes, hx, params, layout, needs_grad)
    own, results = kept
    pairs = [
        (result, grad) for result, grad in zip(results, grads, strict=True) if grad is not None
    ]
    outputs, of_outputs = zip(*pairs, strict=True)
    found = torch.autograd.grad(outputs, [t for t in own if t.requires_grad], of_outputs)
    return [grad.contiguous() for grad in found]


_STEPS = "_ltc_steps"
_LAYER = (
    "str kind, Tensor input, Tensor? batch_sizes, Tensor[] hx, Tensor[] params, bool has_biases, int num_layers, "
    "bool bidirectional, bool batch_first, bool[] needs_grad"
)
_library: Any = torch.library.Library("ltc_recurrent", "FRAGMENT")  # type: ignore[no-untyped-call]
_library.define(f"layer({_LAYER}, bool keeps_steps) -> Tensor[]")
_library.define(f"layer_grad(Tensor?[] grads, Tensor output, {_LAYER}) -> Tensor[]")
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
