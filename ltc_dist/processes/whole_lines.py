"""Processes that share a pipe print whole lines into it, whatever their length.

Python writes a long line in parts, and the kernel lets other processes write between those parts. Here a line is
written when it ends, under a lock of the pipe. Set up by `child` in each process of a job.
"""

from __future__ import annotations

import contextlib
import fcntl
import io
import os
import stat
import sys
from collections.abc import Iterator
from typing import Any

__all__ = ["write_whole_lines"]


def write_whole_lines() -> None:
    """Print each line of stdout and stderr when it ends, and what has not ended when it is flushed."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if not isinstance(stream, io.TextIOWrapper):  # none, or something of the user's
            continue
        with contextlib.suppress(OSError, ValueError):  # closed, or of no file
            stream.flush()
            buffer: Any = _Lines(stream.fileno(), f"<{name}>")
            made = io.TextIOWrapper(buffer, stream.encoding, stream.errors, line_buffering=True)
            # The old one stays as it is: a handler of `logging` may have it.
            setattr(sys, name, made)


class _Lines(io.BufferedIOBase):
    """Writes to a file descriptor, which stays open when this is closed."""

    def __init__(self, descriptor: int, name: str) -> None:
        self.name = name
        self.mode = "wb"
        self._descriptor = descriptor
        self._held = bytearray()
        self._is_pipe = stat.S_ISFIFO(os.fstat(descriptor).st_mode)

    def writable(self) -> bool:
        return True

    def fileno(self) -> int:
        return self._descriptor

    def isatty(self) -> bool:
        return os.isatty(self._descriptor)

    def write(self, data: Any) -> int:
        added = bytes(data)
        end = len(self._held) + added.rfind(b"\n") + 1
        self._held += added
        if b"\n" in added:
            self._send(end)
        return len(added)

    def flush(self) -> None:
        self._send(len(self._held))

    def _send(self, count: int) -> None:
        data = bytes(self._held[:count])
        del self._held[:count]
        if not data:
            return
        with self._locked():
            written = 0
            while written < len(data):
                written += os.write(self._descriptor, data[written:] if written else data)

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        """Hold the pipe. Files need no lock, for they take each write whole; one on NFS may have none."""
        is_locked = False
        if self._is_pipe:
            with contextlib.suppress(OSError):
                fcntl.lockf(self._descriptor, fcntl.LOCK_EX)
                is_locked = True
        try:
            yield
        finally:
            if is_locked:
                fcntl.lockf(self._descriptor, fcntl.LOCK_UN)
