"""Fused optimizers in plain arithmetic, so that their scalars may be 0-dim tensors.

A rule returns the new values of the tensors its op writes, list by list in the order of the operands. Used by
`scalar_inputs`: PyTorch's compiler would call the kernel with the learning rate as a constant, and XLA has no kernel.
Source: torch.optim, and the kernels of the ops on the CPU.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from ltc_core.program.lowering.decompositions import wide

__all__ = ["FUSED_OPTIMIZERS"]

Tensor = torch.Tensor
Tensors = Sequence[Tensor]
ScalarLike = Any  # a Python number or a 0-dim tensor


def _sgd(
    params: Tensors,
    grads: Tensors,
    buffers: Tensors,
    *,
    weight_decay: ScalarLike,
    momentum: ScalarLike,
    lr: ScalarLike,
    dampening: ScalarLike,
    nesterov: bool,
    maximize: bool,
    is_first_step: bool,
    grad_scale: Tensor | None = None,
    found_inf: Tensor | None = None,
) -> list[Tensor]:
    """New parameters, gradients and, if there are any, momentum buffers."""
    rows = []
    for p, grad, *rest in _each(params, _unscaled(grads, grad_scale), buffers):
        change = (-grad if maximize else grad) + weight_decay * p
        if rest:
            m = change if is_first_step else momentum * rest[0] + (1 - dampening) * change
            change = change + momentum * m if nesterov else m
            rest = [m]
        rows.append([p - lr * change, grad, *rest])
    return _written([params, grads, buffers], rows, found_inf)


def _adam(
    decoupled: bool,
    params: Tensors,
    grads: Tensors,
    firsts: Tensors,
    seconds: Tensors,
    maxima: Tensors,
    steps: Tensors,
    *,
    lr: ScalarLike,
    beta1: ScalarLike,
    beta2: ScalarLike,
    weight_decay: ScalarLike,
    eps: ScalarLike,
    amsgrad: bool,
    maximize: bool,
    grad_scale: Tensor | None = None,
    found_inf: Tensor | None = None,
) -> list[Tensor]:
    """New parameters, gradients, moments and, with `amsgrad`, maxima; `decoupled` is AdamW's weight decay."""
    rows = []
    unscaled = _unscaled(grads, grad_scale)
    for p, grad, m, v, step, *top in _each(params, unscaled, firsts, seconds, steps, maxima):
        g = -grad if maximize else grad
        if decoupled:
            p = p * (1 - lr * weight_decay)
        else:
            g = g + weight_decay * p
        m = m + (1 - beta1) * (g - m)
        v = beta2 * v + (1 - beta2) * g * g
        top = [torch.maximum(t, v) for t in top]
        size = lr / (1 - torch.pow(beta1, step))
        root = (top[0] if amsgrad else v).sqrt()
        p = p - size * m / (root / (1 - torch.pow(beta2, step)).sqrt() + eps)
        rows.append([p, grad, m, v, *top])
    return _written([params, grads, firsts, seconds, maxima], rows, found_inf)


def _adagrad(
    params: Tensors,
    grads: Tensors,
    sums: Tensors,
    steps: Tensors,
    *,
    lr: ScalarLike,
    lr_decay: ScalarLike,
    weight_decay: ScalarLike,
    eps: ScalarLike,
    maximize: bool,
    grad_scale: Tensor | None = None,
    found_inf: Tensor | None = None,
) -> list[Tensor]:
    """New parameters, gradients and sums of squares, and the steps unchanged: the caller counts them."""
    rows = []
    for p, grad, total, step in _each(params, _unscaled(grads, grad_scale), sums, steps):
        g = (-grad if maximize else grad) + weight_decay * p
        total = total + g * g
        p = p - lr / (1 + (step - 1) * lr_decay) * g / (total.sqrt() + eps)
        rows.append([p, grad, total, step])
    return _written([params, grads, sums, steps], rows, found_inf)


def _each(*lists: Tensors) -> Iterator[list[Tensor]]:
    """For each parameter its tensors from the lists that are not empty, float16 and bfloat16 as float32."""
    for row in zip(*filter(None, lists), strict=True):
        yield wide(*row)


def _unscaled(grads: Tensors, scale: Tensor | None) -> Tensors:
    return grads if scale is None else [(grad / scale).to(grad.dtype) for grad in grads]


def _written(
    olds: Sequence[Tensors], rows: Sequence[Tensors], found_inf: Tensor | None
) -> list[Tensor]:
    """New values, list by list, in the dtypes of the old ones; the old values if `found_inf` says to skip the step."""
    written = []
    for before, after in zip(filter(None, olds), zip(*rows, strict=True), strict=True):
        for old, new in zip(before, after, strict=True):
            new = new.to(old.dtype)
            written.append(new if found_inf is None else torch.where(found_inf > 0, old, new))
    return written


FUSED_OPTIMIZERS: dict[str, Callable[..., list[Tensor]]] = {
    "_fused_adagrad_": _adagrad,
    "_fused_adam_": functools.partial(_adam, False),
    "_fused_adamw_": functools.partial(_adam, True),
    "_fused_sgd_": _sgd,
}
