"""`spawn(fn)` runs a function in several processes of this host and waits for them.

Each process has PyTorch's variables (RANK, WORLD_SIZE, ...), a store at MASTER_ADDR that listens on this host only, and
its share of the cores. The first failure ends the others and is raised in the parent, with the
rank it came from. Scripts import this file as `xmp`.
"""

from __future__ import annotations

import contextlib
import multiprocessing as mp
import multiprocessing.connection
import multiprocessing.reduction
import os
import pickle
import signal
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import cloudpickle
import torch
import torch.multiprocessing  # tensors go to another process by its rules
from filelock import FileLock

import ltc_core as ltc
from ltc_core.errors import RankError
from ltc_core.private_directory import private_directory
from ltc_core.runtime.collective_tokens import hand_over
from ltc_core.settings import settings
from ltc_core.tensor.lazy_tensor import keeping_copies
from ltc_dist.job import host_collectives
from ltc_dist.job.ranks import Ranks, ranks
from ltc_dist.job.store import LOOPBACK, serve_store
from ltc_dist.processes import child
from ltc_dist.processes.failures import (
    Failure,
    first_failure,
    has_cause,
    how_it_ended,
    last_line,
    verdict_of,
)
from ltc_dist.processes.main_guard import is_unguarded

__all__ = ["MpModelWrapper", "MpSerialExecutor", "SpawnContext", "spawn"]

_START_METHODS = ("spawn", "fork", "forkserver")
_GRACE_S = 5.0
_TOGETHER_S = 0.3  # for those that fail together
_CAUSE_S = 2.0  # time for the cause to appear if only consequences are known
_LOOK_S = 0.02
_LARGEST_PAYLOAD = 64 << 20  # bytes; an exception that holds more is sent as its text
# Running contexts. The processes need the store that the parent serves, also if nobody holds their context.
_running: set[SpawnContext] = set()


def spawn(
    fn: Callable[..., Any],
    args: Sequence[Any] = (),
    nprocs: int | None = None,
    join: bool = True,
    daemon: bool = False,
    start_method: str = "spawn",
) -> SpawnContext | None:
    """Call `fn(rank, *args)` in `nprocs` processes.

    Lambdas, closures and functions of a notebook are sent by value. Devices that the parent has used do not matter:
    each process begins with its own. In a process of a job (of ltc-launch or torchrun) the function is
    called right here.

    Args:
        nprocs: processes; LTC_NUM_DEVICES of them by default. One runs in this very process if `join` is true.
        join: wait for all of them.
        daemon: end them with this process; they cannot have processes of their own then, such as those of a
            `DataLoader`.
        start_method: 'spawn', 'fork' or 'forkserver'. Forked processes compute with one thread each: OpenMP's
            threads do not survive a fork.

    Returns:
        None, or with `join=False` a context to be joined.

    Raises:
        RankError: a process ended with another code than 0; or these cannot be started.
        Exception: what the first process that failed raised, its rank and traceback in a note.

    Source: `torch_xla.distributed.xla_multiprocessing.spawn`, with its old meaning of processes.
    """
    here = ranks()
    if here.world_size > 1 and nprocs in (None, here.world_size, here.local_world_size):
        fn(here.rank, *args)
        return None
    if start_method == "fork":  # its processes have the devices and the settings of this one
        ltc.get_lazy_supported_devices()
        settings.check_environment()
    elif nprocs is None:
        settings.check_environment("num_devices")
    count = settings.num_devices if nprocs is None else nprocs
    _check(fn, count, start_method)
    if count == 1 and join:
        fn(0, *args)
        return None
    context = SpawnContext(_Function(fn), tuple(args), count, daemon, start_method)
    if not join:
        return context
    context.join()
    return None


def _check(fn: Any, nprocs: Any, start_method: str) -> None:
    if not callable(fn):
        raise RankError("spawn needs a function", got=repr(fn))
    if type(nprocs) is not int or nprocs < 1:
        raise RankError("nprocs must be a whole number, 1 or more", got=repr(nprocs))
    if start_method not in _START_METHODS:
        raise RankError(
            f"there is no start method {start_method!r}",
            got=f"legal are {', '.join(_START_METHODS)}",
        )
    here = ranks()
    if here.world_size > 1:
        raise RankError(
            f"spawn(nprocs={nprocs}) was called by a process that is one of a job already",
            got=f"this is rank {here.rank} of {here.world_size}",
            next="leave nprocs out: the function is called once in each process of the job then",
        )
    if start_method != "fork" and is_unguarded(sys._getframe(2)):
        raise RankError(
            "spawn stands at the top of the script, which each process runs again from its first line",
            next="put it under if __name__ == '__main__':, or pass start_method='fork'",
        )


