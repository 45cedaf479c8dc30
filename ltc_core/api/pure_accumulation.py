"""`gradient_accumulation` as one op: an iteration of the loop is forward and backward of a slice of the batch.

No iteration keeps what it computed for its backward pass, so the memory is that of one slice. Called by `loops` where
the executor has loops.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from ltc_core.api.loop_bodies import NoLoop
from ltc_core.api.pure_scan import pure_scan

__all__ = ["pure_accumulation"]

Tensor = torch.Tensor


def pure_accumulation(
    train_step: Callable[..., Any],
    sliced: Sequence[Tensor],
    model: nn.Module,
    carried: tuple[Tensor, ...],
) -> Any:
    """The same as `loops.gradient_accumulation`; gradients are added to those of the model's parameters.

    Raises:
        NoLoop: as `pure_scan` does; a parameter gets no gradient, or another tensor gets one.
    """
    params = [p for p in model.parameters() if p.requires_grad]
    count = sliced[0].size(0)

    def fn(carry: dict[str, Any], slices: list[Tensor]) -> tuple[dict[str, Any], None]:
        found = train_step(*slices, *carry["carried"])
        loss, after = (found[0], found[1:]) if carried else (found, ())
        loss = loss / count
        grads = torch.autograd.grad(loss, params, allow_unused=True)
        if any(g is None for g in grads):
            raise NoLoop("a parameter gets no gradient")
        if _num_leaves(loss) != len(params):
            raise NoLoop("a tensor that is no parameter of the model gets a gradient")
        return {
            "total": carry["total"] + loss.detach(),
            "carried": [t.detach() for t in after],
            "grads": [sum_ + g for sum_, g in zip(carry["grads"], grads, strict=True)],
        }, None

    first = {
        "total": torch.zeros((), device=sliced[0].device),
        "carried": [t.detach() for t in carried],
        "grads": [torch.zeros_like(p) for p in params],
    }
    with torch.enable_grad():
        last, _ = pure_scan(fn, first, list(sliced), count, None, train_step)
    for p, grad in zip(params, last["grads"], strict=True):
        p.grad = grad if p.grad is None else p.grad + grad
    return (last["total"], *last["carried"]) if carried else last["total"]


def _num_leaves(loss: Tensor) -> int:
    """How many tensors without a history get a gradient of `loss`."""
    seen, ways, leaves = set(), [loss.grad_fn], 0
    while ways:
        node = ways.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        leaves += hasattr(node, "variable")
        ways += [following for following, _ in node.next_functions]
    return leaves
