"""Run a `Spec`: PyTorch's elastic agent starts and monitors the processes; this file reports how they ended.

The exit code is that of the process that failed first; its traceback is printed once, at the end. PyTorch's
`elastic_launch`, one level above the agent, is not used: it has one grace for all, so processes that wait for a dead
one would be given as long as those that save their work. Called by `cli`; uses `rendezvous` and `heartbeat`; each
process begins in `shim`.
"""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

import psutil
import torch.distributed
from torch.distributed.elastic.agent.server.api import (
    RunResult,
    WorkerGroup,
    WorkerSpec,
    WorkerState,
)
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException, Std
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure
from torch.distributed.elastic.rendezvous import RendezvousError

from ltc_dist.expected_name import expected_by
from ltc_dist.processes import child
from ltc_dist.processes.failures import SILENT, Failure, first_failure, has_cause, how_it_ended

from . import heartbeat, rendezvous, status
from .spec import Spec

__all__ = ["HANG", "command", "run", "variables"]

HANG = 124  # exit code of a hang, as of `timeout`
_CAUSE_S = 2.0  # how long to wait for the cause while only its consequences are known
_STOP_S = 3.0  # between SIGTERM and SIGKILL, if another process has failed or Ctrl-C was pressed
_MONITOR_S = 0.1
_TEMPORARY = "ltc-launch-"


def run(spec: Spec) -> int:
    """Launch the processes, wait for their end, report it.

    Returns:
        The exit code: 0; that of the process that failed first; 128 + the signal that killed it or stopped this one;
        124 for a hang; 75 if the hosts cannot be connected.
    """
    logging.disable(
        logging.ERROR
    )  # PyTorch's agent logs failures, too: they are reported once, below
    child.write_lines()
    os.environ.update(variables(spec))
    is_watched = status.is_worth_it() and spec.nprocs > 1
    with _log_dir(spec) as log_dir:
        beats = os.path.join(log_dir, "beats") if is_watched or spec.hang_timeout_s else ""
        if beats:
            os.makedirs(beats, mode=0o700, exist_ok=True)
        line = (
            status.shown(partial(heartbeat.steps, beats))
            if is_watched
            else contextlib.nullcontext()
        )
        agent = None
        try:
            agent = Agent(spec, log_dir, beats)
            with line:
                result = agent.run()
            if result.is_failed():
                agent.leave()
        except (SignalException, KeyboardInterrupt) as stopped:
            number = signal.Signals(int(getattr(stopped, "sigval", signal.SIGINT)))
            if agent is not None and spec.backend == "static":  # with c10d this host may join again
                agent.leave()
            _tell(f"stopped by {number.name}{agent.stop_words if agent is not None else ''}")
            return 128 + number
        except (RendezvousError, torch.distributed.DistError) as error:
            _tell(f"the hosts of {spec.endpoint} cannot be connected: {str(error).splitlines()[0]}")
            return os.EX_TEMPFAIL
        finally:
            sys.stdout.flush()
    if not result.is_failed():
        return 0
    if agent.hang:
        _tell(f"{agent.hang}; all were stopped")
        return HANG
    return _told(agent, result.failures)