class _Name(str):
    """Name of a spawned process, which unpickles it before it imports the script.

    That imports `ltc_dist`, which serves the modules that an old script imports, and imports PyTorch quickly (see
    `ltc_core/__init__`).
    """

    def __reduce__(self) -> Any:
        return _named, (str(self),)


def _named(name: str) -> str:
    return name


class _Function:
    """The function, sent by name if the other process can import it, else by value."""

    def __init__(self, fn: Callable[..., Any]) -> None:
        self._fn = fn
        self._payload = b""
        if not _can_be_imported(fn):
            try:
                self._payload = cloudpickle.dumps(fn)
            except Exception as error:
                raise RankError(
                    f"{fn!r} cannot be sent to another process: {error}",
                    next="define it at the top of a module, pass what it needs in args, or use start_method='fork'",
                ) from error

    def __getstate__(self) -> Any:
        return self._payload or self._fn

    def __setstate__(self, state: Any) -> None:
        self._payload = b""
        self._fn = pickle.loads(state) if isinstance(state, bytes) else state

    def __call__(self, *args: Any) -> Any:
        return self._fn(*args)


def _can_be_imported(fn: Any) -> bool:
    if getattr(fn, "__module__", "__main__") == "__main__":
        main = sys.modules["__main__"]
        if getattr(main, "__spec__", None) is None and not os.path.exists(
            getattr(main, "__file__", None) or ""
        ):
            return False  # a notebook, or python -c
    try:
        pickle.dumps(fn)
    except Exception:
        return False
    return True


@dataclass(frozen=True)
class _Report:
    """How a process failed: its verdict, when, what it raised (if that can be sent), and the same as text."""

    verdict: str
    is_exit: bool
    time_s: float
    payload: bytes | None
    line: str
    text: str


class _ReportFile:
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

    def write(self, report: _Report) -> None:
        data = memoryview(pickle.dumps(report))
        self._file.seek(8)
        while data:
            data = data[self._file.write(data) :]
        self._file.seek(0)
        self._file.write(b"complete")

    def read(self) -> _Report | None:
        """The report; None if the process has written none, or was killed while it wrote."""
        self._file.seek(0)
        data = self._file.read()
        if not data.startswith(b"complete"):
            return None
        report = pickle.loads(data[8:])
        assert isinstance(report, _Report)
        return report

    def close(self) -> None:
        self._file.close()


@dataclass(frozen=True)
class _Place:
    """What a process needs to start."""

    ranks: Ranks
    variables: dict[str, str]
    parent_pid: int
    dies_with_thread: bool
    start_method: str


def _main(fn: _Function, args: tuple[Any, ...], place: _Place, file: _ReportFile) -> None:
    """Run in the new process."""
    os.environ.update(place.variables)
    settings.accept_environment()
    if place.start_method == "forkserver":
        child.begin(os.getppid())  # the fork server, which ends with its parent
    else:
        child.begin(place.parent_pid, place.dies_with_thread)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    if place.start_method == "fork":
        torch.set_num_threads(1)
    elif (threads := os.environ["OMP_NUM_THREADS"]).isdecimal():
        torch.set_num_threads(int(threads))  # a fork server has the variables of its first process
    try:
        fn(place.ranks.rank, *args)
        ltc.wait_device_ops()  # what fails in the background fails here, not unseen at the exit
        host_collectives.leave()  # a forked process has no exit handlers
    except KeyboardInterrupt:
        host_collectives.abandon()
        sys.exit(128 + signal.SIGINT)
    except SystemExit as leaving:
        if leaving.code not in (None, 0):
            file.write(_report(leaving))
        host_collectives.leave()
        raise
    except BaseException as error:
        file.write(_report(error))
        sys.exit(1)


