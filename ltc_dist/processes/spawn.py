"""`spawn(fn)` runs a function in several processes of this host and waits for them.

Each process has PyTorch's variables (RANK, WORLD_SIZE, ...), a store at MASTER_ADDR that listens on this host only, and
its share of the cores. The first failure ends the others and is raised in the parent, with the
rank it came from. Scripts import this file as `xmp`.
"""

from __future__ import annotations

import atexit
import contextlib
import math
import multiprocessing as mp
import multiprocessing.connection
import multiprocessing.reduction
import os
import pickle
import signal
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.multiprocessing  # tensors go to another process by its rules

import ltc_core as ltc
from ltc_core.errors import RankError
from ltc_core.settings import settings
from ltc_core.tensor.lazy_tensor import keeping_copies
from ltc_dist.job import host_collectives
from ltc_dist.job.ranks import Ranks, own_rank, ranks
from ltc_dist.job.store import LOOPBACK, note_served, serve_store
from ltc_dist.processes import child, kept_zygote, unconnected
from ltc_dist.processes.failures import (
    Failure,
    after,
    how_it_ended,
)
from ltc_dist.processes.forked_process import ForkedProcess
from ltc_dist.processes.main_guard import is_unguarded
from ltc_dist.processes.sending import Call, Name
from ltc_dist.processes.sigterm import SigtermHandedOn
from ltc_dist.processes.started import ErrorReport, ReportFile, Started
from ltc_dist.processes.supervision import Supervision
from ltc_dist.processes.zygote import can_fork

__all__ = ["SpawnContext", "spawn"]

_START_METHODS = ("spawn", "fork", "forkserver")
_GRACE_S = 5.0
_SIGTERM_GRACE_S = 30.0  # for processes to save their work; as --grace of ltc-launch
_POLL_S = 1.0  # between two looks for processes that have vanished
_LOOK_S = 0.02  # for the cause of a failure
# Running contexts. The processes need the store that the parent serves, also if nobody holds their context.
_running: set[SpawnContext] = set()
# One thread at a time: a process that another one forks meanwhile would hold the pipe by which the end of this one is
# seen, and the kept zygote must not be replaced before all processes of a call are forked. No store is made or ended
# meanwhile either: its locks in C++ would stay taken in a fork.
_starting = threading.Lock()


def _renew_lock() -> None:
    """In a forked child, where the lock may be that of a thread which does not exist there."""
    global _starting
    _starting = threading.Lock()


os.register_at_fork(after_in_child=_renew_lock)


def spawn(
    fn: Callable[..., Any],
    args: Sequence[Any] = (),
    nprocs: int | None = None,
    join: bool = True,
    daemon: bool = False,
    start_method: str = "spawn",
) -> SpawnContext | None:
    """Call `fn(rank, *args)` in `nprocs` processes.

    Lambdas, closures, and functions and classes of a notebook are sent by value, in `args` too. The environment of the
    parent does not change, so several threads may call this at a time. Devices that the parent has used do not matter:
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
        RankError: a process ended with another code than 0; or these cannot be started, as with `args` that are no
            sequence.
        Exception: what the first process that failed raised, its rank and traceback in a note.

    Source: `torch_xla.distributed.xla_multiprocessing.spawn`, with its old meaning of processes.
    """
    if not isinstance(args, Sequence) or isinstance(args, str):
        raise RankError(
            "args of spawn is the sequence of what the function gets after its rank",
            got=f"args={args!r}",
            next=f"pass args=({args!r},)",
        )
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
    call, started = Call(fn, tuple(args)), list[Started]()
    if not join:
        return SpawnContext(call, count, daemon, start_method, started)
    with SigtermHandedOn(
        started
    ) as sigterm:  # the first process runs before the last one is started
        context = SpawnContext(call, count, daemon, start_method, started)
        sigterm.hand_on()
        context._join(math.inf, sigterm)
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


@dataclass(frozen=True)
class _Place:
    """What a process needs to start."""

    ranks: Ranks
    variables: dict[str, str]
    parent_pid: int
    dies_with_thread: bool
    start_method: str


