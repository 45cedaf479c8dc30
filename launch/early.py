"""The launcher's zygote: a fork of itself, made when it has imported PyTorch and nothing of this runtime yet.

The variables of the processes decide how the runtime is set up at its import: the name of its device, for one. The
launcher knows them only after an import of its own, so the fork waits for them. Used by `cli` and `agent`, which is why
it imports neither PyTorch nor the runtime. See `ltc_dist.processes.zygote`.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import signal
import socket
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

from .spec import Spec, num_cores

__all__ = ["SHIM", "Early", "as_in_the_processes", "fork", "variables"]

SHIM = "ltc_launch.shim"  # each process begins there
_ZYGOTE = "ltc_dist.processes.zygote"


@dataclass(frozen=True)
class Early:
    """The fork as the launcher sees it: the connection to it, and its process id."""

    connection: Connection[Any, Any]
    pid: int

    def begin(self, environ: Mapping[str, str]) -> None:
        """Let it import the runtime, with these variables, and become a zygote."""
        with contextlib.suppress(OSError):  # it was killed, as `Zygote` finds out
            self.connection.send(dict(environ))


def fork() -> Early | Callable[[], None]:
    """Fork the launcher.

    Returns:
        To the launcher, the fork. To each process of the job, what it has to call.
    """
    ours, theirs = socket.socketpair()
    pid = os.fork()
    if pid:
        theirs.close()
        return Early(Connection(ours.detach()), pid)
    ours.close()
    os.setpgid(0, 0)
    signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
    for number in (signal.SIGUSR1, signal.SIGUSR2):  # the launcher's handlers
        signal.signal(number, signal.SIG_DFL)
    connection: Connection[Any, Any] = Connection(theirs.detach())
    try:
        environ = connection.recv()
    except (EOFError, OSError):
        os._exit(0)
    os.environ.clear()
    os.environ.update(environ)
    try:
        zygote = importlib.import_module(_ZYGOTE)
    except Exception:  # each process meets it, and reports it
        os._exit(1)
    call: Callable[[], None] = zygote.serve(connection, SHIM)
    return call


def variables(spec: Spec) -> dict[str, str]:
    """The variables of the processes that are read while PyTorch is imported."""
    found = dict(spec.env)
    if "OMP_NUM_THREADS" not in os.environ:
        found.setdefault("OMP_NUM_THREADS", str(max(1, num_cores() // spec.nprocs)))
    return found


@contextlib.contextmanager
def as_in_the_processes(spec: Spec) -> Iterator[None]:
    """Have these variables in this process, too, while it imports PyTorch."""
    new = variables(spec)
    before = {name: os.environ.get(name) for name in new}
    os.environ.update(new)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
