"""`t.data = data` between the device and the CPU: `t` becomes a tensor of the other kind and stays the same object.

PyTorch copies the metadata of `data` into `t`, so all references to `t` see the change: modules, optimizers, graphs,
hooks, weak references. `nn.Module.to` works that way. PyTorch does not copy the class of `data`, nor whether calls are
dispatched to it. Both are set here, when PyTorch asks whether the two are compatible, just before it copies.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import parameter

from ltc_core.device import register
from ltc_core.ops.uninitialized import Uninitialized, UninitializedBuffer, UninitializedParameter
from ltc_core.tensor.lazy_tensor import LazyTensor, is_called_from

__all__ = ["set_data"]

_KINDS = (LazyTensor, Uninitialized)
_NO_DISPATCH = torch.Tensor.__torch_dispatch__
_QUESTION = "compute_should_use_set_data"  # of `nn.Module._apply`, which has not decided yet


def set_data(t: torch.Tensor, data: torch.Tensor) -> bool:
    """Whether `t.data = data` is possible; if so, `t` gets the class and the handle that `data` has."""
    if type(t) is LazyTensor and type(data) is LazyTensor:
        return True  # the attribute `data` of a lazy tensor sets its handle
    is_from, is_to = isinstance(t, _KINDS), isinstance(data, _KINDS)
    if not is_to or not is_from:
        plain = t if is_to else data
        if not _is_plain(plain) or (is_from and plain.device.type == "meta"):
            return False
        if not register.is_native():
            return is_from
    if is_called_from(_QUESTION, 6):
        return True
    if t.requires_grad and not (data.is_floating_point() or data.is_complex()):
        return True  # PyTorch asks that next, and refuses it
    if is_to and not is_from:
        _become_lazy(t)
    elif not is_to:
        _become_plain(t)
    if is_to:
        t._h = data._h  # type: ignore[attr-defined]
    return True


def _is_plain(t: torch.Tensor) -> bool:
    """Whether a tensor of another device is strided, and of no foreign subclass."""
    is_dense = t.layout is torch.strided and not t.is_quantized and not t.is_nested
    return is_dense and type(t).__torch_dispatch__ is _NO_DISPATCH


def _become_lazy(t: Any) -> None:
    if type(t) not in (torch.Tensor, torch.nn.Parameter) and not parameter.is_lazy(t):
        t._class_elsewhere = type(t)
    if isinstance(t, torch.nn.Parameter):
        t._is_param = True
    if isinstance(t, parameter.UninitializedParameter):
        t.__class__ = UninitializedParameter
    elif isinstance(t, parameter.UninitializedBuffer):
        t.__class__ = UninitializedBuffer
    else:
        t.__class__ = LazyTensor
    register.set_python_dispatch(t, True)


def _become_plain(t: Any) -> None:
    is_parameter = t.__dict__.pop("_is_param", False)
    del t._h
    plain = torch.nn.Parameter if is_parameter else torch.Tensor
    plain = t.__dict__.pop("_class_elsewhere", plain)
    t.__class__ = t.plain if isinstance(t, Uninitialized) else plain
    register.set_python_dispatch(t, False)
