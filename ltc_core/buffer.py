"""Buffers: the memory of values that outlive a cut.

A `Buffer` is pending until the job that makes it has run, then ready or failed. It counts its bytes for its
device, so that memory figures are exact and cost nothing on the hot path. Made by `runtime`, read by whoever
fetches a tensor.
"""

from __future__ import annotations

import threading
from typing import Any, Protocol

from ltc_core.errors import to_raise

__all__ = ["Buffer", "MemoryCounter"]


class Waitable(Protocol):
    """What makes a buffer: something that can be waited for."""

    def wait(self) -> Any: ...


class MemoryCounter:
    """Bytes held on one device: by buffers now, and at most, with what programs needed while they ran."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.used_bytes = 0
        self.peak_bytes = 0

    def after_fork(self) -> None:
        """Make the lock anew: in a forked child its owner may be a thread that is gone."""
        self._lock = threading.Lock()

    def add(self, nbytes: int) -> None:
        with self._lock:
            self.used_bytes += nbytes
            if self.used_bytes > self.peak_bytes:
                self.peak_bytes = self.used_bytes

    def note_peak(self, extra_bytes: int) -> None:
        """Count what a program holds beside the buffers."""
        with self._lock:
            self.peak_bytes = max(self.peak_bytes, self.used_bytes + extra_bytes)

    def reset_peak(self) -> None:
        with self._lock:
            self.peak_bytes = self.used_bytes


class Buffer:
    """The device memory of one value. `take()` gives what is there, or raises what went wrong."""

    __slots__ = ("__weakref__", "_job", "_memory", "_nbytes", "_pending", "data", "error")

    def __init__(self, memory: MemoryCounter, nbytes: int, pending: bool = True) -> None:
        """Make a buffer whose bytes the caller has counted."""
        self._memory = memory
        self._nbytes = nbytes
        self._job: Waitable | None = None
        self._pending = pending
        # What it holds, None while pending or lost; what made the op fail whose result it would be.
        self.data: Any = None
        self.error: BaseException | None = None

    @classmethod
    def ready(cls, memory: MemoryCounter, data: Any, nbytes: int) -> Buffer:
        buffer = cls(memory, nbytes, pending=False)
        buffer.data = data
        memory.add(nbytes)
        return buffer

    @classmethod
    def failed(cls, memory: MemoryCounter, error: BaseException) -> Buffer:
        buffer = cls(memory, 0, pending=False)
        buffer.error = error
        return buffer

    def __del__(self) -> None:
        if self._nbytes:
            self._memory.add(-self._nbytes)

    def hand_over_bytes(self) -> int:
        """Count no more: another buffer takes this memory over. Gives the bytes."""
        nbytes, self._nbytes = self._nbytes, 0
        return nbytes

    def made_by(self, job: Waitable) -> None:
        if self._pending:
            self._job = job

    @property
    def nbytes(self) -> int:
        return self._nbytes

    @property
    def is_pending(self) -> bool:
        return self._pending

    def wait_done(self) -> None:
        """Block until the job that makes the buffer is done."""
        job = self._job
        if job is not None:
            job.wait()

    def set(self, data: Any) -> None:
        self.data = data
        self._pending = False
        self._job = None

    def fail(self, error: BaseException) -> None:
        self.error = error
        self._pending = False
        self._job = None

    def take(self) -> Any:
        """Give the data of a buffer that is not pending."""
        self.check()
        return self.data

    def check(self) -> None:
        """Raise what made the op fail whose result this would be."""
        if self.error is not None:
            raise to_raise(self.error)
