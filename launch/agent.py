"""Run a `Spec`: PyTorch's elastic agent starts and monitors the processes; this file reports how they ended.

The exit code is that of the process that failed first; its traceback is printed once, at the end. PyTorch's
`elastic_launch`, one level above the agent, is not used: it has one grace for all, so processes that wait for a dead
one would be given as long as those that save their work. Called by `cli`; uses `rendezvous` and `heartbeat`; each
process begins in `shim`. What the processes print is read by `output`.
"""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from dataclasses import dataclass
from functools import partial
from types import FrameType
from typing import Any

import torch.distributed
from torch.distributed.elastic.agent.server.api import (
    RunResult,
    WorkerGroup,
    WorkerSpec,
    WorkerState,
)
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing import (
    DefaultLogsSpecs,
    LogsDest,
    SignalException,
    Std,
)
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure
from torch.distributed.elastic.rendezvous import RendezvousError

from ltc_core.errors import first_line
from ltc_core.settings import settings
from ltc_dist.expected_name import expected_by
from ltc_dist.job import host_collectives
from ltc_dist.processes import child
from ltc_dist.processes.failures import after, how_it_ended
from ltc_dist.processes.supervision import Supervision
from ltc_dist.processes.zygote import Zygote, can_fork

from . import early, heartbeat, rendezvous, status, temporary, user_signals
from .early import SHIM, Early
from .forked import handlers_of
from .output import Output
from .spec import Spec

__all__ = ["HANG", "command", "run", "variables"]

HANG = 124  # exit code of a hang, as of `timeout`
_STOP_S = 3.0  # between SIGTERM and SIGKILL, if another process has failed
_INTERRUPT_S = 10.0  # between SIGINT and SIGKILL; a second Ctrl-C ends it
_MONITOR_S = 0.1
c10d: Any = torch.distributed  # the stubs of its types are incomplete


def run(spec: Spec, fork: Early | None = None) -> int:
    """Launch the processes, wait for their end, report it.

    Args:
        fork: that the processes are to be forks of.

    Returns:
        The exit code: 0; that of the process that failed first; 128 + the signal that killed it or stopped this one;
        124 for a hang; 75 if the hosts cannot be connected.
    """
    logging.disable(
        logging.ERROR
    )  # PyTorch's agent logs failures, too: they are reported once, below
    child.write_lines()
    os.environ.update(variables(spec))
    zygote = None
    if fork is not None:
        zygote = Zygote(fork.connection, fork.pid)
        if can_fork():
            fork.begin(os.environ)
        else:
            zygote.close()  # then it forks nothing
    is_terminal = status.is_worth_it()
    if spec.watch and not is_terminal:
        _tell("--watch shows nothing: the output goes to no terminal. Next: python -m ltc_core.top")
    is_viewed = is_terminal and spec.watch
    is_counted = is_terminal and spec.nprocs * spec.nnodes > 1 and not is_viewed
    with temporary.directory() as own:
        log_dir = os.path.abspath(spec.log_dir) if spec.log_dir else own
        # Not in --log-dir, which hosts may share: a beat is a time on the clock of one host.
        wants_beats = is_counted or spec.watch or spec.hang_timeout_s
        beats = os.path.join(own, "beats") if wants_beats else ""
        if beats:
            os.mkdir(beats, mode=0o700)
        line: contextlib.AbstractContextManager[None] = contextlib.nullcontext()
        if is_viewed or (spec.watch and "LTC_WATCH" not in os.environ):
            # Of the processes: they publish their states beside the beats, where ltc_core.top looks, too.
            os.environ["LTC_WATCH"] = beats
        if is_viewed:
            line = status.shown(status.live_view(beats, rendezvous.awaited))
        elif is_counted:
            steps = partial(heartbeat.steps, beats)
            line = status.shown(status.line_of_steps(steps, rendezvous.awaited))
        agent = None
        try:
            _end_when_told()  # also while this host waits for the others
            with line:
                agent = Agent(spec, log_dir, beats, zygote)
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
            _tell(f"the hosts of {spec.endpoint} cannot be connected: {first_line(error)}")
            return os.EX_TEMPFAIL
        finally:
            if agent is not None:
                agent.hosts.stop()
            if zygote is not None:
                zygote.close()
            sys.stdout.flush()
        if not result.is_failed():
            return 0
        if agent.hang:
            _tell(f"{agent.hang}; all were stopped")
            return HANG
        return _tell_first_failure(agent.supervision, log_dir)


def _end_when_told() -> None:
    """Have SIGTERM and SIGHUP end `run`; what is ignored stays so."""
    if threading.current_thread() is threading.main_thread():
        for number in (signal.SIGTERM, signal.SIGHUP):
            if signal.getsignal(number) != signal.SIG_IGN:
                signal.signal(number, _told_to_end)


