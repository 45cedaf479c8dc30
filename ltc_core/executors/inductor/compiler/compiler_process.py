"""The compiler's process, seen from its parent: started by the first request, killed with all processes it started.

`CompilerProcess.ask` sends one request to `child` and waits for the answer. If the process crashes, hangs or cannot be
started, the answer says so in one sentence. Its output is kept in memory, and its last line is quoted after a crash.
`end` may be called from any thread. Called by `service`.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from multiprocessing.connection import Connection, Pipe
from pathlib import Path
from typing import Any, NamedTuple

from ltc_core.executors.artifacts import WORK
from ltc_core.executors.inductor.compiler.compiler_variables import compiler_variables, is_decisive
from ltc_core.executors.inductor.compiler.patience import Patience
from ltc_core.settings import settings

__all__ = ["Answer", "CompilerProcess"]

_SCRIPT = Path(__file__).with_name("child.py")
_START_TIMEOUT_S = 300.0  # of processor time; to import PyTorch takes 2 s
_EXIT_GRACE_S = 5.0
_SLICE_S = 1.0
_LOG_TAIL_BYTES = 1 << 16
_MAX_QUOTED = 300
_SENTENCES = {
    "refused": "the compiler refuses it ({})",
    "disk": "{}",
    "unusable": "the compiler cannot be started ({})",
}


class Answer(NamedTuple):
    """The outcome of a request.

    Attributes:
        kind: 'built'; 'refused' (this request), 'crashed' (on this request), 'disk' (the root cannot be written),
            'unusable' (the compiler fails for any request), 'ended' (by `end`).
        text: the artifact's path if it was built, else a sentence that says why not; for 'disk' only the reason.
        op: name of the refused op, if the builder knows it.
        evicted: number of artifacts that were removed to make room.
    """

    kind: str
    text: str = ""
    op: str = ""
    evicted: int = 0


class _Gone(Exception):
    """The process has ended, or has closed its connection."""


class CompilerProcess:
    """At most one process, which builds artifacts in one directory with one function.

    Args:
        builder: 'module:function', imported in the process.
        root: the directory of the artifacts; it exists.
    """

    def __init__(self, builder: str, root: Path) -> None:
        self.root = root
        self._builder = builder
        self._lock = threading.Lock()
        self._ended = False
        self._process: subprocess.Popen[bytes] | None = None
        self._connection: Connection[Any, Any] | None = None
        self._log = -1

    @property
    def is_running(self) -> bool:
        return self._process is not None

    def ask(self, key: str, payload: bytes) -> Answer:
        """Build an artifact. Cost: the compile, and the start of the process if it does not run."""
        if self._process is None:
            problem = self._start()
            if problem is not None:
                return problem
        assert self._connection is not None
        os.ftruncate(self._log, 0)
        try:
            self._connection.send((key, payload))
            message = self._receive(settings.compile_timeout_s)
        except (_Gone, OSError):
            how = self._reap(_EXIT_GRACE_S)
            return Answer("ended") if self._ended else Answer("crashed", f"the compiler {how}")
        if message is None:
            self._reap(0)
            limit = f"{settings.compile_timeout_s:g} s"
            return Answer(
                "crashed", f"the compiler was not done after {limit} (LTC_COMPILE_TIMEOUT_S)"
            )
        kind, text, extra = message
        if kind == "built":
            return Answer(kind, text, evicted=extra)
        return _failure(kind, text, extra)

    def end(self) -> None:
        """Kill the process and all that it started. `ask` answers 'ended' from then on."""
        with self._lock:
            self._ended = True
            if self._process is not None:
                _kill_group(self._process.pid)
        # A thread in `ask` reaps the process; without one it is not reaped.

    def stop(self) -> None:
        """End an idle process; the next request starts a new one."""
        if self._process is not None:
            self._reap(0)

    def log(self) -> bytes:
        """End of the process's output for the last request."""
        if self._log < 0:
            return b""
        size = os.fstat(self._log).st_size
        return os.pread(self._log, _LOG_TAIL_BYTES, max(0, size - _LOG_TAIL_BYTES))

    def forget(self) -> None:
        """In a forked child: close the descriptors of the parent's compiler process, and do not wait for it."""
        if self._process is not None:
            self._process.returncode = 0  # not a child of this process, so it cannot be waited for
        if self._connection is not None:
            self._connection.close()
        if self._log >= 0:
            os.close(self._log)

    # -- starting and ending -----------------------------------------------------------------------

    def _start(self) -> Answer | None:
        """Start the process; None, or an answer if it failed."""
        try:
            (self.root / WORK).mkdir(mode=0o700, exist_ok=True)
        except OSError as error:
            return _failure("disk", str(error))
        ours, theirs = Pipe()
        try:
            with self._lock:
                if self._ended:
                    ours.close()
                    return Answer("ended")
                self._open_log()
                self._process = self._spawn(theirs.fileno())
                self._connection = ours
        except OSError as error:
            ours.close()
            return _failure("unusable", str(error))
        finally:
            theirs.close()
        config = {
            "path": sys.path,
            "builder": self._builder,
            "root": str(self.root),
            "limit_bytes": settings.compiled_cache_bytes,
        }
        try:
            ours.send(config)
            message = self._receive(_START_TIMEOUT_S)
        except (_Gone, OSError):
            how = self._reap(_EXIT_GRACE_S)
            return Answer("ended") if self._ended else _failure("unusable", f"it {how}")
        if message == ("ready",):
            return None
        self._reap(_EXIT_GRACE_S if message else 0)
        why = message[1] if message else f"it was not ready after {_START_TIMEOUT_S:g} s"
        return _failure("unusable", why)

    def _spawn(self, connection_number: int) -> subprocess.Popen[bytes]:
        # In sync mode the training run waits for the compiler, so it runs at normal priority.
        priority = "normal" if settings.compile == "sync" else settings.compile_priority
        arguments = [_SCRIPT, connection_number, os.getpid(), priority]
        return subprocess.Popen(
            # -P: no imports from the script's directory. -u: no output is lost in a crash.
            [sys.executable, "-P", "-u", "-Wignore", "-Xfaulthandler", *map(str, arguments)],
            stdin=subprocess.DEVNULL,
            stdout=self._log,
            stderr=self._log,
            pass_fds=[connection_number],
            env=self._environment(),
            # A process group of its own, so that Ctrl-C does not reach it and a kill reaches all of it. Not a session:
            # with sched_autogroup the kernel shares a core equally between sessions, so the compiler would take half of
            # a core from the training run, whatever its priority. Measured at SCHED_IDLE: 1.49 s of 3 s in a new
            # session, 0.01 s in a new group.
            process_group=0,
        )

    def _environment(self) -> dict[str, str]:
        work = str(self.root / WORK)
        inherited = {
            name: value
            for name, value in os.environ.items()
            if not is_decisive(name) and (name != "CXX" or value)
        }
        if _is_chosen_by_torch(inherited.get("TORCHINDUCTOR_CACHE_DIR", "")):
            del inherited["TORCHINDUCTOR_CACHE_DIR"]
        return {
            "TORCHINDUCTOR_CACHE_DIR": work,
            **inherited,
            **compiler_variables(),
            "TMPDIR": work,  # where PyTorch keeps its precompiled headers
            "TORCHINDUCTOR_COMPILE_THREADS": "1",
            "OMP_NUM_THREADS": "1",
            "LC_ALL": "C",  # messages of compilers are quoted in an English sentence
            "LTC_AUTOLOAD": "0",
            "LTC_COMPILE": "off",
        }

    def _open_log(self) -> None:
        if self._log < 0:
            self._log = os.memfd_create("ltc-compiler")
            fcntl.fcntl(self._log, fcntl.F_SETFL, os.O_APPEND)

    def _receive(self, timeout_s: float) -> tuple[Any, ...] | None:
        """Next message; None after so much processor time, or if the process has used none for so long.

        Raises:
            _Gone: the process sends no more messages.
        """
        assert self._connection is not None and self._process is not None
        patience = Patience(self._process.pid, timeout_s)
        while not patience.is_over():
            # In slices: a process that was forked meanwhile may hold the other end open, so EOF may never come.
            is_gone = _has_exited(self._process.pid)
            if self._connection.poll(min(patience.left_s, _SLICE_S)):
                try:
                    message: tuple[Any, ...] = self._connection.recv()
                except EOFError:
                    raise _Gone from None
                return message
            if is_gone:
                raise _Gone
        return None

    def _reap(self, grace_s: float) -> str:
        """Wait for the process, kill what is left of its group after `grace_s`, and reap it; text of how it ended."""
        assert self._connection is not None and self._process is not None
        deadline = time.monotonic() + grace_s
        while not (natural := _has_exited(self._process.pid)) and time.monotonic() < deadline:
            time.sleep(0.01)
        with self._lock:
            # Not reaped yet, so the process id still belongs to it and to its group.
            _kill_group(self._process.pid)
            code = self._process.wait()
            self._process = None
        self._connection.close()
        self._connection = None
        if not natural:
            return "closed its connection"
        return _how_it_ended(code, self.log())


