"""`DividedParameter`: what stands for a whole parameter while it is divided over the processes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from ltc_core.errors import LtcError

__all__ = ["DividedParameter", "DividedParameterError"]


class DividedParameterError(LtcError, RuntimeError):
    """A whole parameter is computed with where it is divided."""


class DividedParameter(torch.Tensor):
    """The size, dtype and device of a whole parameter, without its values.

    Modules print themselves and ask `self.bias is not None` by it.

    Args:
        shape, dtype, device, requires_grad: of the whole parameter.
        name: of the parameter, in its module.
        count: number of processes that it is divided over.

    Raises:
        DividedParameterError: at a call that needs values.
    """

    _name: str
    _count: int
    _is_param = True  # isinstance(x, nn.Parameter)

    @staticmethod
    def __new__(
        cls,
        shape: Sequence[int],
        dtype: torch.dtype,
        device: torch.device,
        requires_grad: bool,
        name: str,
        count: int,
    ) -> DividedParameter:
        made: Any = torch.Tensor._make_wrapper_subclass(
            cls, shape, dtype=dtype, device=device, requires_grad=requires_grad
        )
        made._name, made._count = name, count
        return made  # type: ignore[no-any-return]

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        size = ", ".join(map(str, self.shape))
        return f"DividedParameter({self._name}: [{size}], {self.dtype}, divided over {self._count} processes)"

    def __deepcopy__(self, memo: dict[int, Any]) -> DividedParameter:
        return self

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        # Beside a lazy tensor, that one's `__torch_dispatch__` would be called.
        if any(
            type(x) is not cls for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)
        ):
            raise _error(func, args, kwargs)
        return super().__torch_function__(func, types, args, kwargs or {})  # type: ignore[no-untyped-call]

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        raise _error(func, args, kwargs)


def _error(func: Callable[..., Any], args: Any, kwargs: Any) -> DividedParameterError:
    used = next(x for x in tree_leaves((args, kwargs)) if isinstance(x, DividedParameter))
    return DividedParameterError(
        f"the parameter {used._name} is divided over {used._count} processes",
        got=f"a call of {getattr(func, '__name__', func)} outside of the forward of the module that was wrapped",
        next="call the wrapped module itself; its shards are in sharded_params, and "
        "consolidate_sharded_state_dicts makes whole parameters of what all processes saved",
    )
