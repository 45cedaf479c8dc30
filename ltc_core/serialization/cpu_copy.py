"""CPU copies of device tensors, for saving: `cpu_copy`, `CpuCopies`.

A copy keeps what a reader of the checkpoint sees: the values, requires_grad, and whether the
tensor is a parameter. The first copy syncs all that is pending; the later ones find it done.
`memory_key` identifies tensors of one memory: state_dict() has tied weights several times.
"""

import torch
from typing_extensions import TypeIs

from ltc_core.runtime.devices import fetch
from ltc_core.tensor.handles import Cell
from ltc_core.tensor.lazy_tensor import LazyTensor


def is_on_device(tensor: torch.Tensor) -> TypeIs[LazyTensor]:
    """Whether `tensor` lives on our device."""
    return isinstance(tensor, LazyTensor)


def cpu_copy(tensor: torch.Tensor) -> torch.Tensor:
    """CPU copy of a tensor of our device; any other tensor is returned as it is.

    Cost: the first call cuts the graph and waits for it; each call copies one tensor.
    """
    if not is_on_device(tensor):
        return tensor
    return _like(tensor, fetch(tensor._h, "Save"))


class CpuCopies:
    """`cpu_copy` for tensors that are kept: tensors of one memory share one copy.

    Args:
        of_cpu: copy CPU tensors, too, so that later writes do not show in the copies.
    """

    def __init__(self, of_cpu: bool = False) -> None:
        self._of_cpu = of_cpu
        # The original is kept as well: a key is the id of something it holds.
        self._copies: dict[object, tuple[torch.Tensor, torch.Tensor]] = {}

    def __call__(self, tensor: torch.Tensor) -> torch.Tensor:
        if not is_on_device(tensor) and not (self._of_cpu and _is_dense(tensor)):
            return tensor
        key = memory_key(tensor)
        if key not in self._copies:
            copied = fetch(tensor._h, "Save") if is_on_device(tensor) else tensor.detach().clone()
            self._copies[key] = tensor, copied
        return _like(tensor, self._copies[key][1].detach())


def _is_dense(tensor: torch.Tensor) -> bool:
    return type(tensor) in (torch.Tensor, torch.nn.Parameter) and tensor.layout == torch.strided


def _like(tensor: torch.Tensor, copied: torch.Tensor) -> torch.Tensor:
    if isinstance(tensor, torch.nn.Parameter):
        return torch.nn.Parameter(copied, requires_grad=tensor.requires_grad)
    return copied.requires_grad_(tensor.requires_grad)


def memory_key(tensor: torch.Tensor) -> object:
    """Key that two dense tensors share if they show the same memory in the same way.

    Valid as long as the tensor lives. A view of a part of a device tensor has a key of its own.
    """
    if isinstance(tensor, LazyTensor):
        whole = isinstance(tensor._h, Cell)
        return id(tensor._h) if whole else id(tensor)
    if tensor.numel() == 0:
        return id(tensor)
    view = tensor.shape, tensor.stride(), tensor.is_conj(), tensor.is_neg()
    return tensor.data_ptr(), tensor.dtype, *view
