"""`torch.load(path, map_location=device)`: storages of a file become memory of the device.

PyTorch is given a `HostStorage` with the bytes of the file. When `torch.load` sets a tensor on it, `special` uploads
them, once for all tensors that share the storage: they alias each other here as they did when they were saved.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ltc_core.runtime.devices import checked
from ltc_core.settings import settings
from ltc_core.tensor.host_storage import HostStorage

__all__ = ["register_loading"]

_PRIORITY = 19  # before PyTorch's own entry for such devices, which needs device memory in C++


def _tag(storage: Any) -> str | None:
    """The location of a storage that is saved; None for those of other devices."""
    return str(storage.device) if isinstance(storage, HostStorage) else None


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
