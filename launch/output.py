"""What the processes of this host print, as whole lines with their rank before them.

A process prints into a pipe; with --log-dir into a file, whose growth is read. Nothing is kept elsewhere: a process
whose lines nobody takes waits, as it would in front of a terminal. `agent` makes one `Output` for each attempt.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import selectors
import struct
import sys
import termios
import threading
from typing import ClassVar, TextIO

__all__ = ["Output"]

_LOOK_S = 0.1  # between two looks at a file
_CHUNK_BYTES = 1 << 16


class _Stream:
    """Lines of one stream of one process, from bytes; a carriage return ends a line, too, as of a progress bar."""

    _was_told: ClassVar[bool] = False  # that lines are lost

    def __init__(self, prefix: str, goes_to: TextIO) -> None:
        self._prefix = prefix
        self._goes_to = goes_to
        self._parts: list[bytes] = []  # of the line that has not ended
        self._follows_return = False

    def take(self, data: bytes) -> None:
        """Print the lines that end in `data`."""
        if self._follows_return and data.startswith(b"\n"):
            data = data[1:]
            self._follows_return = False
        if not data:
            return
        self._follows_return = data.endswith(b"\r")
        data = data.replace(b"\r\n", b"\n").replace(b"\r", b"\n")
        ended, newline, rest = data.rpartition(b"\n")
        if newline:
            self._print(b"".join([*self._parts, ended]))
            self._parts.clear()
        if rest:
            self._parts.append(rest)

    def end(self) -> None:
        """Print the line that has not ended as if it had: another process's line must not follow in it."""
        if self._parts:
            self._print(b"".join(self._parts))
            self._parts.clear()

    def _print(self, lines: bytes) -> None:
        text = lines.decode(errors="replace")
        text = "".join(f"{self._prefix}{line}\n" for line in text.split("\n"))
        # If nobody reads any more, the processes must not wait: what they print is dropped.
        try:
            try:
                self._goes_to.write(text)
            except UnicodeEncodeError:
                encoding = self._goes_to.encoding
                self._goes_to.write(text.encode(encoding, "backslashreplace").decode(encoding))
            self._goes_to.flush()
        except OSError as error:
            self._tell_dropped(error)

    def _tell_dropped(self, error: OSError) -> None:
        if self._was_told or isinstance(error, BrokenPipeError):
            return
        type(self)._was_told = True
        with contextlib.suppress(OSError):  # stderr may be what cannot be written
            print(
                f"ltc-launch: lines of the processes are lost: {error.strerror}. "
                "Next: make room where the output goes, or name another file",
                file=sys.stderr,
                flush=True,
            )


class Output:
    """Reads the streams in one thread and prints them.

    A line of one process and one of another never mix, because one thread prints all of them.
    """

    def __init__(self) -> None:
        self._selector = selectors.DefaultSelector()
        self._files: list[tuple[int, _Stream]] = []
        self._write_ends: list[int] = []
        self._wake_read, self._wake_write = os.pipe()
        self._selector.register(self._wake_read, selectors.EVENT_READ)
        self._thread = threading.Thread(target=self._run, name="ltc-output", daemon=True)
        self._is_stopped = False

    def pipe(self, prefix: str, goes_to: TextIO) -> str:
        """Path that a process of this host prints to; `start` closes it for this process."""
        read, write = os.pipe()
        self._write_ends.append(write)
        self._selector.register(read, selectors.EVENT_READ, _Stream(prefix, goes_to))
        return f"/proc/{os.getpid()}/fd/{write}"

    def file(self, path: str, prefix: str, goes_to: TextIO) -> None:
        """Print what a process writes to a file from now on."""
        made = os.open(path, os.O_RDONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
        self._files.append((made, _Stream(prefix, goes_to)))

    def start(self) -> None:
        """Begin to print. The processes have opened their ends of the pipes."""
        self._close_write_ends()
        self._thread.start()

    def stop(self) -> None:
        """Print what there is, and end. What a process that still runs prints later is lost."""
        if self._is_stopped:
            return
        self._is_stopped = True
        os.write(self._wake_write, b"x")
        if self._thread.ident is not None:
            self._thread.join()
        self._close_write_ends()
        for descriptor in [
            *(key.fd for key in self._selector.get_map().values()),
            *(descriptor for descriptor, _ in self._files),
            self._wake_write,
        ]:
            os.close(descriptor)
        self._selector.close()

    def _close_write_ends(self) -> None:
        while self._write_ends:
            os.close(self._write_ends.pop())

    def _run(self) -> None:
        is_over = False
        while not is_over:
            timeout = _LOOK_S if self._files else None
            for key, _ in self._selector.select(timeout):
                if key.data is None:
                    is_over = True
                elif not self._read(key.fd, key.data, _CHUNK_BYTES):  # all who wrote have ended
                    key.data.end()
                    self._selector.unregister(key.fd)
                    os.close(key.fd)
            for descriptor, stream in self._files:
                while self._read(descriptor, stream, _CHUNK_BYTES):
                    pass
        for key in list(self._selector.get_map().values()):
            if key.data is not None:
                self._drain(key.fd, key.data)
        for _, stream in self._files:
            stream.end()

    def _drain(self, descriptor: int, stream: _Stream) -> None:
        """Read what is in a pipe now: a process that runs on may print for ever."""
        left = struct.unpack("i", fcntl.ioctl(descriptor, termios.FIONREAD, b"\0" * 4))[0]
        while left > 0:
            left -= self._read(descriptor, stream, left)
        stream.end()

    def _read(self, descriptor: int, stream: _Stream, limit: int) -> int:
        data = os.read(descriptor, limit)
        stream.take(data)
        return len(data)
