"""PyTorch's agent starts its processes as forks of a zygote: `_Handler` is its handler of one process.

Used by `agent`.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import threading
from collections.abc import Iterator
from functools import partial
from typing import Any

from torch.distributed.elastic.multiprocessing import api
from torch.distributed.elastic.multiprocessing.subprocess_handler import SubprocessHandler

from ltc_dist.processes.zygote import Call, Zygote

from .early import SHIM

__all__ = ["handlers_of"]


@contextlib.contextmanager
def handlers_of(zygote: Zygote | None) -> Iterator[None]:
    """Have the processes that the agent starts in this block forked by `zygote`.

    The agent's context makes its handlers by a function of its module, and is made by another, so that is replaced.
    """
    module: Any = api
    before = module.get_subprocess_handler
    if zygote is not None:
        module.get_subprocess_handler = partial(_Handler, zygote)
    try:
        yield
    finally:
        module.get_subprocess_handler = before


class _Handler(SubprocessHandler):
    def __init__(self, zygote: Zygote, **options: Any) -> None:
        self._zygote = zygote
        super().__init__(**options)

    def _popen(self, args: Any, env: dict[str, str]) -> Any:
        words = list(args)
        call = Call(SHIM, "main", (words[words.index(SHIM) + 1 :],))
        files = {1: self._stdout, 2: self._stderr}
        streams = {number: file.fileno() for number, file in files.items() if file is not None}
        pid = self._zygote.fork(call, env, streams=streams, has_own_session=True)
        return super()._popen(args, env) if pid is None else _Forked(pid, words)


class _Forked:
    """What the agent uses of `subprocess.Popen`, for a child that a zygote has forked."""

    def __init__(self, pid: int, args: list[str]) -> None:
        self.pid = pid
        self.args = args
        self.returncode: int | None = None
        self._descriptor = os.pidfd_open(pid)
        self._polling = threading.Lock()

    def poll(self) -> int | None:
        with self._polling:
            if self.returncode is None:
                try:
                    pid, status = os.waitpid(self.pid, os.WNOHANG)
                except ChildProcessError:  # somebody else has waited for it
                    pid, status = self.pid, 0
                if pid:
                    self.returncode = os.waitstatus_to_exitcode(status)
                    os.close(self._descriptor)
            return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        if self.poll() is None:
            select.select([self._descriptor], [], [], timeout)
        code = self.poll()
        if code is None:
            assert timeout is not None
            raise subprocess.TimeoutExpired(self.args, timeout)
        return code

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)
