"""A file in the trace-event format: one event a line, readable at every moment, whatever ends the process.

`TraceFile` writes the events of one process; `events_of` reads a file again, also one without its end. The array form
of the format needs no closing bracket in Perfetto and Chrome. A file is of one process: it is locked while it is
written, and only its owner may read it. Used by `slices` and `merge`.
"""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from ltc_core.errors import ProfilerError

__all__ = ["TraceFile", "encode", "events_of", "is_being_written", "is_whole", "path_of_rank"]

_END = "]\n"
encode = json.JSONEncoder(separators=(",", ":"), default=str, check_circular=False).encode


def path_of_rank(path: str, rank: int | None) -> str:
    """The file of one process: 'run.rank3.json' for rank 3 of a job, the path itself outside of a job."""
    if rank is None:
        return path
    root, suffix = os.path.splitext(path)
    return f"{root}.rank{rank}{suffix}"


class TraceFile:
    """An open file of events.

    Raises:
        ProfilerError: it cannot be written, or another process writes it.
    """

    def __init__(self, path: str) -> None:
        self.path = path
        try:
            flags = os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC
            self._descriptor = os.open(path, flags, 0o600)
        except OSError as error:
            raise _not_writable(path, error) from None
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            os.ftruncate(self._descriptor, 0)
            os.fchmod(self._descriptor, 0o600)
            self._write("[\n")
        except BlockingIOError:
            self.drop()
            raise AlreadyWritten(
                f"the timeline {path} is being written by another process",
                got="a file that is locked",
                next="name another file, or wait until that process has ended",
            ) from None
        except OSError as error:
            self.drop()
            raise _not_writable(path, error) from None

    def write(self, lines: Iterable[str]) -> None:
        """Append events, each a JSON object on a line of its own."""
        # Whoever puts the file into a page as it is must not run a name of an op or a file as a script.
        self._write("".join(f"{line},\n" for line in lines).replace("<", "\\u003c"))

    def close(self, last: str) -> None:
        """Append the last event and the end of the array."""
        self._write(f"{last}\n{_END}")
        self.drop()

    def drop(self) -> None:
        """Close the descriptor; the file stays as it is."""
        os.close(self._descriptor)

    def _write(self, text: str) -> None:
        data = memoryview(text.encode())
        while data:
            data = data[os.write(self._descriptor, data) :]


class AlreadyWritten(ProfilerError):
    """Another process writes this file."""


def _not_writable(path: str, error: OSError) -> ProfilerError:
    return ProfilerError(
        f"the timeline cannot be written to {path}",
        got=error.strerror or str(error),
        next="make its directory, or name a file that can be written",
    )


def is_being_written(path: str) -> bool:
    """Whether another process writes this file: the parent of a job, if it uses the device, too."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(descriptor)
    return False


def is_whole(path: Path) -> bool:
    """Whether the process that wrote a file has closed it."""
    try:
        with path.open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - len(_END)))
            return file.read() == _END.encode()
    except OSError:
        return False


def events_of(path: Path) -> Iterator[dict[str, Any]]:
    """The events of a file. A last line that a killed process has left half written is dropped."""
    with path.open(encoding="utf-8", errors="replace") as file:
        for line in file:
            text = line.strip().rstrip(",")
            if text.startswith("{"):
                try:
                    yield json.loads(text)
                except ValueError:
                    return