def _is_chosen_by_torch(directory: str) -> bool:
    """Whether PyTorch, not the user, chose this directory for its cache. PyTorch exports its choice to children.

    PyTorch's function for the name is not called: it imports the compiler, a second of a core.
    """
    parent, name = os.path.split(directory)
    # The system's directories too: TMPDIR may have been another one when PyTorch chose.
    temporary = {os.path.abspath(tempfile.gettempdir()), "/tmp", "/var/tmp", "/usr/tmp"}
    return parent in temporary and name.startswith("torchinductor_")


def _failure(kind: str, why: str, op: str = "") -> Answer:
    return Answer(kind, _SENTENCES[kind].format(why), op)


def _has_exited(pid: int) -> bool:
    try:
        return os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None
    except ChildProcessError:  # another thread or library has reaped it
        return True


def _kill_group(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError):  # all of the group has ended
        os.killpg(pid, signal.SIGKILL)


def _how_it_ended(code: int, log: bytes) -> str:
    """Text of how the process ended: 'crashed (SIGSEGV; the last line it printed)'."""
    quote = _last_words(log)
    quoted = f"; {quote}" if quote else ""
    if code >= 0:
        return f"ended without an answer (exit code {code}{quoted})"
    if -code == signal.SIGKILL:
        return "was killed (SIGKILL; most likely memory ran out)"
    try:
        name = signal.Signals(-code).name
    except ValueError:
        name = f"signal {-code}"
    return f"crashed ({name}{quoted})"


def _last_words(log: bytes) -> str:
    """The last line that was printed before Python's report of a crash."""
    lines = []
    for line in log.replace(b"\0", b"").decode(errors="replace").splitlines():
        if line.startswith("Fatal Python error"):
            break
        if line.strip():
            lines.append(line.strip())
    return lines[-1][:_MAX_QUOTED] if lines else ""
