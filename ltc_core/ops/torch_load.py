"""`torch.load(path, map_location=device)`: storages of a file become memory of the device.

Lazy tensors have no storage, so PyTorch is given one that keeps the file's bytes in host memory and says that it
lives on the device. When `torch.load` sets a tensor on it, `special` uploads the bytes, once for all tensors that
share the storage: they alias each other here as they did when they were saved.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ltc_core.runtime.devices import checked
from ltc_core.settings import settings
from ltc_core.tensor.lazy_tensor import LazyTensor

__all__ = ["HostStorage", "register_loading"]

_PRIORITY = 19  # before PyTorch's own entry for such devices, which needs device memory in C++


class HostStorage(torch.UntypedStorage):
    """A storage of the device whose bytes are still in `host`. `whole` holds its memory once it is uploaded."""

    host: torch.UntypedStorage
    whole: dict[torch.dtype, LazyTensor]
    _device: torch.device

    @classmethod
    def on(cls, device: torch.device, host: torch.UntypedStorage) -> HostStorage:
        made = cls(
            1
        )  # torch.load forgets storages without memory, and would make one for each tensor
        made.host, made.whole, made._device = host, {}, device
        return made

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        return self._device


def _tag(storage: Any) -> None:
    """Leave storages that are saved to PyTorch's own rules."""


def _deserialize(storage: Any, location: str) -> Any:
    name = settings.device_name
    if location != name and not location.startswith(f"{name}:"):
        return None
    return HostStorage.on(torch.device(name, checked(torch.device(location).index or 0)), storage)


_location_of: Callable[[Any], Any] = torch._utils._get_restore_location


def _location_for(device: Any) -> Any:
    """Where a tensor goes that `torch.save` wrote as a CPU copy with the name of its device.

    PyTorch refuses a function as `map_location` there. Here it is given an empty storage, as it is given storages.
    """
    map_location: Any = torch.serialization._serialization_tls.map_location
    if map_location is None or isinstance(map_location, dict | str | torch.device):
        return _location_of(device)
    found = map_location(torch.empty(0).untyped_storage(), str(device))
    return device if found is None else found.device


def register_loading() -> None:
    """Register the device with `torch.load`; called once."""
    torch.serialization.register_package(_PRIORITY, _tag, _deserialize)
    torch._utils._get_restore_location = _location_for
