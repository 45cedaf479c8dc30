"""Reads of numbers and small tensors that C++ makes: a script that reads one every few ops would wait for Python else.

A step of LBFGS reads hundreds of numbers, and a loop of an environment one for each action. Where a read cuts what it
has cut before, `record/csrc/known_read.h` cuts, runs the program and returns it. Each program is Python's again
after some runs: its tier may have changed, and what is measured goes by those runs. What C++ leaves out is made up for
when Python cuts or reads the next time (`pause`); the counters, when somebody reads one.

Told of cuts and reads by `device_context`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.autograd import profiler

from ltc_core import metrics
from ltc_core.executors import Executor
from ltc_core.record import fast_path
from ltc_core.record.trace import Trace
from ltc_core.runtime import execution_gate, fork_gate
from ltc_core.runtime.early_run import EarlyRuns
from ltc_core.runtime.later_checks import LaterChecks
from ltc_core.runtime.launcher import Launcher
from ltc_core.runtime.probe import Probe
from ltc_core.runtime.program_cache import CompiledGraph
from ltc_core.runtime.reads import Reads
from ltc_core.runtime.streaming import Streaming
from ltc_core.settings import settings
from ltc_core.tensor.handles import Cell
from ltc_core.timeline import slices

__all__ = ["KnownReads"]

_LEARNT = 8  # runs of a program, after which it is known what follows it
# Of a program, before Python looks at it again: as many as there were so far, within these.
_FEWEST_RUNS, _MOST_RUNS = 100, 3000

# Variables that say how a cut is made or who sees it: C++ reads nothing once one of them has changed.
_SETTINGS = (
    "compile", "debug", "eager", "emit_steplog", "replay", "save_tensors_file", "streaming",
)  # fmt: skip
_FACTS = (
    (vars(slices), "on"),
    (vars(profiler), "_is_profiler_enabled"),
    (vars(execution_gate), "is_closed"),
    (vars(fork_gate), "_forking"),
    *((settings.__dict__, name) for name in _SETTINGS),
)


class KnownReads:
    """The reads of one device.

    Args:
        trace, executor, launcher, reads, streaming, early, checks: those of the device.
        on_cuts: called with the last program that C++ has run, the number of cuts, and when the last one ended.
    """

    def __init__(
        self,
        trace: Trace,
        executor: Executor,
        launcher: Launcher,
        reads: Reads,
        streaming: Streaming,
        early: EarlyRuns,
        checks: LaterChecks,
        on_cuts: Callable[[CompiledGraph, int, int], None],
    ) -> None:
        self._trace = trace
        self._launcher = launcher
        self._reads = reads
        self._streaming = streaming
        self._early = early
        self._checks = checks
        self._on_cuts = on_cuts
        self._is_possible = executor.keeps_host_tensors
        self._native: Any = None
        trace.reads = None

    def let_run(self, compiled: CompiledGraph) -> None:
        """A read has cut, and C++ has run the program: it may do so again, unless a step is to run early after it."""
        if self._native is None:
            return
        self.count()
        native = compiled.program.native
        if native is None or compiled.runs < _LEARNT:  # without: compiled code has come meanwhile
            return
        if not any(map(self._early.may_gain, compiled.habit.followers())):
            count = min(max(compiled.runs, _FEWEST_RUNS), _MOST_RUNS)
            self._native.let_run(compiled.known_cut, native, count)

    def hold_back(self, compiled: CompiledGraph) -> None:
        """Each run of a program counts for a while: Python makes its cuts."""
        if self._native is not None and compiled.known_cut is not None:
            self._native.let_run(compiled.known_cut, None, 0)

    def resume(self) -> None:
        """Python has read a value: let C++ read the next ones, if a cut does nothing but run in this thread.

        Cost: 1 us.
        """
        is_quiet = self._launcher.is_free and self._streaming.is_whole and not self._early.expects
        is_seen = slices.is_watched() or _reports_cuts()
        is_steady = self._reads.is_waited and self._reads.is_of_reader
        is_steady |= self._trace.at_once is not None
        if not self._is_possible or not is_steady or not is_quiet or is_seen:
            return
        if self._native is None:
            if not fast_path.install():
                return
            self._native = fast_path.known_reads(
                self._trace.memory, self._launcher.failures, self._checks.waiting, _FACTS, Probe
            )
            self._trace.reads = self._native
        if self._native is not None:
            self._native.resume()

    def data(self, cell: Cell, reason: str) -> Any | None:
        """The memory of a cell, if C++ may read it; None if Python has to. Cost: 0.2 us, and the cut and the run."""
        return None if self._native is None else self._native.data(cell, reason)

    def pause(self) -> None:
        """Python is about to cut or to read: make up for what C++ has done, and let it read no more. Cost: 0.1 us."""
        if self._native is None:
            return
        told = self._native.pause()
        if told is None:
            return
        num_cuts, last_ns, last, unfinished = told
        self._reads.skip(last_ns)
        if last is not None:
            self._launcher.skip()
            self._streaming.forget_step()
            self._early.skip_to(last)
            self._on_cuts(last, num_cuts, last_ns)
        if unfinished is not None:
            compiled, made, reason = unfinished
            _count_cuts(compiled, 1, reason)
            self._launcher.finish_now(compiled, made)

    def count(self) -> None:
        """Count what C++ has done. In any thread."""
        if self._native is None:
            return
        num_numbers, num_tensors, num_checks, num_bytes, cut = self._native.take_counts()
        num_reads = num_numbers + num_tensors
        if num_reads:
            metrics.count("aten::_local_scalar_dense", num_numbers)
            metrics.observe_many("InboundData", num_bytes / num_reads, num_reads)
        if num_checks:
            metrics.count("aten::_linalg_check_errors", num_checks)
        for compiled in cut:
            num_runs, reasons, elapsed_ns = compiled.known_cut.take_runs()
            if num_runs:
                _count_runs(compiled, num_runs, elapsed_ns / num_runs)
            for reason, num_cuts in reasons.items():
                _count_cuts(compiled, num_cuts, reason)


def _reports_cuts() -> bool:
    return bool(settings.debug or settings.emit_steplog or settings.save_tensors_file)


def _count_runs(compiled: CompiledGraph, num_runs: int, elapsed_ns: float) -> None:
    """Count runs of a program, each of which took so much time with its cut."""
    compiled.program.count_native_runs(num_runs)
    for name in ("ExecuteHere", "ExecuteTime"):
        metrics.observe_many(name, elapsed_ns, num_runs)


def _count_cuts(compiled: CompiledGraph, num_cuts: int, reason: str) -> None:
    compiled.count_runs(num_cuts)
    metrics.count("CachedCompile", num_cuts)
    metrics.count("ExecuteComputation", num_cuts)
    metrics.count(f"Sync.{reason}", num_cuts)
    metrics.count_ops(compiled.recorded, num_cuts)
