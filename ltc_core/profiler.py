"""Traces of a program and named scopes in them, over `torch.profiler`; timelines and curves of a whole run.

Between `start_trace` and `stop_trace` all threads are traced: ops when they are recorded, ops when the worker thread
runs them, and the scopes of `Trace` and `StepTrace`. The result is a file for TensorBoard, Perfetto and
chrome://tracing. A `timeline` has no ops and costs little: it is for every step of a run.
"""

from __future__ import annotations

import abc
import functools
import html
import os
import socket
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeVar

import torch
from torch.autograd import profiler as _flag

from ltc_core.api.verbs import mark_step
from ltc_core.errors import ProfilerError
from ltc_core.live.scalars import Scalars
from ltc_core.report import recording
from ltc_core.report.build import PAGE
from ltc_core.runtime.devices import become_idle, contexts
from ltc_core.timeline import slices

__all__ = [
    "ProfilerError",
    "report",
    "StepTrace",
    "Trace",
    "start_trace",
    "stop_trace",
    "tensorboard",
    "timeline",
    "trace",
    "trace_me",
]

Function = TypeVar("Function", bound=Callable[..., Any])

_lock = threading.Lock()
_running: torch.profiler.profile | None = None


# -- traces --------------------------------------------------------------------------------------


def start_trace(
    log_dir: str | os.PathLike[str], convert: Callable[[Path], object] | None = None
) -> None:
    """Start to trace all threads of this process.

    Args:
        log_dir: the directory the file is written to; made if it does not exist.
        convert: called with the file when it is written.

    Raises:
        ProfilerError: a profile is running already, or `log_dir` is not on this machine.

    Cost: each op takes a few microseconds more; a trace that is still running at exit is written then.
    """
    global _running
    directory = os.fspath(log_dir)
    if "://" in directory:
        raise ProfilerError(
            "a trace cannot be written to another machine",
            got=directory,
            next="name a directory of this one, and copy the file",
        )
    with _lock:
        if _running is not None or _is_watched():
            raise ProfilerError(
                "Profile has already been started. Only one profile may be run at a time.",
                next="call stop_trace() first",
            )
        os.makedirs(directory, exist_ok=True)
        # Without this, only the thread that starts the profile is traced, and not the worker thread.
        every_thread = torch._C._profiler._ExperimentalConfig(profile_all_threads=True)
        # Explicit: by default PyTorch profiles our device, too, and synchronizes it, which cuts the graph.
        activities = [torch.profiler.ProfilerActivity.CPU]
        if torch.cuda.is_available():
            activities.append(torch.profiler.ProfilerActivity.CUDA)
        profile = torch.profiler.profile(
            activities=activities,
            experimental_config=every_thread,
            on_trace_ready=functools.partial(_write, Path(directory), convert),
        )
        profile.start()
        _running = profile


def _write(
    directory: Path,
    convert: Callable[[Path], object] | None,
    profile: torch.profiler.profile,
) -> None:
    """Write a profile under the name that TensorBoard's handler of PyTorch gives it."""
    name = f"{socket.gethostname()}_{os.getpid()}.{time.time_ns()}.pt.trace.json"
    profile.export_chrome_trace(str(directory / name))
    if convert is not None:
        convert(directory / name)


def stop_trace() -> None:
    """End the trace and write `<host>_<pid>.<time>.pt.trace.json`.

    Raises:
        ProfilerError: no trace is running.

    Cost: waits for the programs that were handed over, so that they are in the trace; does not cut.
    """
    global _running
    with _lock:
        if _running is None:
            raise ProfilerError("No profile started", next="call start_trace(directory) before")
        _drain()
        profile, _running = _running, None
        profile.stop()


def trace(
    log_dir: str | os.PathLike[str],
    duration_ms: float = 1000,
    delay_ms: float = 0,
    convert: Callable[[Path], object] | None = None,
) -> None:
    """Trace the other threads while this one sleeps.

    Args:
        log_dir: as for `start_trace`.
        duration_ms: length of the trace.
        delay_ms: time before the trace starts.
        convert: as for `start_trace`.

    Raises:
        ProfilerError: as `start_trace`.
    """
    time.sleep(delay_ms / 1000)
    start_trace(log_dir, convert)
    time.sleep(duration_ms / 1000)
    stop_trace()


def _is_watched() -> bool:
    """Whether a profiler runs, ours or PyTorch's own."""
    return _flag._is_profiler_enabled


def at_exit() -> None:
    if _running is not None:
        stop_trace()
    for scalars in list(_written):
        try:
            scalars.stop()
        except ProfilerError as error:
            print(f"ltc: {error}", file=sys.stderr, flush=True)


def _drain() -> None:
    """Wait for the programs that were handed over, so that they are in what is recorded.

    Not for those that wait for this thread, as one of another replica may.
    """
    become_idle(contexts())


class _Recorded(abc.ABC):
    """A part of a run that is recorded: a `with` block, or what is between `start` and `stop`."""

    @abc.abstractmethod
    def start(self) -> None: ...

    @abc.abstractmethod
    def stop(self) -> None: ...

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.stop()


