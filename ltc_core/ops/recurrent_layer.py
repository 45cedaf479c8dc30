"""A recurrent layer that is one op (`graph.recurrent`), with its gradients. Used by `rnn`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from ltc_core.graph.recurrent import LAYER, LAYER_GRAD
from ltc_core.settings import settings

__all__ = ["Again", "may_be_one_op", "one_op"]

Tensor = torch.Tensor
# (input, states, weights) -> the results of the layer, made of ops that have derivatives
Again = Callable[[Tensor, Sequence[Tensor], Sequence[Tensor]], Sequence[Tensor]]


def may_be_one_op() -> bool:
    """Whether a layer may be one op: it runs on kernels of the CPU, and has gradients alone."""
    is_transformed = torch._C._functorch.peek_interpreter_stack() is not None
    has_tangents = torch.autograd.forward_ad._current_level >= 0
    return settings.executor != "jax" and not is_transformed and not has_tangents


def one_op(
    kind: str,
    again: Again,
    layout: tuple[Any, ...],
    input: Tensor,
    batch_sizes: Tensor | None,
    hx: Sequence[Tensor],
    params: Sequence[Tensor],
) -> Sequence[Tensor]:
    """Output and last states of layers.

    Args:
        kind: 'lstm', 'gru', 'rnn_tanh' or 'rnn_relu'.
        again: makes gradients of gradients.
        layout: has_biases, num_layers, bidirectional, batch_first.
        batch_sizes: of packed sequences, int64 on the device; None for a padded batch.
        hx: the first hidden state; of an LSTM also the cell state.
    """
    keeps_steps = torch.is_grad_enabled() and any(t.requires_grad for t in (input, *hx, *params))
    return _Layer.apply(  # type: ignore[no-untyped-call, no-any-return]
        kind, again, layout, keeps_steps, len(hx), batch_sizes, input, *hx, *params
    )


class _Layer(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        kind: str,
        again: Again,
        layout: tuple[Any, ...],
        keeps_steps: bool,
        num_states: int,
        batch_sizes: Tensor | None,
        input: Tensor,
        *others: Tensor,
    ) -> tuple[Tensor, ...]:
        needs_grad = [t.requires_grad for t in (input, *others)]
        ctx.kind, ctx.again, ctx.layout, ctx.num_states = kind, again, layout, num_states
        ctx.needs_grad = needs_grad
        ctx.set_materialize_grads(False)
        hx, params = others[:num_states], others[num_states:]
        made = LAYER(kind, input, batch_sizes, hx, params, *layout, needs_grad, keeps_steps)
        ctx.save_for_backward(made[0], batch_sizes, input, *others)
        return tuple(made)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        output, batch_sizes, input, *others = ctx.saved_tensors
        if all(grad is None for grad in grads):
            return (None,) * (7 + len(others))
        hx, params = others[: ctx.num_states], others[ctx.num_states :]
        if torch.is_grad_enabled():
            found = _differentiable_grads(ctx, grads, input, hx, params)
        else:
            layout = *ctx.layout, ctx.needs_grad
            found = LAYER_GRAD(grads, output, ctx.kind, input, batch_sizes, hx, params, *layout)
        made = iter(found)
        wanted = (next(made) if needed else None for needed in ctx.needs_grad)
        return None, None, None, None, None, None, *wanted


def _differentiable_grads(
    ctx: Any, given: Sequence[Tensor | None], input: Tensor, hx: Any, params: Any
) -> Sequence[Tensor]:
    """The gradients of the operands that need one, from the steps of a layer."""
    results = ctx.again(input, hx, params)
    pairs = [(r, g) for r, g in zip(results, given, strict=True) if g is not None]
    outputs, of_outputs = zip(*pairs, strict=True)
    operands = zip((input, *hx, *params), ctx.needs_grad, strict=True)
    wanted = [t for t, needed in operands if needed]
    return torch.autograd.grad(outputs, wanted, of_outputs, create_graph=True, allow_unused=True)
