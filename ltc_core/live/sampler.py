"""Reads what this process does into a `State`, from counters that exist.

Nothing is counted for it: the steps, queues, memory and programs are those of the devices'
contexts, times are those of `metrics`, and `timeline.marks` say what each thread does now.
`publisher` and `scalars` call it, in threads of their own.
"""

from __future__ import annotations

import os
import socket
import sys
import threading
import time
from collections import deque
from pathlib import Path
from typing import NamedTuple

import psutil

from ltc_core import metrics
from ltc_core.debug import explain
from ltc_core.live.state import State, Wait
from ltc_core.runtime.devices import contexts
from ltc_core.settings import rank_in_job
from ltc_core.timeline import marks
from ltc_core.timeline.marks import Mark

__all__ = ["RECORDING", "STARTING", "WAITS_FOR_OTHERS", "Sampler", "where"]

RECORDING = "recording"
STARTING = "starting"  # the device has not been used
WAITS_FOR_OTHERS = "waiting for other processes"
_WAITS_FOR_DEVICE = "waiting for the device"
_OTHERS_NAME = "wait for other processes"
_COMPILER = "waiting for the compiler"

# Name and lane of a slice -> words. A slice that is not here is shown by its name.
_WORDS = {
    ("cut", ""): "cutting",
    ("mark_step", ""): "ending a step",
    ("run", ""): "running a program",
    ("run early", ""): "running a program",
    ("run on the CPU", ""): "running an op on the CPU",
    ("fetch", ""): _WAITS_FOR_DEVICE,
    ("wait for the device", ""): _WAITS_FOR_DEVICE,
    ("wait for the worker", ""): _WAITS_FOR_DEVICE,
    ("fetch", "transfers"): "copying from the device",
    ("upload", "transfers"): "copying to the device",
    ("compile", ""): _COMPILER,
    ("wait for the compiler", ""): _COMPILER,
    ("wait for a batch", ""): "waiting for a batch",
    ("read a batch", ""): "waiting for a batch",  # it is read in the thread that asks for it
    (_OTHERS_NAME, ""): WAITS_FOR_OTHERS,
}
# Threads of the runtime: none of them cuts.
_OWN_THREADS = ("ltc-", "prefetch-")
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_PID_SPACE = "/proc/self/ns/pid"


class _Totals(NamedTuple):
    """What grows, at one moment."""

    now_ns: int
    step: int
    cpu_s: float
    batch_ns: float
    device_ns: float
    compiler_ns: float
    others_ns: float


def where() -> str:
    """The host, its boot, and the space of process ids: containers of one host have their own."""
    boot = _BOOT_ID.read_text().strip() if _BOOT_ID.exists() else ""
    space = os.readlink(_PID_SPACE) if os.path.exists(_PID_SPACE) else ""
    return f"{socket.gethostname()} {boot} {space}"


