"""The processes of a job are forks of one that has imported PyTorch, the zygote: they start in a tenth of the time.

`import torch`, and what PyTorch imports at the first step, take seconds of a core in each process. The zygote has one
thread and computes nothing. It forks on request; the fork becomes a child of the process that asked, and has the
variables, descriptors and signal mask that the request names. PyTorch's and numpy's global generators, which forks
would share, are seeded afresh as in a new process.

Where a fork is not safe there is none, and the process starts from nothing: see `can_fork` and `serve`. A zygote ends
with the process that has made it. A process keeps one for all its calls of `spawn` (`kept_zygote.py`); the launcher
makes its own (`launch/early.py`).
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import importlib
import io
import multiprocessing as mp
import multiprocessing.spawn
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import entry_points
from multiprocessing import util
from multiprocessing.connection import Connection
from types import MappingProxyType
from typing import Any

import torch

from ltc_core.settings import settings
from ltc_dist.processes.sending import import_path

__all__ = ["Call", "Zygote", "can_fork", "inherited", "serve"]

# What each process would import in its first step: for the first op of a tensor of ours, and the first optimizer.
_OF_A_STEP = ("torch.distributed.tensor", "torch._dynamo")
_WATCHERS = {"coverage", "pydevd"}
_MOST_DESCRIPTORS = 128  # of one message; the kernel takes 253
_OWN_BACKEND = "ltc"
# A scheduler or a terminal sends them to all processes of a job.
_IGNORED = (
    signal.SIGHUP,
    signal.SIGINT,
    signal.SIGQUIT,
    signal.SIGTERM,
    signal.SIGUSR1,
    signal.SIGUSR2,
)
_PR_SET_CHILD_SUBREAPER, _PR_GET_CHILD_SUBREAPER = 36, 37
# sys.path is set before anything is imported: a file in the working directory may have the name of a module. Then the
# kernel is told to end this process with its parent, since the end of the connection is seen after the imports only.
_PROGRAM = """
import sys
sys.path[:] = sys.argv[5:]
import ctypes, os
ctypes.CDLL(None).prctl(1, int(sys.argv[4]))
if os.getppid() == int(sys.argv[3]):
    from ltc_dist.processes import zygote
    zygote.main()