def _told_to_end(number: int, frame: FrameType | None) -> None:
    """On SIGTERM, let the processes save their work and end. A second SIGTERM does not shorten their grace."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    raise SignalException(f"stopped by {number}", signal.Signals(number))


class Agent(LocalElasticAgent):
    """PyTorch's agent for one host, with detection of hangs, and a grace that depends on why processes are ended.

    Args:
        beats: the directory where processes write their steps; empty if nobody reads it.
        zygote: that forks the processes; without it each starts from nothing.

    Attributes:
        hosts: the rendezvous with the other hosts.
        supervision: of the processes of the newest attempt.
        hang: the sentence about the processes that hung, if that ended the job.
        stop_words: the words about processes that had to be killed when the launcher was stopped.
    """

    def __init__(self, spec: Spec, log_dir: str, beats: str, zygote: Zygote | None = None) -> None:
        self._ltc_spec = spec
        self._log_dir = log_dir
        self._zygote = zygote
        self._beats = beats
        self._watch: heartbeat.Watch | None = None
        self._is_stopping = False
        self.supervision: Supervision[_Launched] = Supervision([], self._tell_ended)
        self.hang = ""
        self.stop_words = ""
        self.hosts = rendezvous.handler(spec)
        workers: Any = WorkerSpec(
            role="default",
            local_world_size=spec.nprocs,
            entrypoint=sys.executable,
            args=tuple(command(spec, os.getpid(), beats)),
            rdzv_handler=self.hosts,
            max_restarts=spec.max_restarts,
            monitor_interval=_MONITOR_S,
        )
        self._logs = _Logs(spec, log_dir)
        logs: Any = self._logs
        super().__init__(workers, logs)
        user_signals.forward_to(self._pids)

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        if self._ltc_spec.hang_timeout_s:
            self._watch = heartbeat.Watch(self._beats, self._ltc_spec.hang_timeout_s)
        with user_signals.starting(), handlers_of(self._zygote):
            started: dict[int, Any] = super()._start_workers(worker_group)
        context: Any = self._pcontext
        handlers = context.subprocess_handlers
        for handler in handlers.values():
            for file in (handler._stdout, handler._stderr):  # else their pipes would never end
                if file is not None:
                    file.close()
        supervision = self.supervision = Supervision(
            [
                _Launched(w.global_rank, handlers[k].proc, context.error_files[k])
                for w in worker_group.workers
                for k in [w.local_rank]
            ],
            self._tell_ended,
        )
        user_signals.forward_to(self._pids)
        output = self._logs.output
        output.start()
        # When PyTorch finds a failed process, it closes the others by itself, with a grace of 30 s: too long. It makes
        # the context itself too, so the method is replaced.
        close = context.close

        def closed(number: Any = None, grace_s: float = _STOP_S) -> None:
            with supervision.ending(grace_s):
                close(number, grace_s)
            output.stop()

        context.close = closed
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, _told_to_end)  # replaces PyTorch's handler
        return started

    def leave(self) -> None:
        """Announce to the other hosts that this one begins no further attempt."""
        with contextlib.suppress(
            torch.distributed.DistError
        ):  # the host that serves the store has left already
            self.hosts.shutdown()

    def _pids(self) -> set[int]:
        """Ids of the processes that still run."""
        return {process.pid for process in self.supervision.running()}

    def _tell_ended(self, rank: int) -> None:
        """Write `ended` into the store for a rank that has vanished: others may wait for it."""
        group = self._worker_group
        attempt = group.spec.max_restarts - self._remaining_restarts
        with contextlib.suppress(torch.distributed.DistError):  # its host has ended
            store = c10d.TCPStore(group.master_addr, group.master_port, is_master=False)
            host_collectives.tell_ended(rank, store, self._ltc_spec.nnodes == 1, attempt)

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        self.supervision.tell_vanished()
        if self.supervision.awaits_cause():
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

    def _restart_workers(self, worker_group: WorkerGroup) -> None:
        if not self.hang and self.supervision.first_failure() is not None:
            _tell_first_failure(self.supervision, self._log_dir, "all are started again")
        super()._restart_workers(worker_group)

    def _shutdown(self, death_sig: Any = None, timeout: Any = None, **more: Any) -> None:
        """End the processes. `death_sig` is the signal that the agent was sent; None if a process has failed."""
        number, grace_s = signal.SIGTERM, _STOP_S
        if self._is_stopping:  # the second signal
            number, grace_s = signal.SIGKILL, 0.0
        elif death_sig is not None:
            self._is_stopping = True
            number = signal.Signals(death_sig)
            grace_s = self._ltc_spec.grace_s if number == signal.SIGTERM else _INTERRUPT_S
        began = time.monotonic()
        if self._pcontext is not None:
            self._pcontext.close(number, grace_s)  # type: ignore[arg-type]  # seconds, whole or not
        if death_sig is not None and grace_s and time.monotonic() - began > grace_s:
            self.stop_words = f"; what still ran after {grace_s:g} s was killed"


@dataclass(frozen=True)
class _Reported:
    """What a process has written into its error file.

    Attributes:
        exit_code: of its exception; the agent may have killed it before it could end with that.
        text: its traceback; empty for an exit code alone.
    """

    verdict: str
    time_s: float
    exit_code: int = 0
    text: str = ""


class _Launched:
    """A process of the launcher.

    Args:
        error_file: where it reports how it ends.
    """

    def __init__(self, rank: int, process: subprocess.Popen[bytes], error_file: str) -> None:
        self.rank = rank
        self._process = process
        self._error_file = error_file
        self._reported: _Reported | None = None

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def exitcode(self) -> int | None:
        return self._process.poll()

    def report(self) -> _Reported | None:
        if self._reported is None:
            failure = ProcessFailure(0, self.pid, self.exitcode or 0, self._error_file)
            message = failure.error_file_data.get("message", {})
            info = message.get("extraInfo", {}) if isinstance(message, dict) else {}
            if "time_s" in info:
                code, text = info.get("exit_code", 0), info.get("py_callstack", "")
                self._reported = _Reported(info["verdict"], info["time_s"], code, text)
        return self._reported

    def has_left(self) -> bool:
        return os.path.exists(child.left_mark(self._error_file))


class _Logs(DefaultLogsSpecs):
    """Where the processes print to, and where they report how they end.

    Attributes:
        output: prints what the processes of the newest attempt print.
    """

    def __init__(self, spec: Spec, log_dir: str) -> None:
        super().__init__(log_dir, redirects=Std.ALL if spec.log_dir else Std.NONE)
        self._spec = spec
        self.output = Output()

    def reify(self, envs: dict[int, dict[str, str]]) -> LogsDest:
        self.output.stop()
        self.output = output = Output()
        found = super().reify(envs)
        # Below a live view processes do not print to the terminal themselves: it would be drawn over.
        is_piped = self._spec.prefix or (self._spec.watch and status.is_worth_it())
        shows = self._spec.tee if self._spec.log_dir else is_piped
        for paths, stream in ((found.stdouts, sys.stdout), (found.stderrs, sys.stderr)):
            for local_rank in paths if shows else ():
                prefix = f"[{envs[local_rank]['RANK']}] " if self._spec.prefix else ""
                if self._spec.log_dir:
                    output.file(paths[local_rank], prefix, stream)
                else:
                    paths[local_rank] = output.pipe(prefix, stream)
        return found


def command(spec: Spec, parent_pid: int, beats: str = "") -> list[str]:
    """Arguments of Python in each process, which ends when the process `parent_pid` ends.

    Args:
        beats: the directory where it writes its steps.
    """
    flags = ["-m"] if spec.is_module else []
    # -P: no imports from the working directory, where a file may have the name of a module that PyTorch imports.
    return ["-P", "-m", SHIM, str(parent_pid), beats, *flags, spec.target, *spec.args]


def variables(spec: Spec) -> dict[str, str]:
    """Environment variables of the processes, besides PyTorch's contract, which the agent sets."""
    found = early.variables(spec)
    if spec.nnodes == 1:
        found.setdefault("GLOO_SOCKET_IFNAME", "lo")
    if spec.nprocs > 1 and not settings.spmd:
        found.setdefault("LTC_NUM_DEVICES", "1")
    if spec.devices:
        found["LTC_DEVICES"] = spec.devices
    if spec.compat:
        found["LTC_COMPAT"] = "1"
        if "LTC_DEVICE_NAME" not in os.environ:
            found.setdefault("LTC_DEVICE_NAME", expected_by(spec.target))
    return found


# -- how it ended ----------------------------------------------------------------------------------


def _tell(text: str) -> None:
    sys.stdout.flush()
    print(f"ltc-launch: {text}", file=sys.stderr, flush=True)


def _tell_first_failure(
    supervision: Supervision[_Launched],
    log_dir: str,
    consequence: str = "the others were stopped",
) -> int:
    """Report which process failed first, and how; return the exit code."""
    first = supervision.first_failure()
    assert first is not None
    process, code = supervision.processes[first.rank], first.exitcode
    report, how = process.report(), how_it_ended(code)
    if code == 0:  # it has vanished
        code = 1
    elif report is not None and report.text:
        print(report.text, file=sys.stderr, end="")
        how, code = "raised this", report.exit_code
    elif code == -signal.SIGKILL:
        how += "; if nobody did that, the machine was out of memory"
    elif report is None and not shutil.disk_usage(log_dir).free:
        how += f"; it could not say why, for {log_dir} is full"
    how += after(supervision.ended_before(first))
    _tell(f"rank {first.rank} (pid {process.pid}) {how}; {consequence}")
    return code if code > 0 else 128 - code
