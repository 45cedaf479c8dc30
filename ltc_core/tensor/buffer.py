"""Buffers: the memory of values that outlive a cut.

A `Buffer` is pending until the job that makes it has run, then ready or failed. The `MemoryCounter` of a device counts
the bytes of its buffers, so that memory figures are exact and cost nothing on the hot path. Made by
`runtime.device_context`, read when a tensor is fetched.

The classes here say what the types are. Where there is a C++ compiler, `csrc/ltc_objects.cpp` takes their place, with
the same attributes.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Protocol

from ltc_core.errors import to_raise
from ltc_core.tensor.native_objects import native

__all__ = ["Buffer", "MemoryCounter", "fill_pending", "pending_outputs"]


class Waitable(Protocol):
    """The job that makes a buffer; it can be waited for."""

    def wait(self) -> Any: ...


class Owner(Protocol):
    """What has a buffer: a value (`tensor.handles`)."""

    buffer: Any


class MemoryCounter:
    """Bytes of the live buffers of one device, and the peak; the peak includes the temporary memory of programs.

    A change is queued, and the thread that has the lock counts it; no thread waits for the lock. So a buffer may be
    released anywhere, even in a finalizer or a signal handler that interrupts the count in the same thread.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        # (bytes added, bytes of a program beside the buffers), or None: reset the peak.
        self._changes: deque[tuple[int, int] | None] = deque()
        self._used_bytes = 0
        self._peak_bytes = 0

    def after_fork(self) -> None:
        """Replace the lock in a forked child: its owner may be a thread that does not exist there."""
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
        """Queue the release of a buffer; it is counted with the next change. Cost: 60 ns."""
        self._changes.append((-nbytes, 0))

    def note_peak(self, extra_bytes: int) -> None:
        """Count the memory that a program uses beside the buffers."""
        self._changes.append((0, extra_bytes))
        self._count()

    def reset_peak(self) -> None:
        self._changes.append(None)
        self._count()

    def _count(self) -> None:
        """Count the changes in order; if another thread has the lock, that thread counts them."""
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
    """The device memory of one value. `take()` returns the data, or raises the error of the op that failed.

    Attributes:
        is_given: whether the data came from the host, as an upload does, and not from a program.
    """

    __slots__ = (
        "__weakref__", "_job", "_memory", "_nbytes", "_pending", "data", "error", "is_given",
    )  # fmt: skip

    def __init__(self, memory: MemoryCounter, nbytes: int, pending: bool = True) -> None:
        """Make a buffer; the caller counts its bytes."""
        self._memory = memory
        self._nbytes = nbytes
        self._job: Waitable | None = None
        self._pending = pending
        self.is_given = False
        # `data` is None while the buffer is pending or failed; `error` is what the op raised that failed.
        self.data: Any = None
        self.error: BaseException | None = None

    @classmethod
    def ready(cls, memory: MemoryCounter, data: Any, nbytes: int) -> Buffer:
        buffer = cls(memory, nbytes, pending=False)
        buffer.data = data
        buffer.is_given = True
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

    def mark_donated(self) -> int:
        """Stop counting this memory, because another buffer reuses it. Returns the bytes."""
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

    @property
    def job(self) -> Waitable | None:
        """The job that makes the buffer, while it is pending."""
        return self._job

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
        """Data of a buffer that is not pending; raises if it failed."""
        self.check()
        return self.data

    def check(self) -> None:
        """Raise the error of the op that should have made this value, if it failed."""
        if self.error is not None:
            raise to_raise(self.error)


def pending_outputs(
    memory: MemoryCounter,
    values: Sequence[tuple[int, Owner]],
    outputs: tuple[tuple[int, int], ...],
    inputs: list[Buffer],
) -> list[Buffer]:
    """Give each value a buffer that a program is to fill. Cost: 0.1 us each.

    Args:
        memory: counts the bytes.
        values: (number, value) of each.
        outputs: bytes of each, and the position of the input whose memory it takes (-1: of none).
        inputs: of the program.
    """
    made = []
    more_bytes = 0
    for (_, value), (nbytes, taken) in zip(values, outputs, strict=True):
        buffer = value.buffer = Buffer(memory, nbytes)
        more_bytes += nbytes if taken < 0 else nbytes - inputs[taken].mark_donated()
        made.append(buffer)
    memory.add(more_bytes)
    return made


def fill_pending(buffers: list[Buffer], results: Sequence[Any]) -> None:
    """Fill those of the buffers that are pending with the results of a program."""
    for buffer, result in zip(buffers, results, strict=True):
        if buffer.is_pending:
            buffer.set(result)


if not TYPE_CHECKING and native is not None:
    Buffer, MemoryCounter = native.Buffer, native.MemoryCounter
    pending_outputs, fill_pending = native.pending_outputs, native.fill_pending
    native.raise_by(to_raise)