def _main(call: Call, place: _Place, file: ReportFile) -> None:
    """Run in the new process."""
    # With a group of its own, what it starts can be found when it has ended. Ctrl-C is the parent's to hand on.
    os.setpgid(0, 0)
    os.environ.update(place.variables)
    own_rank()
    settings.accept_environment()
    note_served(LOOPBACK, int(place.variables["MASTER_PORT"]))
    if place.start_method == "forkserver":
        child.begin(os.getppid())  # the fork server
        child.end_with(place.parent_pid)
    else:
        child.begin(place.parent_pid, place.dies_with_thread)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    if place.start_method == "fork":
        torch.set_num_threads(1)
    elif (threads := os.environ["OMP_NUM_THREADS"]).isdecimal():
        torch.set_num_threads(int(threads))  # a fork server has the variables of its first process
    unconnected.watch()
    try:
        try:
            call(place.ranks.rank)
        except SystemExit as leaving:
            if leaving.code not in (None, 0):
                raise
        ltc.wait_device_ops()  # what fails in the background fails here, not unseen at the exit
        host_collectives.leave()  # a forked process has no exit handlers
        file.mark_left()
    except KeyboardInterrupt:
        host_collectives.abandon()
        sys.exit(128 + signal.SIGINT)
    except SystemExit as leaving:
        file.write(ErrorReport.of(leaving))
        host_collectives.leave()
        raise
    except BaseException as error:
        file.write(ErrorReport.of(error))
        host_collectives.exit_code = 1
        sys.exit(1)


class SpawnContext:
    """Running processes, as `spawn(join=False)` returns them.

    Attributes:
        processes: by rank.
    """

    def __init__(
        self, call: Call, nprocs: int, daemon: bool, start_method: str, started: list[Started]
    ) -> None:
        with _starting:
            for other in list(_running):
                if other.has_ended:
                    _running.discard(other)
            self._store, port = serve_store()
        self._started = started
        in_main_thread = threading.current_thread() is threading.main_thread()
        try:
            with _starting:
                make = _maker(nprocs, start_method, port)
                for rank in range(nprocs):
                    of = Ranks(rank, nprocs, rank, nprocs)
                    place = _Place(
                        of, _variables(of, port), os.getpid(), in_main_thread, start_method
                    )
                    file = ReportFile()
                    process = make(
                        target=_main,
                        args=(call, place, file),
                        name=Name.of(f"rank {rank}", place.variables),
                        daemon=daemon,
                    )
                    try:
                        with keeping_copies():
                            process.start()
                    except BaseException:
                        file.close()
                        raise
                    self._started.append(Started(rank, process, file))
        except BaseException:
            self._supervise()
            self._end(signal.SIGTERM)
            raise
        self._supervise()
        _running.add(self)

    def _supervise(self) -> None:
        self._supervision = Supervision(
            self._started, lambda rank: host_collectives.tell_ended(rank, self._store)
        )

    @property
    def processes(self) -> list[Any]:
        return [started.process for started in self._started]

    @property
    def has_ended(self) -> bool:
        return not self._supervision.running()

    def pids(self) -> list[int]:
        return [started.pid for started in self._started]

    def join(self, timeout: float | None = None) -> bool:
        """Wait for the processes; after a failure end the others and raise it.

        Args:
            timeout: seconds.

        Returns:
            Whether all have ended.

        Raises:
            RankError, Exception: see `spawn`.

        Meanwhile SIGTERM is forwarded. It ends this process after the others, which may save their work; who still runs
        half a minute later is killed. What fails meanwhile is printed.
        """
        deadline = math.inf if timeout is None else time.monotonic() + timeout
        with SigtermHandedOn(self._started) as sigterm:
            return self._join(deadline, sigterm)

    def _join(self, deadline: float, sigterm: SigtermHandedOn) -> bool:
        try:
            while running := self._supervision.running():
                if not self._may_go_on(sigterm.came_s):
                    break
                self._supervision.tell_vanished()
                left = math.inf if sigterm.has_come else deadline - time.monotonic()
                if not self._wait(running, left) and left <= 0:
                    return False
            self._supervision.tell_vanished()
            if sigterm.has_come:
                self._end_after_sigterm()
            else:
                self._raise_first_failure()
        except BaseException:
            self._end(signal.SIGTERM)
            raise
        self._release()
        return True

    def _may_go_on(self, sigterm_s: float | None) -> bool:
        """Whether those that run may: none has failed, or SIGTERM has come and they save their work."""
        if sigterm_s is not None:
            return time.monotonic() - sigterm_s < _SIGTERM_GRACE_S
        return not self._has_failed() or self._supervision.awaits_cause()

    def _has_failed(self) -> bool:
        return any(started.exitcode for started in self._started)

    def _wait(self, running: list[Started], seconds: float) -> bool:
        """Wait for the end of one of these, but not long; returns whether one has ended."""
        sentinels = [started.process.sentinel for started in running]
        most = _LOOK_S if self._has_failed() else _POLL_S
        return bool(mp.connection.wait(sentinels, max(0.0, min(seconds, most))))

    def _raise_first_failure(self) -> None:
        if not self._has_failed():
            return
        self._stop(signal.SIGTERM)
        first = self._supervision.first_failure()
        assert first is not None
        of = self._started[first.rank]
        report, before = of.report(), after(self._supervision.ended_before(first))
        if report is None or report.is_exit:
            raise _ended(first, of.pid, before)
        raise _rebuilt(first.rank, report, of.pid, before)

    def _end_after_sigterm(self) -> None:
        """Kill what did not end in time; print what failed while it was told to end."""
        left = self._supervision.running()
        self._stop(signal.SIGKILL)
        for started in left:
            _say(
                f"rank {started.rank} still ran {_SIGTERM_GRACE_S:g} s after SIGTERM, and was killed"
            )
        first = self._supervision.first_failure({-signal.SIGTERM, 128 + signal.SIGTERM})
        if first is None or first.was_stopped:
            return
        of = self._started[first.rank]
        report = of.report()
        if report is not None and not report.is_exit:
            sys.stderr.write(report.text)
        _say(f"rank {first.rank} (pid {of.pid}) {how_it_ended(first.exitcode)} after SIGTERM")

    def _end(self, number: int) -> None:
        self._stop(number)
        self._release()

    def _stop(self, number: int) -> None:
        """End the processes that still run: by SIGTERM, after a while by SIGKILL."""
        with self._supervision.ending(_GRACE_S):
            running = self._supervision.running()
            for started in running:
                started.send(number)
            deadline = time.monotonic() + _GRACE_S
            for started in running:
                started.process.join(max(0.0, deadline - time.monotonic()))
                if started.exitcode is None:
                    started.process.kill()
                    started.process.join()

    def _release(self) -> None:
        for started in self._started:
            started.report()  # kept for another `join`
            started.file.close()
        self._store = None
        _running.discard(self)