class Agent(LocalElasticAgent):
    """PyTorch's agent for one host, with detection of hangs, and a grace that depends on why processes are ended.

    Args:
        beats: the directory where processes write their steps; empty if nobody reads it.

    Attributes:
        hang: the sentence about the processes that hung, if that ended the job.
        stop_words: the words about processes that had to be killed when the launcher was stopped.
    """

    def __init__(self, spec: Spec, log_dir: str, beats: str) -> None:
        self._ltc_spec = spec
        self._beats = beats
        self._watch: heartbeat.Watch | None = None
        self._is_stopping = False
        self._failed_s: float | None = None  # when the first failure was seen
        self._stopped_s: float | None = (
            None  # when the processes were told to end; those that ran then are in `_stopped`
        )
        self._stopped: set[int] = set()
        self.hang = ""
        self.stop_words = ""
        self._meeting = rendezvous.handler(spec)
        workers: Any = WorkerSpec(
            role="default",
            local_world_size=spec.nprocs,
            entrypoint=sys.executable,
            args=tuple(command(spec, os.getpid(), beats)),
            rdzv_handler=self._meeting,
            max_restarts=spec.max_restarts,
            monitor_interval=_MONITOR_S,
        )
        goes: dict[str, Any] = {"tee": Std.ALL} if spec.prefix or spec.log_dir else {}
        if spec.log_dir and not spec.tee:
            goes = {"redirects": Std.ALL}
        logs: Any = DefaultLogsSpecs(log_dir, **goes)
        prefix = "[${rank}] " if spec.prefix else ""
        super().__init__(workers, logs, log_line_prefix_template=prefix)

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        if self._ltc_spec.hang_timeout_s:
            self._watch = heartbeat.Watch(self._beats, self._ltc_spec.hang_timeout_s)
        started: dict[int, Any] = super()._start_workers(worker_group)
        # When PyTorch finds a failed process, it closes the others by itself, with a grace of 30 s: too long.
        close = self._pcontext.close  # type: ignore[union-attr]

        def closed(number: Any = None, grace_s: float = _STOP_S) -> None:
            if self._stopped_s is None:
                self._stopped_s, self._stopped = time.monotonic(), self._running()
            close(number, grace_s)  # type: ignore[arg-type]  # seconds, whole or not

        self._pcontext.close = closed  # type: ignore
        self._failed_s, self._stopped_s = None, None
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, self._told_to_end)  # replaces PyTorch's handler
        return started

    def _told_to_end(self, number: int, frame: FrameType | None) -> None:
        """On SIGTERM, let the processes save their work and end. A second SIGTERM does not shorten their grace."""
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
        raise SignalException(f"stopped by {number}", signal.Signals(number))

    def leave(self) -> None:
        """Announce to the other hosts that this one begins no further attempt."""
        with contextlib.suppress(
            torch.distributed.DistError
        ):  # the host that serves the store has left already
            self._meeting.shutdown()

    def _running(self) -> set[int]:
        """Ids of the processes that still run."""
        handlers = self._pcontext.subprocess_handlers.values()  # type: ignore[union-attr]
        return {handler.proc.pid for handler in handlers if handler.proc.poll() is None}

    def _awaits_cause(self) -> bool:
        """Whether each failure so far is a consequence of another, and a running process may still report the cause.

        PyTorch's agent ends all processes at the first failure. A process that was ended cannot report its cause.
        """
        context: Any = self._pcontext
        codes = {k: h.proc.poll() for k, h in context.subprocess_handlers.items()}
        if None not in codes.values() or not any(codes.values()):
            return False
        if self._failed_s is None:
            self._failed_s = time.monotonic()
        failures = [
            ProcessFailure(k, context.subprocess_handlers[k].proc.pid, code, context.error_files[k])
            for k, code in codes.items()
            if code
        ]
        is_clear = has_cause(self.failure(f.local_rank, f) for f in failures)
        return not is_clear and time.monotonic() - self._failed_s < _CAUSE_S

    def failure(self, rank: int, failure: ProcessFailure) -> Failure:
        """What is known of a failed process: exit code, verdict, time."""
        report = _report(failure)
        time_s, verdict = report.get("time_s", 0.0), report.get("verdict", SILENT)
        was_stopped = self._stopped_s is not None and failure.pid in self._stopped
        if report and was_stopped:
            was_stopped = time_s > self._stopped_s
        return Failure(rank, failure.exitcode, verdict, time_s, was_stopped)

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        if self._awaits_cause():
            return RunResult(state=WorkerState.HEALTHY)
        result: RunResult = super()._monitor_workers(worker_group)
        if result.state == WorkerState.HEALTHY and self._watch is not None:
            pids = {w.local_rank: (w.global_rank, w.id) for w in worker_group.workers}
            self.hang = self._watch.hang(pids)
            if self.hang:
                if self._remaining_restarts:
                    _tell(f"{self.hang}; all are started again")
                return RunResult(state=WorkerState.FAILED)
        return result

    def _shutdown(self, death_sig: Any = None, timeout: Any = None, **more: Any) -> None:
        """End the processes. `death_sig` is the signal that the agent was sent; None if a process has failed."""
        number, grace_s = signal.SIGTERM, _STOP_S
        if self._is_stopping:  # the second signal
            number, grace_s = signal.SIGKILL, 0.0
        elif death_sig is not None:
            self._is_stopping = True
            number = signal.Signals(death_sig)
            grace_s = self._ltc_spec.grace_s if number == signal.SIGTERM else _STOP_S
        began = time.monotonic()
        if self._pcontext is not None:
            self._pcontext.close(number, grace_s)  # type: ignore[arg-type]  # seconds, whole or not
        if death_sig is not None and grace_s and time.monotonic() - began > grace_s:
            self.stop_words = f"; what still ran after {grace_s:g} s was killed"