"""

inherited: list[int] = []  # descriptors that this process was sent, if it is a fork
_asking = threading.Lock()  # whether this process adopts orphans is a property of the process


def can_fork() -> bool:
    """Whether processes of a job may be forks.

    Not so with LTC_ZYGOTE=0, on other systems than Linux, on torch_xla, and where importing PyTorch loads the backend
    of another vendor, which may start threads.
    """
    return (
        settings.peek("zygote")
        and sys.platform == "linux"
        and settings.peek("device") not in ("tpu", "xla")
        and all(entry.name == _OWN_BACKEND for entry in entry_points(group="torch.backends"))
    )


@dataclass(frozen=True)
class Call:
    """What a forked process does: it calls a function, by name, and ends when that returns."""

    module: str
    function: str
    arguments: tuple[Any, ...]

    def __call__(self) -> None:
        getattr(importlib.import_module(self.module), self.function)(*self.arguments)


@dataclass(frozen=True)
class _Request:
    """One process to be forked; its descriptors are sent after this.

    Attributes:
        environ: all variables of the new process.
        streams: numbers of the first descriptors in the new process.
        num_descriptors: these and the others.
        signal_mask: of the thread that asks.
    """

    call: Call
    environ: dict[str, str]
    streams: tuple[int, ...]
    num_descriptors: int
    signal_mask: frozenset[int]
    has_own_session: bool


# -- the process that asks -------------------------------------------------------------------------


class Zygote:
    """A zygote as the process sees it that has made it.

    Args:
        connection: to it.
        pid: of it, a child of this process.
    """

    def __init__(self, connection: Connection[Any, Any], pid: int) -> None:
        self._connection = connection
        self.pid = pid
        self._is_ready: bool | None = None
        self._is_closed = False

    @classmethod
    def start(cls, environ: Mapping[str, str], module: str) -> Zygote:
        """Start one with these variables, which has imported `module`; does not wait for it.

        It has no streams of this process: who reads them from a pipe waits for the end of this process alone.
        """
        # The kernel's death signal follows the thread that starts a process.
        in_main_thread = threading.current_thread() is threading.main_thread()
        death_signal = int(signal.SIGKILL) if in_main_thread else 0
        ours, theirs = socket.socketpair()
        with theirs:
            process = subprocess.Popen(
                [
                    *(mp.spawn.get_executable(), *util._args_from_interpreter_flags()),  # type: ignore[attr-defined]
                    *("-c", _PROGRAM, str(theirs.fileno()), module),
                    *(str(os.getpid()), str(death_signal), *import_path()),
                ],
                env=environ,
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                process_group=0,
            )
        process.returncode = 0  # `close` waits for it
        return cls(Connection(ours.detach()), process.pid)

    def has_ended(self) -> bool:
        """Whether it was closed or has ended by itself."""
        try:
            ended = os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        except ChildProcessError:  # somebody else has waited for it
            return True
        return self._is_closed or ended is not None

    def is_ready(self) -> bool:
        """Wait until it has imported all; return whether it can fork."""
        if self._is_ready is None:
            with contextlib.suppress(EOFError, OSError):
                self._is_ready = self._connection.recv()
        return bool(self._is_ready)

    def fork(
        self,
        call: Call,
        environ: Mapping[str, str],
        descriptors: Sequence[int] = (),
        streams: Mapping[int, int] = MappingProxyType({}),
        has_own_session: bool = False,
    ) -> int | None:
        """Fork a process; return its id, a child of this process, or None if it has to be started from nothing.

        Args:
            environ: all variables of the new process.
            descriptors: of this process, which the new one finds in `inherited`, in their order.
            streams: stdin, stdout and stderr (0, 1, 2) -> descriptor of this process; the others are the zygote's.

        Raises:
            OSError: there can be no more processes.
        """
        if not self.is_ready():
            return None
        sent = [*streams.values(), *descriptors]
        mask = frozenset(map(int, signal.pthread_sigmask(signal.SIG_BLOCK, [])))
        request = _Request(call, dict(environ), tuple(streams), len(sent), mask, has_own_session)
        with _asking, _adopting() as adopts:
            if not adopts:
                return None
            try:
                self._connection.send(request)
                _send_descriptors(self._connection, sent)
                answer = self._connection.recv()
            except (EOFError, ConnectionError):  # it was killed
                self.close()
                return None
            except BaseException:
                self.close()  # after Ctrl-C the answer would be taken for that to the next request
                raise
        if isinstance(answer, OSError):
            raise answer
        return answer  # type: ignore[no-any-return]

    def close(self) -> None:
        """End it and wait for its end, also while it imports. Processes that it has forked run on.

        In a fork of the process that has made it, whose child it is not, close the connection alone.
        """
        if self._is_closed:
            return
        self._is_closed, self._is_ready = True, False
        self._connection.close()
        with contextlib.suppress(ChildProcessError):  # somebody else has waited for it
            if os.waitpid(self.pid, os.WNOHANG) == (0, 0):
                os.kill(self.pid, signal.SIGKILL)
                os.waitpid(self.pid, 0)


@contextlib.contextmanager
def _adopting() -> Iterator[bool]:
    """Make this process the parent of processes whose parent ends; yields whether it is."""
    library = ctypes.CDLL(None, use_errno=True)
    before = ctypes.c_int()
    library.prctl(_PR_GET_CHILD_SUBREAPER, ctypes.byref(before), 0, 0, 0)
    is_set = library.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) == 0
    try:
        yield is_set
    finally:
        library.prctl(_PR_SET_CHILD_SUBREAPER, before.value, 0, 0, 0)


def _send_descriptors(connection: Connection[Any, Any], descriptors: Sequence[int]) -> None:
    with socket.socket(fileno=os.dup(connection.fileno())) as sent_by:
        for begin in range(0, len(descriptors), _MOST_DESCRIPTORS):
            socket.send_fds(sent_by, [b"\0"], descriptors[begin : begin + _MOST_DESCRIPTORS])


# -- the zygote ------------------------------------------------------------------------------------


def main() -> None:
    """The program of a zygote that `Zygote.start` has started, and of its forks."""
    connection: Connection[Any, Any] = Connection(int(sys.argv[1]))
    os.set_inheritable(connection.fileno(), False)
    serve(connection, sys.argv[2])()


def serve(connection: Connection[Any, Any], module: str) -> Call:
    """Import `module` and PyTorch's, then fork for each request; returns in a forked process what it has to call."""
    # Blocked, those for a fork wait until it can handle them; ignored, they do not end a thread of a library here.
    signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
    handlers = {number: signal.signal(number, signal.SIG_IGN) for number in _IGNORED}
    gc.disable()
    try:
        importlib.import_module(module)
        before = set(os.environ)
        for name in _OF_A_STEP:
            importlib.import_module(name)
    except Exception:  # each process meets it, and reports it
        os._exit(1)
    for added in (
        os.environ.keys() - before
    ):  # a script may choose its own directory for PyTorch's compiler
        del os.environ[added]
    gc.freeze()  # the collector of a fork would copy all their pages
    gc.enable()
    with contextlib.suppress(EOFError, ConnectionError):
        connection.send(_is_safe())
        while True:
            request = connection.recv()
            call = _fork(connection, request, _received(connection, request.num_descriptors))
            if call is not None:
                for number, handler in handlers.items():
                    signal.signal(number, handler)
                signal.pthread_sigmask(signal.SIG_SETMASK, request.signal_mask)
                return call
    os._exit(0)