def _say(text: str) -> None:
    sys.stdout.flush()
    print(f"ltc: {text}", file=sys.stderr, flush=True)


@atexit.register  # runs before the exit handler of multiprocessing, which waits for the processes
def _end_after_ctrl_c() -> None:
    """After Ctrl-C end the processes that nobody has joined: a terminal sends it to the parent's group alone."""
    if isinstance(getattr(sys, "last_value", None), KeyboardInterrupt):
        for context in list(_running):
            context._end(signal.SIGTERM)


def _maker(nprocs: int, start_method: str, port: int) -> Callable[..., Any]:
    """What makes a process: a fork of the zygote, if there may be one."""
    if start_method == "spawn" and nprocs > 1 and can_fork():
        variables = _variables(Ranks(0, nprocs, 0, nprocs), port)
        return partial(ForkedProcess, kept_zygote.get(os.environ | variables, __name__))
    context: Any = torch.multiprocessing.get_context(start_method)
    return context.Process  # type: ignore[no-any-return]


def _variables(of: Ranks, port: int) -> dict[str, str]:
    return child.variables(of, LOOPBACK, port, os.environ) | {
        "LTC_NUM_DEVICES": "1",
        "TORCHELASTIC_USE_AGENT_STORE": "True",  # the parent serves the store
        "TORCHELASTIC_RESTART_COUNT": "0",
        "TORCHELASTIC_RUN_ID": f"spawn-{os.getpid()}",
    }


def _ended(failure: Failure, pid: int, before: str) -> RankError:
    how = how_it_ended(failure.exitcode) + before
    advice = "its own output says more"
    if failure.exitcode == -signal.SIGKILL:
        advice = "if nobody killed it, the machine was out of memory: use a smaller batch or fewer processes"
    error = RankError(
        f"rank {failure.rank} (pid {pid}) {how}; the others were stopped", next=advice
    )
    error.exitcode = failure.exitcode
    return error


def _rebuilt(rank: int, report: ErrorReport, pid: int, before: str) -> BaseException:
    note = f"\nraised by rank {rank} (pid {pid}){before}; the others were stopped. There:\n{report.text}"
    error: BaseException = RankError(report.line)
    if report.payload is not None:
        with contextlib.suppress(Exception):  # its class may exist only in that process
            error = pickle.loads(report.payload)
    error.add_note(note)
    return error
