"""Parameters and buffers of the device whose shape a module does not know yet, as `nn.LazyLinear` has them.

PyTorch's own classes are tensors of no elements that allow few calls. Those of the device are subclasses of them that
hold a handle, so that `to`, `half` and `materialize` work; once they have a shape they become lazy tensors.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.nn import parameter
from torch.utils._pytree import tree_map_only

from ltc_core import errors, source
from ltc_core.device import build, register
from ltc_core.tensor.lazy_tensor import LazyTensor, wrap

__all__ = [
    "Uninitialized",
    "UninitializedBuffer",
    "UninitializedParameter",
    "check_possible",
    "teach_constructors",
]


class Uninitialized:
    """A tensor of the device without a shape: calls are made with what it holds, a lazy tensor of no elements."""

    _h: Any
    cls_to_become = LazyTensor  # PyTorch makes this its class once it has a shape
    plain: type[torch.Tensor]

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """As PyTorch's class, which results of `to` have on the CPU, and whose name its errors have."""
        plain: Any = cls.plain
        return plain.__torch_function__(func, (plain,), args, kwargs)

    @classmethod
    def __torch_dispatch__(
        cls, func: torch._ops.OpOverload, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if func is torch.ops.aten._has_compatible_shallow_copy_type.default:  # see `set_data`
            return LazyTensor.__torch_dispatch__(func, types, args, kwargs)
        args, kwargs = tree_map_only(Uninitialized, lambda t: wrap(t._h), (args, kwargs or {}))
        return func(*args, **kwargs)

    def __reduce_ex__(self, protocol: Any) -> Any:
        """As PyTorch's class, which is pickled without a device."""
        return self.plain, (self.requires_grad,)  # type: ignore[attr-defined]


class UninitializedParameter(Uninitialized, parameter.UninitializedParameter):  # type: ignore[misc]
    """`torch.nn.UninitializedParameter` on the device."""

    plain = parameter.UninitializedParameter


class UninitializedBuffer(Uninitialized, parameter.UninitializedBuffer):  # type: ignore[misc]
    """`torch.nn.UninitializedBuffer` on the device."""

    plain = parameter.UninitializedBuffer


def check_possible() -> None:
    """Raise an error if the device cannot have such tensors: their class is set by the C++ side."""
    if not register.is_native():
        raise errors.UnsupportedOpError(
            "a parameter without a shape cannot be on the device",
            got=build.extension.unavailable_reason,
            where=source.user_line(),
            next="run one batch through the module on the CPU and move it then, or install a C++ compiler (g++)",
        )


def teach_constructors() -> None:
    """Allow PyTorch's two classes on the device: theirs are made only as subclasses of an ordinary tensor."""
    for cls in (parameter.UninitializedParameter, parameter.UninitializedBuffer):
        cls.__new__ = staticmethod(_maker(cls, cls.__new__))  # type: ignore[method-assign]


def _maker(plain: type[torch.Tensor], make: Callable[..., Any]) -> Callable[..., Any]:
    default = plain is parameter.UninitializedParameter

    def new(
        cls: Any, requires_grad: bool = default, device: Any = None, dtype: Any = None, **more: Any
    ) -> Any:
        empty = torch.empty(0, device=device, dtype=dtype)
        if type(empty) is not LazyTensor:
            made_as = plain if issubclass(cls, Uninitialized) else cls
            return make(made_as, requires_grad, device, dtype, **more)
        check_possible()
        made = make(plain, requires_grad, "cpu", dtype, **more)
        made.data = empty
        return made

    return new