class Sampler:
    """Reads this process. Each reader has its own, for rates and shares are those since its earlier reads.

    Args:
        window_s: seconds that rates and shares are of; 0 for those since the read before.
    """

    def __init__(self, window_s: float = 5.0) -> None:
        self._window_ns = window_s * 1e9
        self._process = psutil.Process()
        self._where = where()
        self._began_s = self._process.create_time()
        self._history: deque[_Totals] = deque()
        self._recording_since_ns = time.perf_counter_ns()
        self._steps = 0
        self._step_ns = 0
        self._cause_number = 0
        self._cause_ns = 0

    def num_steps(self) -> int:
        """Steps that have ended. Cost: 1 us."""
        return max((ctx.num_steps for ctx in contexts()), default=0)

    def read(self) -> State:
        """The state of this process now. Cost: 0.2 ms; no lock that a step needs, and no sync."""
        now_ns = time.perf_counter_ns()
        devices = contexts()
        step = self.num_steps()
        if step != self._steps:
            self._steps, self._step_ns = step, now_ns
        totals = self._totals(now_ns, step)
        first = self._since(totals)
        span_s = max((now_ns - first.now_ns) / 1e9, 1e-3)
        rank, _ = rank_in_job()
        waits = _waits()
        doing, since_ns = self._doing(now_ns, waits)
        cause = explain.latest
        if cause is not None and cause.number != self._cause_number:
            self._cause_number, self._cause_ns = cause.number, now_ns
        newest = next((c.compiler.newest for c in devices if c.compiler.newest is not None), None)
        return State(
            where=self._where,
            pid=self._process.pid,
            began_s=self._began_s,
            job="" if rank is None else _job(),
            rank=-1 if rank is None else rank,
            local_rank=_number("LOCAL_RANK", rank or 0),
            local_size=_number("LOCAL_WORLD_SIZE", 1),
            script=os.path.basename(sys.argv[0] if sys.argv else "") or "python",
            written_ns=now_ns,
            step=step,
            step_ns=self._step_ns,
            steps_per_s=(step - first.step) / span_s,
            doing=doing,
            since_ns=since_ns,
            waits=waits,
            queue=sum(ctx.worker.num_unfinished for ctx in devices),
            used_bytes=sum(ctx.memory.used_bytes for ctx in devices),
            peak_bytes=sum(ctx.memory.peak_bytes for ctx in devices),
            programs=sum(len(ctx.compiler) for ctx in devices),
            compiles=metrics.counter_value("UncachedCompile") or 0,
            fallbacks=metrics.num_fallbacks(),
            cause="" if cause is None else cause.sentence,
            cause_number=self._cause_number,
            cause_ns=self._cause_ns,
            ran="" if newest is None else newest.program.runs_as,
            cpu_share=(totals.cpu_s - first.cpu_s) / span_s,
            cpu_s=totals.cpu_s,
            rss_bytes=self._process.memory_info().rss,
            batch_share=_share(totals.batch_ns - first.batch_ns, span_s),
            device_share=_share(totals.device_ns - first.device_ns, span_s),
            compiler_share=_share(totals.compiler_ns - first.compiler_ns, span_s),
            others_share=_share(totals.others_ns - first.others_ns, span_s),
        )

    def _totals(self, now_ns: int, step: int) -> _Totals:
        return _Totals(
            now_ns,
            step,
            time.process_time(),
            metrics.accumulated("WaitForBatchTime"),
            metrics.accumulated("DeviceLockWait"),
            metrics.accumulated("CompilerWait"),
            _spent_waiting_ns(now_ns),
        )

    def _since(self, totals: _Totals) -> _Totals:
        """The oldest totals of the last seconds."""
        history = self._history
        while len(history) > 1 and totals.now_ns - history[0].now_ns > self._window_ns:
            history.popleft()
        history.append(totals)
        return history[0]

    def _doing(self, now_ns: int, waits: tuple[Wait, ...]) -> tuple[str, int]:
        """What the thread that cuts does, and since when."""
        found = _of_thread_that_cuts()
        if found is None:
            # Between two marks it records. Recording began with the last step, or with the last mark that was seen.
            words = RECORDING if contexts() else STARTING
            return words, max(self._recording_since_ns, self._step_ns)
        self._recording_since_ns = now_ns
        words = _WORDS.get((found.name, found.lane), found.name)
        if words == _WAITS_FOR_DEVICE:  # and what does the device wait for?
            if waits:
                return WAITS_FOR_OTHERS, min(wait.since_ns for wait in waits)
            if any(doing.name == "wait for the compiler" for doing in _all_doing()):
                return _COMPILER, found.since_ns
        return words, found.since_ns


def _all_doing() -> list[Mark]:
    found = marks.on
    return [] if found is None else [doing for doing in list(found.now.values()) if doing]


def _of_thread_that_cuts() -> Mark | None:
    """What the main thread does. If it has never used a device, the first other thread that has."""
    found = marks.on
    if found is None:
        return None
    main = threading.main_thread().ident
    if main in found.now:
        return found.now[main]
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    for ident, doing in list(found.now.items()):
        if ident in names and not names[ident].startswith(_OWN_THREADS):
            return doing
    return None


def _waits() -> tuple[Wait, ...]:
    return tuple(
        Wait(f"{at.line} {at.number}" if at.number else at.line, at.members, doing.since_ns)
        for doing in _all_doing()
        if (at := doing.awaited) is not None
    )


def _spent_waiting_ns(now_ns: int) -> int:
    """Time in which threads waited for other processes, to this moment."""
    found = marks.on
    if found is None:
        return 0
    ended = sum(ns for (name, _), ns in list(found.spent_ns.items()) if name == _OTHERS_NAME)
    return ended + sum(now_ns - d.since_ns for d in _all_doing() if d.name == _OTHERS_NAME)


def _share(spent_ns: float, span_s: float) -> float:
    return min(max(spent_ns / 1e9 / span_s, 0.0), 1.0)


def _job() -> str:
    return f"{os.environ.get('MASTER_ADDR', '')}:{os.environ.get('MASTER_PORT', '')}"


def _number(name: str, default: int) -> int:
    text = os.environ.get(name, "")
    return int(text) if text.isdecimal() else default
