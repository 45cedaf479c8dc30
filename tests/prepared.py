"""A fork server for the tests: Python programs that start with PyTorch imported, in a twentieth of the time.

`start` and `run` are `subprocess.Popen` and `subprocess.run` for `[sys.executable, ...]`. A server, one for each test
process and set of the interpreter's options, has imported `torch` and nothing of ours. For a program it forks, takes
the program's descriptors, directory and environment, and runs it as `__main__`; the program ends as any interpreter
does. A program whose environment decides what the import of `torch` does, or which has other options, starts from
nothing. A program that says so has its own processes prepared, too: see `prepared_children.py`.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import faulthandler
import json
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
import tempfile
import types
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.prepared_children import THREADS, start_twin

__all__ = ["MARK", "MODULE", "run", "server_pids", "start", "start_alone"]

MODULE = "tests.prepared"  # as it stands in the server's command line
MARK = "TEST_JOB"  # this variable's value, of 32 characters, is in the /proc/PID/environ of a program as well
_ROOT = Path(__file__).parents[1]
# Of a test's program, a user's script, and the launcher, which starts itself anew without it.
_OPTIONS = {("-W", "error"), (), ("-P",)}
_LAUNCHER = ["-m", "ltc_launch"]
# Read by the interpreter, by the libraries of PyTorch when they are loaded, or by `import torch`.
_READ_AT_START = (
    "ATEN_", "GOMP_", "KMP_", "LD_", "LTC_AUTOLOAD", "LTC_COMPAT", "MALLOC_",
    "MKL_", "OMP_", "OPENBLAS_", "PYTHON", "TORCH_",
)  # fmt: skip
_MESSAGE_BYTES = 1 << 17
# As in `ltc_dist.processes.child`: `tests.launching` sends it where a job hangs.
_STACKS = signal.SIGRTMIN + 3


# --- the side of the tests ------------------------------------------------------------------------------------------


class _Server:
    """The process that forks; it ends when this one does."""

    def __init__(self, options: tuple[str, ...]) -> None:
        self.environ = {n: v for n, v in os.environ.items() if not n.startswith(("LTC_", "XLA_"))}
        self.environ |= {"PYTHONPATH": str(_ROOT), MARK: "0" * 32}
        self._requests, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, *options, "-m", MODULE, str(theirs.fileno())],
                env=self.environ,
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
            )
        self.pid = self._process.pid
        atexit.register(self._end)

    def _end(self) -> None:
        self._requests.close()
        self._process.wait()

    def fork(self, request: dict[str, Any], descriptors: list[int]) -> tuple[int, socket.socket]:
        """Start a program; give its process id and the socket that its exit status comes from."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            message = json.dumps(request).encode()
            assert len(message) < _MESSAGE_BYTES, "the program is too long for the fork server"
            socket.send_fds(self._requests, [message], [*descriptors, theirs.fileno()])
        return int(ours.recv(32)), ours


_servers: dict[tuple[str, ...], _Server] = {}


def _server(options: tuple[str, ...]) -> _Server:
    if options not in _servers:
        _servers[options] = _Server(options)
    return _servers[options]


def server_pids() -> list[int]:
    """The process ids of the servers that were started."""
    return [server.pid for server in _servers.values()]