def _is_safe() -> bool:
    """Whether a fork can do what a new process can.

    There is one thread, nothing that watches each process from its start, and CUDA was not asked for its devices.
    """
    if threading.active_count() > 1 or not _WATCHERS.isdisjoint(sys.modules):
        return False
    if not torch.backends.cuda.is_built():  # type: ignore[no-untyped-call]
        return True
    pid = os.fork()
    if pid == 0:
        os._exit(int(torch.cuda._is_in_bad_fork()))
    return os.waitpid(pid, 0)[1] == 0


def _received(connection: Connection[Any, Any], count: int) -> list[int]:
    found: list[int] = []
    with socket.socket(fileno=os.dup(connection.fileno())) as received_by:
        while len(found) < count:
            data, descriptors, _, _ = socket.recv_fds(received_by, 1, _MOST_DESCRIPTORS)
            if not data:
                raise EOFError
            found += descriptors
    return found


def _fork(connection: Connection[Any, Any], request: _Request, received: list[int]) -> Call | None:
    """Fork twice, as the child of a process that has ended goes to the one that adopts orphans."""
    try:
        between = os.fork()
    except OSError as error:
        connection.send(error)
        between = -1
    if between > 0:
        os.waitpid(between, 0)
    if between:
        for descriptor in received:
            os.close(descriptor)
        return None
    parent = os.getpid()
    try:
        pid = os.fork()
    except OSError as error:
        connection.send(error)
        os._exit(1)
    if pid:
        os._exit(0)
    while os.getppid() == parent:
        time.sleep(0.0002)
    connection.send(os.getpid())  # not before: who asked adopts until it has this
    connection.close()
    _become(request, received)
    return request.call


def _become(request: _Request, received: list[int]) -> None:
    if request.has_own_session:
        os.setsid()
    streams = received[: len(request.streams)]
    for target, source in zip(request.streams, streams, strict=True):
        if source != target:
            os.dup2(source, target)
            os.close(source)
    inherited[:] = received[len(streams) :]
    for descriptor in inherited:
        os.set_inheritable(descriptor, False)
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(line_buffering=sys.stdout.isatty())
    os.environ.clear()
    os.environ.update(request.environ)
    settings.accept_environment()
    # A folder of `sys.path` may have been made since the zygote looked for it.
    importlib.invalidate_caches()
    torch.default_generator.seed()
    numpy_random: Any = sys.modules.get("numpy.random")
    if numpy_random is not None:
        numpy_random.seed()
