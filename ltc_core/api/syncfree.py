"""Optimizers that skip a step on the device: if `found_inf` is not zero, parameters and state do not change.

`grad_scaler.GradScaler` passes `found_inf` as a tensor, and nothing waits for its value. Adam and AdamW are PyTorch's
fused ones, which take such a flag. PyTorch's fused SGD loses its momentum if the first step is skipped, so SGD is
written here.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch

__all__ = ["SGD", "Adam", "AdamW"]

Closure = Callable[[], Any] | None
Tensors = list[torch.Tensor] | tuple[torch.Tensor, ...]

# PyTorch wraps `step` of each instantiated class to run hooks; this unwrapped one does not run them again.
_adam_step: Callable[..., Any] = inspect.unwrap(
    torch.optim.Adam.step, stop=lambda step: not getattr(step, "hooked", False)
)


def _flag(found_inf: Any) -> torch.Tensor:
    """1.0 if any element is not zero, as the fused ops expect."""
    return (torch.as_tensor(found_inf) != 0).any().float()


class _Adam(torch.optim.Adam):
    _step_supports_amp_scaling = True  # a copy of an optimizer has only what its class has

    def __init__(self, params: Any, *args: Any, **kwargs: Any) -> None:
        super().__init__(params, *args, **{**kwargs, "fused": True, "foreach": None})

    def step(self, closure: Closure = None, found_inf: Any = None) -> Any:
        """Step, unless an element of `found_inf` is not zero.

        Args:
            found_inf: a tensor on any device, or None.

        Returns:
            What the closure gives.

        Cost: recorded; no sync.
        """
        if found_inf is None:
            return _adam_step(self, closure)
        self.grad_scale, self.found_inf = None, _flag(found_inf)
        try:
            return _adam_step(self, closure)
        finally:
            del self.grad_scale, self.found_inf

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state, also one of `torch.optim`'s; its step counts move to the device."""
        groups = [{**g, "fused": True, "foreach": None} for g in state_dict["param_groups"]]
        super().load_state_dict({**state_dict, "param_groups": groups})


class Adam(_Adam):
    """`torch.optim.Adam`, whose `step` takes `found_inf`; `fused` and `foreach` are chosen here.

    Source: `torch_xla.amp.syncfree.Adam`.
    """


class AdamW(_Adam, torch.optim.AdamW):
    """`torch.optim.AdamW`, whose `step` takes `found_inf`; `fused` and `foreach` are chosen here.

    Source: `torch_xla.amp.syncfree.AdamW`.
    """


class SGD(torch.optim.SGD):
    """`torch.optim.SGD`, whose `step` takes `found_inf`; `fused` and `foreach` are chosen here.

    Source: `torch_xla.amp.syncfree.SGD`.
    """

    def __init__(self, params: Any, *args: Any, **kwargs: Any) -> None:
        super().__init__(params, *args, **{**kwargs, "fused": None, "foreach": None})

    def step(self, closure: Closure = None, found_inf: Any = None) -> Any:
        """Step, unless an element of `found_inf` is not zero.

        Args:
            found_inf: a tensor on any device, or None.

        Returns:
            What the closure gives.

        Cost: recorded; no sync.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        with torch.no_grad():
            for group in self.param_groups:
                params = [p for p in group["params"] if p.grad is not None]
                if params:
                    flag = None if found_inf is None else _flag(found_inf).to(params[0].device)
                    self._step_group(group, params, flag)
        return loss

    def _step_group(
        self, group: dict[str, Any], params: list[torch.Tensor], flag: torch.Tensor | None
    ) -> None:
        change: Tensors = [p.grad for p in params]  # type: ignore[misc]
        if group["maximize"]:
            change = torch._foreach_neg(change)
        if group["weight_decay"] != 0:
            change = torch._foreach_add(change, params, alpha=group["weight_decay"])
        olds, news = list(params), list[torch.Tensor]()
        if group["momentum"] != 0:
            buffers, momenta = self._momenta(group, params, change, flag)
            olds += buffers
            news += momenta
            if group["nesterov"]:
                momenta = torch._foreach_add(change, momenta, alpha=group["momentum"])
            change = momenta
        if isinstance(group["lr"], torch.Tensor):  # a Python number would be a sync
            moved = torch._foreach_sub(params, torch._foreach_mul(change, group["lr"]))
        else:
            moved = torch._foreach_add(params, change, alpha=-group["lr"])
        _write(olds, [*moved, *news], flag)

    def _momenta(
        self,
        group: dict[str, Any],
        params: Tensors,
        grads: Tensors,
        flag: torch.Tensor | None,
    ) -> tuple[Tensors, Tensors]:
        """Return the buffers and their new values."""
        damping = group["dampening"]
        states = [self.state[p] for p in params]
        for p, state in zip(params, states, strict=True):
            if state.get("momentum_buffer") is None:
                state["momentum_buffer"] = torch.zeros_like(p)
                if damping != 0:
                    state["step"] = torch.zeros((), device=p.device)
        buffers = [state["momentum_buffer"] for state in states]
        momenta = torch._foreach_mul(buffers, group["momentum"])
        if damping == 0:
            return buffers, torch._foreach_add(momenta, grads)
        # The first gradient is not dampened, and only the device knows which step was the first that was not skipped.
        steps = []
        for p, state in zip(params, states, strict=True):
            steps.append(state.setdefault("step", torch.ones((), device=p.device)))
        damped = [
            torch.where(n == 0, g, g * (1 - damping)) for n, g in zip(steps, grads, strict=True)
        ]
        _write(steps, torch._foreach_add(steps, 1), flag)
        momenta = torch._foreach_add(momenta, damped)
        return buffers, momenta


def _write(olds: Tensors, news: Tensors, flag: torch.Tensor | None) -> None:
    if flag is not None:
        skipped = flag != 0
        news = [torch.where(skipped, old, new) for old, new in zip(olds, news, strict=True)]
    torch._foreach_copy_(olds, news)