class _Prepared(subprocess.Popen[Any]):
    """A program of a fork server: a `Popen` whose process is started and waited for by another."""

    def __init__(
        self,
        command: list[str],
        *,
        ignores_interrupts: bool,
        starts_processes: bool,
        **options: Any,
    ) -> None:
        self._ignores_interrupts = ignores_interrupts
        self._starts_processes = starts_processes
        super().__init__(command, **options)

    def _execute_child(  # type: ignore[override]
        self, args: Any, executable: Any, preexec_fn: Any, close_fds: Any, pass_fds: Any, cwd: Any, env: Any,
        startupinfo: Any, creationflags: Any, shell: Any,
        p2cread: int, p2cwrite: int, c2pread: int, c2pwrite: int, errread: int, errwrite: int,
        restore_signals: Any, gid: Any, gids: Any, uid: Any, umask: Any, start_new_session: bool, *_: Any,
    ) -> None:  # fmt: skip
        options, arguments = _split(args)
        request = {
            "options": options,
            "arguments": arguments,
            "directory": os.fspath(cwd or os.getcwd()),
            "environ": env,
            "has_own_session": start_new_session,
            "ignores_interrupts": self._ignores_interrupts,
            "starts_processes": self._starts_processes and arguments[:2] != _LAUNCHER,
        }
        own = (0 if p2cread == -1 else p2cread, 1 if c2pwrite == -1 else c2pwrite)
        descriptors = [*own, 2 if errwrite == -1 else errwrite]
        try:
            self.pid, self._status = _server(options).fork(request, descriptors)
        finally:
            self._close_pipe_fds(p2cread, p2cwrite, c2pread, c2pwrite, errread, errwrite)  # type: ignore[attr-defined]
        self._child_created = True

    def _try_wait(self, wait_flags: int) -> tuple[int, int]:
        if wait_flags & os.WNOHANG and not select.select([self._status], [], [], 0)[0]:
            return 0, 0
        with self._status:
            return self.pid, int(self._status.recv(32))

    def _internal_poll(self, *_: Any, **__: Any) -> int | None:
        if self.returncode is None:
            pid, status = self._try_wait(os.WNOHANG)
            if pid:
                self._handle_exitstatus(status)  # type: ignore[attr-defined]
        return self.returncode


def start(
    command: Sequence[str],
    *,
    env: dict[str, str] | None = None,
    ignores_interrupts: bool = False,
    starts_processes: bool = False,
    **options: Any,
) -> Any:
    """Start `[sys.executable, ...]` as `subprocess.Popen` does.

    Args:
        ignores_interrupts: start it with SIGINT ignored, as under `nohup ... &`.
        starts_processes: prepare those that it starts, too.
        options: cwd, text, start_new_session and the three streams.
    """
    environ = dict(os.environ if env is None else env)
    if _is_prepared(command, environ):
        return _Prepared(
            list(command),
            env=environ,
            ignores_interrupts=ignores_interrupts,
            starts_processes=starts_processes,
            **options,
        )
    return start_alone(command, env=environ, ignores_interrupts=ignores_interrupts, **options)


def start_alone(command: Sequence[str], *, ignores_interrupts: bool = False, **options: Any) -> Any:
    """As `start`, but never a fork."""
    begin = (lambda: signal.signal(signal.SIGINT, signal.SIG_IGN)) if ignores_interrupts else None
    return subprocess.Popen(list(command), preexec_fn=begin, **options)


