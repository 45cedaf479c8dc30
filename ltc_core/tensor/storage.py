"""`LazyStorage`: the storage that a lazy tensor shows; freed and had again by FSDP. Made by `lazy_tensor`."""

from __future__ import annotations

import torch

from ltc_core import errors, source
from ltc_core.tensor.buffer import Buffer
from ltc_core.tensor.handles import Cell, Value

__all__ = ["LazyStorage", "identifier"]


def identifier(memory: Cell) -> int:
    """What stands for the address of memory; ranges of two memories below 64 GiB do not overlap."""
    return id(memory) << 32  # two objects are at least 16 bytes apart


class LazyStorage:
    """The storage that a lazy tensor shows: it says which tensors share memory, and how large the memory is."""

    def __init__(self, device: torch.device, memory: Cell) -> None:
        self.device = device
        self._base = memory

    @property
    def _cdata(self) -> int:
        return id(self._base)

    def data_ptr(self) -> int:
        return identifier(self._base)

    def nbytes(self) -> int:
        return self._base.meta.nbytes

    def size(self) -> int:
        """Bytes of the memory; 0 after `resize_(0)`, until it is written or resized."""
        return 0 if self._is_freed() else self.nbytes()

    def _is_freed(self) -> bool:
        buffer = self._base.value.buffer
        return buffer is not None and isinstance(buffer.error, _FreedError)

    def resize_(self, nbytes: int) -> LazyStorage:
        """Free the memory (0 bytes), or have it again, to be written, with all its bytes. FSDP shards by this.

        Raises:
            DeviceError: any other number of bytes.
        """
        memory = self._base
        if nbytes not in (0, memory.meta.nbytes):
            raise errors.DeviceError(
                "memory of the device is freed as a whole, and comes back in its own size",
                got=f"resize_({nbytes}) of {memory.meta.nbytes} bytes",
                where=source.user_line(),
                next="make a new tensor of the size",
            )
        with memory.trace.lock:
            if nbytes == 0:
                freed = Buffer.failed(memory.trace.memory, _FreedError(source.user_line()))
                memory.rebind(Value.of(freed))
            elif self._is_freed():
                memory.rebind(Value(-1, -1))
        return self


class _FreedError(errors.DeviceError):
    """Memory is read that `resize_(0)` has freed."""

    def __init__(self, where: str) -> None:
        super().__init__(
            "a tensor is read whose memory was freed",
            got="resize_(0) of its storage",
            where=where,
            next="write it first; under FSDP read parameters in forward or after unshard()",
        )