def _report(error: BaseException) -> _Report:
    text, payload = traceback.format_exc(), None
    # An exception that cannot be pickled is sent as text.
    with contextlib.suppress(Exception):
        sent = cloudpickle.dumps(error)
        if len(sent) <= _LARGEST_PAYLOAD and isinstance(cloudpickle.loads(sent), BaseException):
            payload = sent
    is_exit = isinstance(error, SystemExit)
    return _Report(verdict_of(error), is_exit, time.monotonic(), payload, last_line(error), text)


class SpawnContext:
    """Running processes, as `spawn(join=False)` returns them.

    Attributes:
        processes: by rank.
    """

    def __init__(
        self, fn: _Function, args: tuple[Any, ...], nprocs: int, daemon: bool, start_method: str
    ) -> None:
        context: Any = torch.multiprocessing.get_context(start_method)
        _running.difference_update([other for other in _running if other.has_ended])
        self._store, port = serve_store()
        self.processes: list[Any] = []
        self._files: list[_ReportFile] = []
        in_main_thread = threading.current_thread() is threading.main_thread()
        try:
            for rank in range(nprocs):
                of = Ranks(rank, nprocs, rank, nprocs)
                place = _Place(of, _variables(of, port), os.getpid(), in_main_thread, start_method)
                file = _ReportFile()
                self._files.append(file)
                process = context.Process(
                    target=_main,
                    args=(fn, args, place, file),
                    name=_Name(f"rank {rank}"),
                    daemon=daemon,
                )
                # PyTorch reads some of the variables while it is imported.
                with _environment(place.variables), keeping_copies():
                    process.start()
                self.processes.append(process)
        except BaseException:
            self._end(signal.SIGKILL)
            raise
        _running.add(self)

    @property
    def has_ended(self) -> bool:
        return all(process.exitcode is not None for process in self.processes)

    def pids(self) -> list[int]:
        return [process.pid for process in self.processes]

    def join(self, timeout: float | None = None) -> bool:
        """Wait for the processes; after a failure end the others and raise it.

        Args:
            timeout: seconds.

        Returns:
            Whether all have ended.

        Raises:
            RankError, Exception: see `spawn`.

        Meanwhile SIGTERM is forwarded. It ends this process after the others, which may save their work.
        """
        deadline = None if timeout is None else time.monotonic() + timeout
        with _SigtermHandedOn(self.processes) as sigterm:
            try:
                while None in (codes := [p.exitcode for p in self.processes]):
                    if any(codes) and not sigterm.has_come:
                        break
                    left = None if deadline is None else max(0.0, deadline - time.monotonic())
                    pairs = zip(self.processes, codes, strict=True)
                    running = [process.sentinel for process, code in pairs if code is None]
                    if not mp.connection.wait(running, left):
                        return False
                if not sigterm.has_come:
                    self._raise_first_failure()
            except BaseException:
                self._end(signal.SIGTERM)
                raise
            self._release()
        return True

    def _raise_first_failure(self) -> None:
        if not any(p.exitcode for p in self.processes):
            return
        self._wait_for_cause()
        stopped = {rank for rank, p in enumerate(self.processes) if p.exitcode is None}
        began = time.monotonic()
        self._stop(signal.SIGTERM)
        failed = {rank: p.exitcode for rank, p in enumerate(self.processes) if p.exitcode}
        reports = {rank: self._report_of(rank) for rank in failed}
        first = first_failure(
            _failure(rank, code, reports[rank], began if rank in stopped else None)
            for rank, code in failed.items()
        )
        report, pid = reports[first.rank], self.processes[first.rank].pid
        if report is None or report.is_exit:
            raise _ended(first, pid)
        raise _rebuilt(first.rank, report, pid)

    def _report_of(self, rank: int) -> _Report | None:
        return self._files[rank].read() if self._files else None  # none after the first `join`

    def _wait_for_cause(self) -> None:
        """Wait for the cause: a process that is stopped now can no longer report why the others failed."""
        began = time.monotonic()
        while None in (codes := [p.exitcode for p in self.processes]):
            failed = [(rank, code) for rank, code in enumerate(codes) if code]
            known = [_failure(rank, code, self._report_of(rank)) for rank, code in failed]
            limit = _TOGETHER_S if has_cause(known) else _CAUSE_S
            if time.monotonic() - began >= limit:
                return
            time.sleep(_LOOK_S)

    def _end(self, number: int) -> None:
        self._stop(number)
        self._release()

    def _stop(self, number: int) -> None:
        """End the processes that still run: by SIGTERM, after a while by SIGKILL."""
        running = [p for p in self.processes if p.exitcode is None]
        for process in running:
            with contextlib.suppress(ProcessLookupError):
                os.kill(process.pid, number)
        deadline = time.monotonic() + _GRACE_S
        for process in running:
            process.join(max(0.0, deadline - time.monotonic()))
            if process.exitcode is None:
                process.kill()
                process.join()

    def _release(self) -> None:
        for file in self._files:
            file.close()
        self._files.clear()
        self._store = None
        _running.discard(self)