def run(
    command: Sequence[str],
    *,
    capture_output: bool = False,
    input: Any = None,
    timeout: float | None = None,
    **options: Any,
) -> subprocess.CompletedProcess[Any]:
    """Run `[sys.executable, ...]` to its end, as `subprocess.run` does."""
    if capture_output:
        options |= {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    if input is not None:
        options["stdin"] = subprocess.PIPE
    with start(command, **options) as program:
        try:
            out, err = program.communicate(input, timeout)
        except BaseException:
            program.kill()
            raise
        return subprocess.CompletedProcess(command, program.returncode, out, err)


def _split(command: Sequence[str]) -> tuple[tuple[str, ...], list[str]]:
    """The interpreter's options, and the arguments after them."""
    arguments = list(command[1:])
    options: list[str] = []
    if arguments[:2] == _LAUNCHER:
        options = ["-P"]
    elif arguments[:1] == ["-W"]:
        options = arguments[:2]
        arguments = arguments[2:]
    return tuple(options), arguments


def _is_prepared(command: Sequence[str], environ: dict[str, str]) -> bool:
    if command[0] != sys.executable:
        return False
    options, arguments = _split(command)
    is_option = arguments[0].startswith("-") and arguments[0] not in ("-c", "-m", "-")
    if options not in _OPTIONS or is_option:
        return False
    server = _server(options)
    differs = {
        n for n in environ.keys() | server.environ.keys() if environ.get(n) != server.environ.get(n)
    }
    if THREADS in environ:
        differs.discard(THREADS)
    return not any(n.startswith(_READ_AT_START) for n in differs)


# --- the server -----------------------------------------------------------------------------------------------------


class _Forker:
    """The loop of the server."""

    def __init__(self, requests: socket.socket) -> None:
        self._requests = requests
        self._programs: dict[
            int, tuple[int, socket.socket]
        ] = {}  # a process descriptor: process id, who asked

    def serve(self) -> dict[str, Any] | None:
        """Fork for each request and tell each exit status; give its request in a program, and None at the end."""
        while True:
            for ready in select.select([self._requests, *self._programs], [], [])[0]:
                if ready is not self._requests:
                    self._tell_end(ready)
                    continue
                message, descriptors, _, _ = socket.recv_fds(self._requests, _MESSAGE_BYTES, 4)
                if not message:
                    return None
                if self._fork(descriptors):
                    return json.loads(message)  # type: ignore[no-any-return]

    def _fork(self, descriptors: list[int]) -> bool:
        *streams, asked = descriptors
        pid = os.fork()
        if pid == 0:
            for target, source in enumerate(streams):
                os.dup2(source, target)
            for each in (*descriptors, *self._programs):
                os.close(each)
            for _, socket_of_another in self._programs.values():
                socket_of_another.close()
            return True
        for each in streams:
            os.close(each)
        who = socket.socket(fileno=asked)
        who.send(str(pid).encode())
        self._programs[os.pidfd_open(pid)] = pid, who
        return False

    def _tell_end(self, descriptor: int) -> None:
        pid, who = self._programs.pop(descriptor)
        os.close(descriptor)
        status = os.waitpid(pid, 0)[1]
        with who, contextlib.suppress(BrokenPipeError):  # who asked has ended
            who.send(str(status).encode())


def _become(request: dict[str, Any], mark: int) -> None:
    """Run a program as the interpreter would, given its command line.

    Args:
        mark: address of the mark in the variables that this process was started with.
    """
    if request["has_own_session"]:
        os.setsid()
    if request["ignores_interrupts"]:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
    if request.get("starts_processes"):
        faulthandler.register(_STACKS)
    os.chdir(request["directory"])
    num_threads = os.environ.get(THREADS)
    os.environ.clear()
    os.environ.update(request["environ"])
    if os.environ.get(THREADS, num_threads) != num_threads:
        sys.modules["torch"].set_num_threads(int(os.environ[THREADS]))
    tempfile.tempdir = None  # looked up anew: the server has looked, too
    if request.get("starts_processes"):
        own = start_twin(_READ_AT_START)
        if own is not None:
            _become(own, mark)
            return
    if MARK in os.environ:
        ctypes.memmove(mark, os.environ[MARK].encode(), len("0" * 32))
    arguments = request["arguments"]
    sys.orig_argv = [sys.executable, *request["options"], *arguments]
    main = sys.modules["__main__"] = types.ModuleType("__main__")
    sys.modules["__mp_main__"] = main  # the other name that multiprocessing has for it
    what = arguments[0]
    if what == "-m":
        sys.argv = arguments[1:]
        if not sys.flags.safe_path:
            sys.path[0] = os.getcwd()
        runpy._run_module_as_main(arguments[1])  # type: ignore[attr-defined]
        return
    if what == "-c":
        sys.argv = ["-c", *arguments[2:]]
        sys.path[0] = ""
        code = compile(arguments[1], "<string>", "exec")
    elif what == "-":
        sys.argv = arguments
        sys.path[0] = ""
        main.__file__ = "<stdin>"
        code = compile(sys.stdin.read(), main.__file__, "exec")
    elif os.path.isdir(what):
        sys.argv = arguments
        sys.path[0] = what
        runpy._run_module_as_main("__main__", False)  # type: ignore[attr-defined]
        return
    else:
        sys.argv = arguments
        sys.path[0] = os.path.dirname(os.path.realpath(what))
        main.__file__ = os.path.abspath(what)
        code = compile(Path(what).read_bytes(), main.__file__, "exec")
    exec(code, main.__dict__)


def _main() -> None:
    import gc

    getenv = ctypes.CDLL(None).getenv
    getenv.restype = ctypes.c_void_p
    mark = getenv(MARK.encode())

    import torch
    import torch._dynamo
    import torch.distributed.tensor  # noqa: F401

    gc.collect()
    gc.freeze()
    with socket.socket(fileno=int(sys.argv[1])) as requests:
        request = _Forker(requests).serve()
    if request is None:
        return
    try:
        _become(request, mark)
    except Exception as error:
        trace = error.__traceback__
        while trace is not None and trace.tb_frame.f_code.co_filename == __file__:
            trace = trace.tb_next
        sys.excepthook(type(error), error.with_traceback(trace), trace)
        sys.exit(1)


if __name__ == "__main__":
    _main()
