"""Run a `Spec`: PyTorch's elastic agent starts and watches the processes, we say how they ended.

On one host the job's store listens on the loopback interface only. The exit code is that of the process that failed
first; its traceback comes last, and once. Comes from `spec`; each process begins in `shim`.
"""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
import shutil
import signal
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import fields
from typing import Any

import torch.distributed
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException, Std
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure
from torch.distributed.elastic.rendezvous import (
    RendezvousHandler,
    RendezvousInfo,
    RendezvousParameters,
    RendezvousStoreInfo,
    rendezvous_handler_registry,
)
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from ltc_dist import worker
from ltc_dist.failures import Failure, first_failure, how_it_ended
from ltc_dist.loopback import LOOPBACK, serve_store

from .spec import Spec

__all__ = ["command", "run", "variables"]

_BACKEND = "ltc-loopback"
c10d: Any = torch.distributed  # its stubs lack what is used here


class LoopbackRendezvous(RendezvousHandler):
    """One host: the agent serves the store, on the loopback interface."""

    def __init__(self, run_id: str) -> None:
        self._run_id = run_id
        self._store, self._port = serve_store()
        self._is_closed = False

    @property
    def use_agent_store(self) -> bool:
        return True

    def get_backend(self) -> str:
        return _BACKEND

    def next_rendezvous(self) -> RendezvousInfo:
        store = c10d.PrefixStore(self._run_id, self._store)
        return RendezvousInfo(store, 0, 1, RendezvousStoreInfo(LOOPBACK, self._port))

    def is_closed(self) -> bool:
        return self._is_closed

    def set_closed(self) -> None:
        self._is_closed = True

    def num_nodes_waiting(self) -> int:
        return 0

    def get_run_id(self) -> str:
        return self._run_id

    def shutdown(self) -> bool:
        self._is_closed = True
        return True


def _register() -> None:
    with contextlib.suppress(ValueError):  # it is registered already
        rendezvous_handler_registry.register(_BACKEND, _make_loopback)


def _make_loopback(parameters: RendezvousParameters) -> RendezvousHandler:
    return LoopbackRendezvous(parameters.run_id)


def run(spec: Spec) -> int:
    """Launch, wait, tell how it ended; give the exit code.

    Returns:
        0, the exit code of the process that failed first, 128 + the signal that killed it or this one.
    """
    _register()
    os.environ.update(variables(spec))
    with _log_dir(spec) as log_dir:
        launch = elastic_launch(_config(spec, log_dir), sys.executable)
        try:
            launch(*command(spec, os.getpid()))
        except ChildFailedError as failed:
            sys.stdout.flush()
            return _told(failed.failures)
        except SignalException as stopped:
            number = int(stopped.sigval)
            print(f"ltc-launch: stopped by {signal.Signals(number).name}", file=sys.stderr)
            return 128 + number
    return 0


def command(spec: Spec, parent_pid: int) -> list[str]:
    """Give the arguments of the Python that runs in each process; it ends with `parent_pid`."""
    flags = ["-m"] if spec.is_module else []
    return ["-m", "ltc_launch.shim", str(parent_pid), *flags, spec.target, *spec.args]


def variables(spec: Spec) -> dict[str, str]:
    """Give what the processes find besides PyTorch's contract, which the agent sets."""
    found = dict(spec.env)
    if "OMP_NUM_THREADS" not in os.environ:
        found.setdefault("OMP_NUM_THREADS", str(worker.num_threads(spec.nprocs)))
    if spec.nnodes == 1:
        found.setdefault("GLOO_SOCKET_IFNAME", "lo")
    if spec.nprocs > 1:
        found.setdefault("LTC_NUM_DEVICES", "1")
    return found


@contextlib.contextmanager
def _log_dir(spec: Spec) -> Iterator[str]:
    if spec.log_dir:
        os.makedirs(spec.log_dir, mode=0o700, exist_ok=True)
        yield spec.log_dir
        return
    found = tempfile.mkdtemp(prefix="ltc-launch-")
    try:
        yield found
    finally:
        shutil.rmtree(found, ignore_errors=True)


def _config(spec: Spec, log_dir: str) -> LaunchConfig:
    logging.disable(logging.ERROR)  # of this process, the launcher: how it ended is told here, once
    one_host = spec.nnodes == 1
    options: dict[str, Any] = {
        "min_nodes": spec.nnodes,
        "max_nodes": spec.nnodes,
        "nproc_per_node": spec.nprocs,
        "logs_specs": DefaultLogsSpecs(
            log_dir, tee=Std.ALL if spec.prefix or spec.log_dir else Std.NONE
        ),
        "log_line_prefix_template": "[${rank}] " if spec.prefix else "",
        # The same on all hosts, and another one for each launch on one host.
        "run_id": secrets.token_hex(16) if one_host else f"ltc-{spec.endpoint}",
        "rdzv_backend": _BACKEND if one_host else spec.backend,
        "rdzv_endpoint": "" if one_host else spec.endpoint,
        "rdzv_configs": {} if one_host else {"rank": spec.node_rank, "timeout": 900},
        "max_restarts": spec.max_restarts,
        "monitor_interval": 0.1,
    }
    if any(f.name == "shutdown_timeout" for f in fields(LaunchConfig)):  # not in torch 2.9
        options["shutdown_timeout"] = max(1, round(spec.grace_s))
    return LaunchConfig(**options)


# -- how it ended ----------------------------------------------------------------------------------


def _report(failure: ProcessFailure) -> dict[str, Any]:
    message = failure.error_file_data.get("message", {})
    info = message.get("extraInfo", {}) if isinstance(message, dict) else {}
    return info if "time_s" in info else {}


def _told(failures: dict[int, ProcessFailure]) -> int:
    """Tell which process failed first, and how; give the exit code."""
    reports = {rank: _report(failure) for rank, failure in failures.items()}
    first = first_failure(
        (
            Failure(rank, failure.exitcode, reports[rank].get("time_s"))
            for rank, failure in failures.items()
        ),
        stops_with=signal.SIGTERM,
    )
    report, code = reports[first.rank], first.exitcode
    how = how_it_ended(code)
    if code == -signal.SIGKILL:
        how += "; if nobody did that, the machine was out of memory"
    if report:
        print(report["py_callstack"], file=sys.stderr, end="")
        how = "raised this"
    print(
        f"ltc-launch: rank {first.rank} (pid {failures[first.rank].pid}) {how}; the others were stopped",
        file=sys.stderr,
    )
    return code if code > 0 else 128 - code