class _SigtermHandedOn:
    """Context manager: forwards SIGTERM to the processes, and at the end to this one, unless it has its own handler."""

    def __init__(self, processes: list[Any]) -> None:
        self._processes = processes
        self._is_ours = False
        self.has_come = False

    def __enter__(self) -> _SigtermHandedOn:
        in_main_thread = threading.current_thread() is threading.main_thread()
        self._is_ours = in_main_thread and signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
        if self._is_ours:
            signal.signal(signal.SIGTERM, self._hand_on)
        return self

    def _hand_on(self, number: int, frame: FrameType | None) -> None:
        self.has_come = True
        for process in self._processes:
            if process.exitcode is None:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(process.pid, number)

    def __exit__(self, *error: object) -> None:
        if self._is_ours:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            if self.has_come:
                sys.stdout.flush()
                os.kill(os.getpid(), signal.SIGTERM)


def _variables(of: Ranks, port: int) -> dict[str, str]:
    return child.variables(of, LOOPBACK, port, os.environ) | {
        "LTC_NUM_DEVICES": "1",
        "TORCHELASTIC_USE_AGENT_STORE": "True",  # the parent serves the store
        "TORCHELASTIC_RESTART_COUNT": "0",
        "TORCHELASTIC_RUN_ID": f"spawn-{os.getpid()}",
    }


@contextlib.contextmanager
def _environment(variables: dict[str, str]) -> Iterator[None]:
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def _failure(
    rank: int, code: int, report: _Report | None, stopped_s: float | None = None
) -> Failure:
    """The failure of a process; `stopped_s` is when it was told to end, if it still ran then."""
    if report is None:
        return Failure(rank, code, was_stopped=stopped_s is not None)
    was_stopped = stopped_s is not None and report.time_s > stopped_s
    return Failure(rank, code, report.verdict, report.time_s, was_stopped)


def _ended(failure: Failure, pid: int) -> RankError:
    how = how_it_ended(failure.exitcode)
    advice = "its own output says more"
    if failure.exitcode == -signal.SIGKILL:
        advice = "if nobody killed it, the machine was out of memory: use a smaller batch or fewer processes"
    error = RankError(
        f"rank {failure.rank} (pid {pid}) {how}; the others were stopped", next=advice
    )
    error.exitcode = failure.exitcode
    return error


def _rebuilt(rank: int, report: _Report, pid: int) -> BaseException:
    note = f"\nraised by rank {rank} (pid {pid}); the others were stopped. There:\n{report.text}"
    error: BaseException = RankError(report.line)
    if report.payload is not None:
        with contextlib.suppress(Exception):  # its class may exist only in that process
            error = pickle.loads(report.payload)
    error.add_note(note)
    return error


def _one_at_a_time() -> FileLock:
    """Lock for one process of this user on this host at a time; its holder may wait for collectives."""
    hand_over()
    directory = Path(settings.cache_dir).expanduser()
    private_directory(directory)
    return FileLock(directory / "serial.lock")


class MpModelWrapper:
    """Holds a model made in the parent, so that forked processes share its memory until they move it.

    Source: `torch_xla.distributed.xla_multiprocessing.MpModelWrapper`.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        self._model = model

    def to(self, device: Any) -> torch.nn.Module:
        """Move the model, in one process at a time, so that the host makes one copy at a time."""
        with _one_at_a_time():
            return self._model.to(device)


class MpSerialExecutor:
    """Runs a function in one process at a time, such as a download that only the first one has to make.

    Source: `torch_xla.distributed.xla_multiprocessing.MpSerialExecutor`.
    """

    def run(self, fn: Callable[[], Any]) -> Any:
        """Call `fn()` and return what it returns. Cost: waits for the processes of this host that run it before."""
        with _one_at_a_time():
            return fn()
