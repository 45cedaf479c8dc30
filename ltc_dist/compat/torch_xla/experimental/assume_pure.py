"""`torch_xla.experimental.assume_pure`: functions that are called as they are, or once.

torch_xla traces such a function once, because tracing is slow there. Here the function is called each time: ops that
were recorded before are only compared with the trace. `assume_pure_torch` traces it once where it is asked to.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

import ltc_core as ltc
from ltc_dist.compat.absent import Absent

__all__ = [
    "_XLA_COMPUTATION_CACHE",
    "PureModule",
    "assume_pure",
    "assume_pure_torch",
    "j2t_autograd",
]

# Function -> its graphs, by structure, shapes and dtypes of its arguments, and by their other values.
_XLA_COMPUTATION_CACHE: weakref.WeakKeyDictionary[Any, dict[Any, Any]] = weakref.WeakKeyDictionary()

j2t_autograd = Absent(
    "j2t_autograd", "a function of JAX is no part of a graph; write it with PyTorch's ops"
)


def assume_pure(
    fn: Callable[..., Any], *, add_rng_seed_argument: bool = False
) -> Callable[..., Any]:
    """Return a function that calls `fn`.

    Args:
        fn: called each time, with gradients.
        add_rng_seed_argument: the returned function takes `rng_seed=`, an int or a tensor of one element. `fn` draws
            the device's random numbers of this seed; those drawn later are not changed.

    Raises:
        AssertionError: a call has no `rng_seed`; the text is torch_xla's.
    """

    @functools.wraps(fn)
    def call(*args: Any, **kwargs: Any) -> Any:
        if not add_rng_seed_argument:
            return fn(*args, **kwargs)
        seed = kwargs.pop("rng_seed", None)
        if seed is None:
            raise AssertionError("Missing keyword argument rng_seed.")
        with ltc.fork_rng():
            ltc.manual_seed(int(seed))
            return fn(*args, **kwargs)

    return call


def assume_pure_torch(func: Callable[..., Any], use_cache: bool = False) -> Callable[..., Any]:
    """Return a function that calls `func`, without gradients.

    Args:
        func: takes and returns structures of tensors.
        use_cache: trace `func` once for arguments of the same structure, shapes, dtypes and other values, and record
            the ops of the trace after that. A function that looks at values cannot be traced, and is called each time.

    Raises:
        AssertionError: gradients are enabled.
    """
    if torch.is_grad_enabled():
        raise AssertionError("assume_pure_torch is for functions without gradients")
    if not use_cache:
        return assume_pure(func)

    @functools.wraps(func)
    @torch.no_grad()
    def call(*args: Any, **kwargs: Any) -> Any:
        from ltc_core.api.pure_call import traced_call  # imports PyTorch's compiler: seconds

        graphs = _XLA_COMPUTATION_CACHE.setdefault(func, {})
        return traced_call(func, args, kwargs, graphs)

    return call


class PureModule(nn.Module):
    """A module that calls another one."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self._module = module

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self._module(*args, **kwargs)