class timeline(_Recorded):
    """Records what the runtime does and when into a trace-event file; a context manager, also `start` and `stop`.

    Args:
        path: the file, for ui.perfetto.dev and chrome://tracing. In a job each rank writes one of its own
            (run.rank0.json for run.json), and the last rank to stop merges them.

    Raises:
        ProfilerError: a timeline is recorded already, or the file cannot be written.

    Cost: 1 to 2 us a slice, and 3 us of another thread to write it. `stop` waits for the programs that were handed
        over, and does not cut.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self._path = os.fspath(path)

    def start(self) -> None:
        slices.start(self._path)

    def stop(self) -> None:
        _drain()
        slices.stop()


class report(timeline):
    """Records a report of what runs in a `with` block, also by `start` and `stop`: one HTML file for a browser.

    It shows steps, programs and their graphs, time and memory by line, waits, transfers and ranks. Names of modules are
    known for graphs that are recorded from here on.

    Args:
        path: a directory; made if it does not exist. In a job each rank writes into it, and the last rank to stop
            makes `report.html`.

    Raises:
        ProfilerError: a report or a timeline is recorded already, or the directory cannot be written.

    Cost: a `timeline`, 20 us for each op of a new program, and 0.5 s to make the page, more for long runs.
    """

    def start(self) -> None:
        recording.start(self._path)

    def stop(self) -> None:
        _drain()
        recording.stop()

    def _repr_html_(self) -> str:
        """The page, as a notebook shows it: steps, graphs and all."""
        page = Path(self._path, PAGE)
        if not page.exists():
            return f"<p>There is no {html.escape(str(page))} yet: it is made when the report stops.</p>"
        text = html.escape(page.read_text(encoding="utf-8"))
        return (
            f'<iframe sandbox="allow-scripts" width="100%" height="760" srcdoc="{text}"></iframe>'
        )


class tensorboard(_Recorded):
    """Writes scalars of the run for TensorBoard; a context manager, also `start` and `stop`.

    Steps a second, milliseconds a step, shares of time spent waiting, memory, programs, compiles and fallbacks, each
    over the step. Steps quicker than `every_s` share a point.

    Args:
        log_dir: the directory of the event files. In a job each rank has one of its own in it: rank0, rank1, ...
        every_s: seconds between two points at least; 0 for one at each step that is found 50 times a second.

    Raises:
        ProfilerError: the package `tensorboard` is not installed, the directory cannot be written to, or scalars are
            written already.

    Cost: 1 ms a point, in a thread of its own; importing TensorBoard takes a second. `stop` waits for the programs that
        were handed over, and does not cut.
    """

    def __init__(self, log_dir: str | os.PathLike[str], every_s: float = 1.0) -> None:
        self._directory = os.fspath(log_dir)
        self._every_s = every_s
        self._scalars: Scalars | None = None

    def start(self) -> None:
        if self._scalars is not None:
            raise ProfilerError(
                "scalars for TensorBoard are written already",
                got=self._directory,
                next="call stop() before",
            )
        self._scalars = Scalars(self._directory, self._every_s)
        _written.append(self)

    def stop(self) -> None:
        found, self._scalars = self._scalars, None
        if found is None:
            raise ProfilerError("no scalars are written", next="call start() before")
        _written.remove(self)
        _drain()
        found.stop()


_written: list[tensorboard] = []  # those that are under way


# -- scopes --------------------------------------------------------------------------------------


class Trace:
    """A named scope of a trace, as a `with` block. The step may end inside of it.

    Args:
        name: shown in the trace, with `#3` for step_num=3 and ` key=value` for each other argument.

    Cost: 1 us while nothing is traced, 11 us while something is.
    """

    def __init__(self, name: str, **kwargs: Any) -> None:
        step = kwargs.pop("step_num", None)
        self.name = name if step is None else f"{name}#{step}"
        self.name += "".join(f" {key}={value}" for key, value in kwargs.items())
        self._scope: torch.profiler.record_function | None = None

    def __enter__(self) -> Trace:
        if _is_watched():
            self._scope = torch.profiler.record_function(self.name)
            self._scope.__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        scope, self._scope = self._scope, None
        if scope is not None:
            scope.__exit__(kind, error, traceback)


class StepTrace(Trace):
    """A scope of one step: its end calls `mark_step`.

    A loader cuts again at its next batch; nothing is recorded then, so that no graph runs.
    """

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        try:
            mark_step()
        finally:
            super().__exit__(kind, error, traceback)


def trace_me(scope: str, kind: type[Trace] = Trace) -> Callable[[Function], Function]:
    """Make each call of a function a `Trace` of that name.

    Args:
        kind: `Trace`, or a subclass of it.
    """

    def decorate(function: Function) -> Function:
        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            with kind(scope):
                return function(*args, **kwargs)

        return call  # type: ignore[return-value]

    return decorate
