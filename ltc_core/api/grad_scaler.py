"""`GradScaler`: scales the loss, and skips steps whose gradients overflow, without a sync.

With an optimizer of `syncfree`, or one of PyTorch's with `fused=True`, the device decides. With others the step waits
for the gradients, unless an overflow may step with zero gradients instead (`use_zero_grad`).
"""

from __future__ import annotations

import inspect
from typing import Any

import torch

from ltc_core.settings import settings

__all__ = ["GradScaler"]


class GradScaler(torch.amp.GradScaler):
    """`torch.amp.GradScaler` for the device.

    Args:
        init_scale: what losses are multiplied with at first.
        growth_factor: of the scale, after `growth_interval` steps without an overflow.
        backoff_factor: of the scale, after an overflow.
        growth_interval: in steps.
        enabled: if False, nothing is scaled or skipped.
        use_zero_grad: on an overflow make gradients zero and step, with an optimizer that cannot skip a step on the
            device. It waits for nothing, but momentum, weight decay and the step count go on.

    Source: `torch_xla.amp.GradScaler`, `torch.amp.GradScaler`.
    """

    def __init__(
        self,
        init_scale: float = 2.0**16,
        growth_factor: float = 2.0,
        backoff_factor: float = 0.5,
        growth_interval: int = 2000,
        enabled: bool = True,
        use_zero_grad: bool = False,
    ) -> None:
        super().__init__(
            settings.device_name,
            init_scale,
            growth_factor,
            backoff_factor,
            growth_interval,
            enabled,
        )
        self.use_zero_grad = use_zero_grad

    def _maybe_opt_step(
        self,
        optimizer: Any,
        optimizer_state: dict[str, Any],
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        """Called by `step`, unless the optimizer unscales by itself (PyTorch's fused ones)."""
        flags = optimizer_state["found_inf_per_device"]
        if "found_inf" in inspect.signature(optimizer.step).parameters:
            first, *others = flags.values()
            found_inf = sum((flag.to(first.device) for flag in others), first)
            return optimizer.step(*args, found_inf=found_inf, **kwargs)
        if not self.use_zero_grad:
            return super()._maybe_opt_step(optimizer, optimizer_state, *args, **kwargs)
        overflown = {device: flag != 0 for device, flag in flags.items()}
        with torch.no_grad():
            for group in optimizer.param_groups:
                for grad in [p.grad for p in group["params"] if p.grad is not None]:
                    grad.masked_fill_(overflown[grad.device], 0)
        return optimizer.step(*args, **kwargs)
