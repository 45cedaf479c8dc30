"""The temporary directory of a launcher. Those of launchers that were killed are removed by the next one.

TMPDIR may be shared by hosts, so the name of a directory says whose it is: host, boot of the host, process id, and when
the process began. Only a launcher of the same host judges. Used by `agent`.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import shutil
import socket
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil

__all__ = ["Owner", "directory"]

_PREFIX = "ltc-launch-"
_NAME = re.compile(_PREFIX + r"([0-9a-f]{8})-([0-9a-f]{8})-(\d+)-(\d+)-.+")
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_PID_SPACE = "/proc/self/ns/pid"
_NEAR_S = 2  # a host's clock may be set between two looks at when a process began


@dataclass(frozen=True)
class Owner:
    """Whose a directory is.

    Attributes:
        host: of its name.
        boot: of the boot of the host, and of the space of its process ids: containers of one host have their own.
        pid: process id. began_s: when the process began, in seconds since 1970.
    """

    host: str
    boot: str
    pid: int
    began_s: int

    @classmethod
    def here(cls) -> Owner:
        boot = _BOOT_ID.read_text() if _BOOT_ID.exists() else str(int(psutil.boot_time()))
        space = os.readlink(_PID_SPACE) if os.path.exists(_PID_SPACE) else ""
        pid = os.getpid()
        return cls(_digest(socket.gethostname()), _digest(boot + space), pid, _began_s(pid))

    @classmethod
    def of(cls, name: str) -> Owner | None:
        """The owner that the name of a directory says; None if it is none of ours."""
        found = _NAME.fullmatch(name)
        return found and cls(found[1], found[2], int(found[3]), int(found[4]))

    def prefix(self) -> str:
        return f"{_PREFIX}{self.host}-{self.boot}-{self.pid}-{self.began_s}-"

    def is_known_dead(self, here: Owner) -> bool:
        """Whether a process knows that this owner has ended. `here` is that process.

        Another boot of the same host name may be another container, which runs: nobody knows.
        """
        if (self.host, self.boot) != (here.host, here.boot):
            return False
        try:
            return abs(_began_s(self.pid) - self.began_s) > _NEAR_S
        except psutil.NoSuchProcess:
            return True
        except psutil.AccessDenied:
            return False


@contextlib.contextmanager
def directory() -> Iterator[str]:
    """A new directory for this launcher alone, on this host; removed at the end of the `with` block."""
    here = Owner.here()
    for path in Path(tempfile.gettempdir()).glob(f"{_PREFIX}*"):
        owner = Owner.of(path.name)
        if owner is not None and owner.is_known_dead(here):
            shutil.rmtree(path, ignore_errors=True)  # another user's stays
    found = tempfile.mkdtemp(prefix=here.prefix())
    try:
        yield found
    finally:
        shutil.rmtree(found, ignore_errors=True)


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:8]


def _began_s(pid: int) -> int:
    return int(psutil.Process(pid).create_time())
