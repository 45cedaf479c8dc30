"""What a prepared program starts is prepared, too: a fork of a twin of the program, made before the program began.

Python's multiprocessing and the runtime's zygote start interpreters that import PyTorch again: two to four seconds of a
core each. A program that `prepared.start` was told `starts_processes` of has a twin, a child that waits. Where
the program would execute an interpreter for a process of that kind, with the options that it has itself, the twin forks
one and the program adopts it. All else is executed. `prepared.py` makes the twin and runs what it forks.
"""

from __future__ import annotations

import _posixsubprocess
import ctypes
import fcntl
import json
import os
import re
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

__all__ = ["THREADS", "start_twin"]

# Begins of the code after `-c`. Others import no PyTorch, such as multiprocessing's resource tracker.
_KINDS = (
    "from multiprocessing.spawn import",
    "from multiprocessing.forkserver import",
    "from ltc_dist.processes import zygote",
)
_ZYGOTE = "ltc_dist.processes.zygote"  # it adopts as the program does here: one at a time
THREADS = "OMP_NUM_THREADS"  # read by a library when it is loaded, but a fork can set it, too
_PR_SET_PDEATHSIG = 1
_MESSAGE_BYTES = 1 << 17
_MOST_DESCRIPTORS = 128


def start_twin(read_at_start: tuple[str, ...]) -> dict[str, Any] | None:
    """Fork the twin of this process, and have it asked.

    Args:
        read_at_start: begins of the names of variables that a fork cannot change.

    Returns:
        None to this process. In what the twin forks, what to run, as a request to the fork server.
    """
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    parent = os.getpid()
    if os.fork() == 0:
        ours.close()
        return _serve(theirs, parent)
    theirs.close()
    _Asking(ours, read_at_start).begin()
    return None


# --- the program ----------------------------------------------------------------------------------------------------


class _Asking:
    """What takes the place of `_posixsubprocess.fork_exec`."""

    def __init__(self, twin: socket.socket, read_at_start: tuple[str, ...]) -> None:
        self._twin = twin
        self._read_at_start = read_at_start
        self._owner = os.getpid()
        self._options = subprocess._args_from_interpreter_flags()  # type: ignore[attr-defined]
        self._environ = dict(os.environ)
        self._execute: Any = _posixsubprocess.fork_exec

    def begin(self) -> None:
        setattr(_posixsubprocess, "fork_exec", self.fork_exec)  # noqa: B010
        setattr(subprocess, "_fork_exec", self.fork_exec)  # noqa: B010

    def fork_exec(self, *given: Any) -> int:
        args, _, _, descriptors, directory, variables, *streams = given[:12]
        own_session, group = given[15:17]
        command = [os.fsdecode(each) for each in args]
        if variables is None:
            environ = dict(os.environ)
        else:
            environ = dict(os.fsdecode(each).split("=", 1) for each in variables)
        if not self._is_known(command, environ):
            return int(self._execute(*given))
        kept = {0: streams[0], 1: streams[3], 2: streams[5]}
        sources = {number: number if source == -1 else source for number, source in kept.items()}
        # The last one a child holds as long as its parent has not executed it: here there is nothing to execute.
        sources |= {number: number for number in descriptors if number != given[13]}
        status = Path("/proc/thread-self/status").read_text()
        request = {
            "options": self._options,
            "arguments": command[1 + len(self._options) :],
            "directory": os.fspath(directory or os.getcwd()),
            "environ": environ,
            "has_own_session": own_session,
            "ignores_interrupts": False,
            "group": 0 if group == 0 else os.getpgrp(),
            "umask": int(re.findall(r"Umask:\s*(\d+)", status)[0], 8),
            "mask": [int(n) for n in signal.pthread_sigmask(signal.SIG_BLOCK, [])],
            "ignored": [
                int(n) for n in signal.valid_signals() if signal.getsignal(n) == signal.SIG_IGN
            ],
            "targets": list(sources),
        }
        message = json.dumps(request).encode()
        zygote = sys.modules[_ZYGOTE]
        with zygote._asking, zygote._adopting() as adopts:
            assert adopts and len(message) < _MESSAGE_BYTES
            socket.send_fds(self._twin, [message], list(sources.values()))
            return int(self._twin.recv(32))

    def _is_known(self, command: list[str], environ: dict[str, str]) -> bool:
        if os.getpid() != self._owner or _ZYGOTE not in sys.modules:
            return False
        begin = [sys.executable, *self._options, "-c"]
        if command[: len(begin)] != begin or not any(
            kind in command[len(begin)] for kind in _KINDS
        ):
            return False
        names = environ.keys() | self._environ.keys()
        differs = {n for n in names if environ.get(n) != self._environ.get(n)} - {THREADS}
        return not any(n.startswith(self._read_at_start) for n in differs)


# --- the twin -------------------------------------------------------------------------------------------------------


def _serve(requests: socket.socket, parent: int) -> dict[str, Any]:
    """Fork for each request; returns in the fork."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL))
    if os.getppid() != parent:
        os._exit(0)
    signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
    nowhere = os.open(os.devnull, os.O_RDWR)
    for stream in range(3):
        os.dup2(nowhere, stream)
    while True:
        message, descriptors, _, _ = socket.recv_fds(requests, _MESSAGE_BYTES, _MOST_DESCRIPTORS)
        if not message:
            os._exit(0)
        if (between := os.fork()) == 0:
            # The child of a process that has ended goes to the one that adopts orphans.
            if os.fork():
                os._exit(0)
            while os.getppid() != parent:
                os.sched_yield()
            requests.send(str(os.getpid()).encode())
            requests.detach()
            request: dict[str, Any] = json.loads(message)
            _take_over(request, descriptors)
            return request
        os.waitpid(between, 0)
        for descriptor in descriptors:
            os.close(descriptor)


def _take_over(request: dict[str, Any], descriptors: list[int]) -> None:
    """Have the descriptors and the process's attributes that an executed process would have."""
    targets = request["targets"]
    above = max(*targets, *descriptors, 63) + 1
    moved = [fcntl.fcntl(each, fcntl.F_DUPFD, above) for each in descriptors]
    os.closerange(0, above)
    for target, source in zip(targets, moved, strict=True):
        os.dup2(source, target)
        os.close(source)
    if not request["has_own_session"]:
        os.setpgid(0, request["group"])
    os.umask(request["umask"])
    for number in request["ignored"]:
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_SETMASK, request["mask"])
