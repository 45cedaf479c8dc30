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
    done: dict[nn.Module, nn.Module] | None = None,
) -> None:
    """Wrap the modules below this one for which the policy is true, inner ones first; a shared module becomes one unit.

    Args:
        policy: called with a module, whether to look below it, and its number of elements.
        wrapper: what modules are wrapped with.
        wrap: wraps one.
        is_left: whether a parameter belongs to no wrapped module yet.
        done: for the call for a module inside: modules that were met, and what stands for them.

    Raises:
        ValueError: a module is wrapped already.
    """
    done = {} if done is None else done
    for name, child in list(module._modules.items()):
        if child is None:
            continue
        if child not in done:
            done[child] = _wrapped(name, child, policy, wrapper, wrap, is_left, done)
        if done[child] is not child:
            setattr(module, name, done[child])


def _wrapped(
    name: str,
    child: nn.Module,
    policy: Callable[..., bool],
    wrapper: type[nn.Module],
    wrap: Callable[[nn.Module], nn.Module],
    is_left: Callable[[nn.Parameter], bool],
    done: dict[nn.Module, nn.Module],
) -> nn.Module:
    if isinstance(child, wrapper):
        raise ValueError(
            f"Expected {name} to NOT be {wrapper.__name__} if using an `auto_wrap_policy`"
        )
    count = sum(p.numel() for p in child.parameters())
    if not policy(child, True, count):
        return child
    wrap_below(child, policy, wrapper, wrap, is_left, done)
    rest = sum(p.numel() for p in child.parameters() if is_left(p))
    return wrap(child) if policy(child, False, rest) else child
