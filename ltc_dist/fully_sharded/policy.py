"""Which inner modules are wrapped: a policy decides, as those of `torch.distributed.fsdp.wrap`."""

from __future__ import annotations

from collections.abc import Callable

from torch import nn

__all__ = ["wrap_below"]


def wrap_below(
    module: nn.Module,
    policy: Callable[..., bool],
    wrapper: type[nn.Module],
    wrap: Callable[[nn.Module], nn.Module],
    is_left: Callable[[nn.Parameter], bool],
) -> None:
    """Wrap the modules below this one for which the policy is true, inner ones first.

    Args:
        policy: called with a module, whether to look below it, and its number of elements.
        wrapper: what modules are wrapped with.
        wrap: wraps one.
        is_left: whether a parameter belongs to no wrapped module yet.

    Raises:
        ValueError: a module is wrapped already.
    """
    for name, child in module.named_children():
        if isinstance(child, wrapper):
            raise ValueError(
                f"Expected {name} to NOT be {wrapper.__name__} if using an `auto_wrap_policy`"
            )
        count = sum(p.numel() for p in child.parameters())
        if policy(child, True, count):
            wrap_below(child, policy, wrapper, wrap, is_left)
            rest = sum(p.numel() for p in child.parameters() if is_left(p))
            if policy(child, False, rest):
                setattr(module, name, wrap(child))
