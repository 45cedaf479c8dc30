"""A process that `spawn` has started, and the file in which it reports how it failed."""

from __future__ import annotations

import contextlib
import multiprocessing as mp
import multiprocessing.reduction
import os
import pickle
import tempfile
import time
import traceback
from dataclasses import dataclass
from typing import Any

import cloudpickle

from ltc_dist.processes.failures import last_line, verdict_of

__all__ = ["ErrorReport", "ReportFile", "Started"]

_LARGEST_PAYLOAD = 64 << 20  # bytes; an exception that holds more is sent as its text


@dataclass(frozen=True)
class ErrorReport:
    """How a process failed: its verdict, when, what it raised (if that can be sent), and the same as text."""

    verdict: str
    is_exit: bool
    time_s: float
    payload: bytes | None
    line: str
    text: str

    @classmethod
    def of(cls, error: BaseException) -> ErrorReport:
        text, payload = traceback.format_exc(), None
        # An exception that cannot be pickled is sent as text.
        with contextlib.suppress(Exception):
            sent = cloudpickle.dumps(error)
            if len(sent) <= _LARGEST_PAYLOAD and isinstance(cloudpickle.loads(sent), BaseException):
                payload = sent
        is_exit = isinstance(error, SystemExit)
        return cls(verdict_of(error), is_exit, time.monotonic(), payload, last_line(error), text)


class ReportFile:
    """Unnamed file for the report of a process, of any size; writing it does not block on the parent."""

    def __init__(self) -> None:
        if hasattr(os, "memfd_create"):
            self._file: Any = os.fdopen(os.memfd_create("ltc-report"), "r+b", buffering=0)
        else:
            self._file = tempfile.TemporaryFile(buffering=0)

    def __getstate__(self) -> Any:
        return mp.reduction.DupFd(self._file.fileno())

    def __setstate__(self, state: Any) -> None:
        self._file = os.fdopen(state.detach(), "r+b", buffering=0)

    def mark_left(self) -> None:
        """Write that the function has returned; exit code 0 alone may come from `os._exit(0)`."""
        self._file.write(b"left")

    def has_left(self) -> bool:
        self._file.seek(0)
        return bool(self._file.read(4) == b"left")

    def write(self, report: ErrorReport) -> None:
        data = memoryview(pickle.dumps(report))
        self._file.seek(8)
        while data:
            data = data[self._file.write(data) :]
        self._file.seek(0)
        self._file.write(b"complete")

    def read(self) -> ErrorReport | None:
        """The report; None if the process has written none, or was killed while it wrote."""
        self._file.seek(0)
        data = self._file.read()
        if not data.startswith(b"complete"):
            return None
        report = pickle.loads(data[8:])
        assert isinstance(report, ErrorReport)
        return report

    @property
    def is_closed(self) -> bool:
        return bool(self._file.closed)

    def close(self) -> None:
        self._file.close()


class Started:
    """A process of a context, and the file for its report."""

    def __init__(self, rank: int, process: Any, file: ReportFile) -> None:
        self.rank = rank
        self.process = process
        self.file = file
        self._report: ErrorReport | None = None

    @property
    def pid(self) -> int:
        return int(self.process.pid)

    @property
    def exitcode(self) -> int | None:
        code: int | None = self.process.exitcode
        return code

    def report(self) -> ErrorReport | None:
        if self._report is None and not self.file.is_closed:
            self._report = self.file.read()
        return self._report

    def has_left(self) -> bool:
        return self.file.is_closed or self.file.has_left()  # closed by the first `join`

    def send(self, number: int) -> None:
        if self.exitcode is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)
