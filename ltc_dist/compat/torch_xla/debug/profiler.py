"""`xp`: `torch_xla.debug.profiler`, over `ltc_core.profiler`. Traces are made in the process itself; no port is opened.

As there, `torch_xla.sync()` inside an open `Trace` is an error.
"""

from __future__ import annotations

import os
import socket
import sys
import threading
from collections.abc import Callable
from types import TracebackType
from typing import Self

import ltc_core.profiler
import ltc_dist as ltd
from ltc_core.profiler import Function, ProfilerError, stop_trace
from ltc_dist.compat import scopes
from ltc_dist.compat.xplanes import write_planes

__all__ = [
    "ProfilerServer",
    "StepTrace",
    "Trace",
    "start_server",
    "start_trace",
    "stop_trace",
    "trace",
    "trace_detached",
    "trace_me",
]

_told = False


class Trace(ltc_core.profiler.Trace):
    """A named scope of a trace, as a `with` block; see `ltc_core.profiler.Trace`. No step ends inside of it."""

    def __enter__(self) -> Self:
        scopes.open_scope(self.name)
        super().__enter__()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        scopes.close_scope()
        super().__exit__(kind, error, traceback)


class StepTrace(Trace, ltc_core.profiler.StepTrace):
    """A scope of one step: its end calls `torch_xla.sync`."""


def trace_me(scope: str) -> Callable[[Function], Function]:
    """Make each call of a function a `Trace` of that name."""
    return ltc_core.profiler.trace_me(scope, Trace)


class ProfilerServer:
    """Placeholder for the server that a script starts and keeps; it opens no port."""


def start_server(port: int, only_on_master: bool = True) -> ProfilerServer | None:
    """Open no port, and say so once on stderr.

    Args:
        port: of a server that would be asked for traces.
        only_on_master: return None in all but the first process of a host.
    """
    global _told
    if only_on_master and not ltd.is_master_ordinal():
        return None
    if not _told:
        _told = True
        print(
            f"ltc: no profiler listens on port {port}: a script traces itself, between start_trace(directory) and "
            "stop_trace() of this module, or with trace_detached('localhost', directory).",
            file=sys.stderr,
            flush=True,
        )
    return ProfilerServer()


def start_trace(log_dir: str | os.PathLike[str]) -> None:
    """Start to trace this process; `stop_trace` writes the file of PyTorch's profiler and an `.xplane.pb` like it.

    Raises:
        ProfilerError: a profile is running already, or `log_dir` is not on this machine.
    """
    ltc_core.profiler.start_trace(log_dir, write_planes)


def trace(
    service_addr: str,
    logdir: str | os.PathLike[str],
    duration_ms: int = 1000,
    num_tracing_attempts: int = 3,
    host_tracer_level: int = 2,
    device_tracer_level: int = 1,
    delay_ms: int = 0,
    timeout_s: int = 120,
    interval_s: int = 5,
) -> None:
    """Trace this process for a while; the other arguments are accepted.

    Args:
        service_addr: 'localhost:9012', or another name of this machine; the port has no effect.
        logdir: where the file goes.
        duration_ms: how long.
        delay_ms: when to begin.

    Raises:
        ProfilerError: the address is another machine's, or a profile is running already.
    """
    _check_is_here(service_addr)
    ltc_core.profiler.trace(logdir, duration_ms, delay_ms, write_planes)


def trace_detached(
    service_addr: str,
    logdir: str | os.PathLike[str],
    duration_ms: int = 1000,
    num_tracing_attempts: int = 3,
    host_tracer_level: int = 2,
    device_tracer_level: int = 1,
    delay_ms: int = 0,
    timeout_s: int = 120,
    interval_s: int = 5,
) -> None:
    """Trace this process for a while, in the background; see `trace`. The interpreter's exit waits for it."""
    _check_is_here(service_addr)
    threading.Thread(
        target=ltc_core.profiler.trace,
        args=(logdir, duration_ms, delay_ms, write_planes),
        name="ltc-tracing",
    ).start()


def _check_is_here(service_addr: str) -> None:
    here = ("", "localhost", "127.0.0.1", "0.0.0.0", "[::1]", "[::]", socket.gethostname())
    for address in service_addr.split(","):
        host, colon, _ = address.strip().rpartition(":")
        if (host if colon else address.strip()) not in here:
            raise ProfilerError(
                "a process traces itself only",
                got=f"{address.strip()}, expected localhost",
                next="call trace, or start_trace and stop_trace, in the process that is to be traced",
            )
