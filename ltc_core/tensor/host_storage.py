"""A storage of the device in a file: what PyTorch is given, since lazy tensors have none.

It keeps bytes in host memory and says that it lives on the device. `ops.torch_load` makes one for each storage that is
loaded, and `special` uploads its bytes when a tensor is set on it. In files of PyTorch's older format the bytes come
after the tensors: they are uploaded once more when they are read. `lazy_tensor` makes one for each tensor that is saved
in that format.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

import torch

__all__ = ["HostStorage", "reduced"]


class HostStorage(torch.UntypedStorage):
    """Bytes in `host`. `whole` holds memory of the device with them, once they are uploaded, for each dtype."""

    host: torch.UntypedStorage
    whole: dict[torch.dtype, Any]
    _parts: list[HostStorage]
    _device: torch.device

    @classmethod
    def on(cls, device: torch.device, host: torch.UntypedStorage) -> HostStorage:
        # torch.load forgets storages without memory, and would make one for each tensor.
        made = cls(1)
        made.host, made.whole, made._parts, made._device = host, {}, [], device
        return made

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        return self._device

    def nbytes(self) -> int:
        return self.host.nbytes()

    def __getitem__(self, index: Any) -> Any:
        """A part, as torch.load makes for views of storages in its oldest files."""
        part = HostStorage.on(self._device, self.host[index])
        self._parts.append(part)
        return part

    def bytes_of(self, dtype: torch.dtype, size: Any, stride: Any) -> torch.Tensor:
        """A tensor of the CPU from the first byte on."""
        return torch.empty(0, dtype=dtype).set_(self.host, 0, size, stride)

    def _set_from_file(self, *args: Any) -> None:
        self.host._set_from_file(*args)  # type: ignore[no-untyped-call]
        self._fill()

    def _fill(self) -> None:
        """Upload the bytes to where they are on the device, once more."""
        for dtype, memory in self.whole.items():
            meta = memory._h.meta
            with torch.no_grad():
                memory.copy_(self.bytes_of(dtype, meta.size, meta.stride))
        for part in self._parts:
            part._fill()

    def _write_file(self, *args: Any) -> None:
        self.host._write_file(*args)  # type: ignore[no-untyped-call]


def reduced(data: torch.Tensor, device: torch.device, requires_grad: bool) -> Any:
    """How a CPU copy is pickled as a tensor of the device, for a pickler that writes storages apart."""
    storage = torch.storage.TypedStorage(  # type: ignore[no-untyped-call]
        wrap_storage=HostStorage.on(device, data.untyped_storage()),
        dtype=data.dtype,
        _internal=True,
    )
    place = data.storage_offset(), tuple(data.shape), data.stride()
    return torch._utils._rebuild_tensor_v2, (storage, *place, requires_grad, OrderedDict())