def command(spec: Spec, parent_pid: int, beats: str = "") -> list[str]:
    """Arguments of Python in each process, which ends when the process `parent_pid` ends.

    Args:
        beats: the directory where it writes its steps.
    """
    flags = ["-m"] if spec.is_module else []
    return ["-m", "ltc_launch.shim", str(parent_pid), beats, *flags, spec.target, *spec.args]


def variables(spec: Spec) -> dict[str, str]:
    """Environment variables of the processes, besides PyTorch's contract, which the agent sets."""
    found = dict(spec.env)
    if "OMP_NUM_THREADS" not in os.environ:
        found.setdefault("OMP_NUM_THREADS", str(child.num_threads(spec.nprocs)))
    if spec.nnodes == 1:
        found.setdefault("GLOO_SOCKET_IFNAME", "lo")
    if spec.nprocs > 1:
        found.setdefault("LTC_NUM_DEVICES", "1")
    if spec.devices:
        found["LTC_DEVICES"] = spec.devices
    if spec.compat:
        found["LTC_COMPAT"] = "1"
        if "LTC_DEVICE_NAME" not in os.environ:
            found.setdefault("LTC_DEVICE_NAME", expected_by(spec.target))
    return found


@contextlib.contextmanager
def _log_dir(spec: Spec) -> Iterator[str]:
    if spec.log_dir:
        os.makedirs(spec.log_dir, mode=0o700, exist_ok=True)
        yield spec.log_dir
        return
    _sweep()
    found = tempfile.mkdtemp(prefix=f"{_TEMPORARY}{os.getpid()}-")
    try:
        yield found
    finally:
        shutil.rmtree(found, ignore_errors=True)


def _sweep() -> None:
    """Remove the temporary directories of launchers that were killed."""
    for path in Path(tempfile.gettempdir()).glob(f"{_TEMPORARY}*"):
        pid = path.name.removeprefix(_TEMPORARY).partition("-")[0]
        if (
            pid.isdecimal()
            and not psutil.pid_exists(int(pid))
            and path.stat().st_uid == os.getuid()
        ):
            shutil.rmtree(path, ignore_errors=True)


# -- how it ended ----------------------------------------------------------------------------------


def _tell(text: str) -> None:
    sys.stdout.flush()
    print(f"ltc-launch: {text}", file=sys.stderr, flush=True)


def _report(failure: ProcessFailure) -> dict[str, Any]:
    message = failure.error_file_data.get("message", {})
    info = message.get("extraInfo", {}) if isinstance(message, dict) else {}
    return info if "time_s" in info else {}


def _told(agent: Agent, failures: dict[int, ProcessFailure]) -> int:
    """Report which process failed first, and how; return the exit code."""
    first = first_failure(agent.failure(rank, failure) for rank, failure in failures.items())
    report, code = _report(failures[first.rank]), first.exitcode
    how = how_it_ended(code)
    if code == -signal.SIGKILL:
        how += "; if nobody did that, the machine was out of memory"
    if "py_callstack" in report:
        print(report["py_callstack"], file=sys.stderr, end="")
        how, code = "raised this", report["exit_code"]
    _tell(f"rank {first.rank} (pid {failures[first.rank].pid}) {how}; the others were stopped")
    return code if code > 0 else 128 - code
