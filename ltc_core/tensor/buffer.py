"""Buffers: the memory of values that outlive a cut.

A `Buffer` is pending until the job that makes it has run, then ready or failed. It counts its bytes for its
device, so that memory figures are exact and cost nothing on the hot path. Made by `runtime.device_context`, read when a
tensor is fetched.
"""

from __future__ import annotations

import threading
from collections import deque
from typing import Any, Protocol

from ltc_core.errors import to_raise

__all__ = ["Buffer", "MemoryCounter"]


class Waitable(Protocol):
    """What makes a buffer: something that can be waited for."""

    def wait(self) -> Any: ...


class MemoryCounter:
    """Bytes held on one device: by buffers now, and at most, with what programs needed while they ran.

    A change is put in a queue and counted by whoever has the lock: nobody waits for it. So a buffer may die anywhere,
    in a finalizer or a signal handler that runs while the same thread counts, too.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        # Bytes more, and bytes that a program holds beside the buffers; None: the peak starts again.
        self._changes: deque[tuple[int, int] | None] = deque()
        self._used_bytes = 0
        self._peak_bytes = 0

    def after_fork(self) -> None:
        """Make the lock anew: in a forked child its owner may be a thread that is gone."""
        self._lock = threading.Lock()

    @property
    def used_bytes(self) -> int:
        self._count()
        return self._used_bytes

    @property
    def peak_bytes(self) -> int:
        self._count()
        return self._peak_bytes

    def add(self, nbytes: int) -> None:
        self._changes.append((nbytes, 0))
        self._count()

    def free(self, nbytes: int) -> None:
        """Take note that a buffer has died; counted with the next change. Cost: 60 ns."""
        self._changes.append((-nbytes, 0))

    def note_peak(self, extra_bytes: int) -> None:
        """Count what a program holds beside the buffers."""
        self._changes.append((0, extra_bytes))
        self._count()

    def reset_peak(self) -> None:
        self._changes.append(None)
        self._count()

    def _count(self) -> None:
        """Count the changes, in order, unless somebody is at it, who then counts them all."""
        changes = self._changes
        while changes and self._lock.acquire(blocking=False):
            try:
                while changes:
                    change = changes.popleft()
                    if change is None:
                        self._peak_bytes = self._used_bytes
                        continue
                    self._used_bytes += change[0]
                    self._peak_bytes = max(self._peak_bytes, self._used_bytes + change[1])
            finally:
                self._lock.release()


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
            self._memory.free(self._nbytes)

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
