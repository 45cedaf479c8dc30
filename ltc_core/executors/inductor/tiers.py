"""The tier that runs a graph: op by op first, compiled after some runs. The tier changes between two runs.

`TieredProgram` counts the runs of one graph. With LTC_COMPILE=async, a graph that has run often enough is submitted to
the compile service and runs op by op until its libraries are built; libraries that an earlier process left are used at
the second run. With LTC_COMPILE=sync the first run waits for the libraries. A graph or an op that cannot be compiled
stays on the reference executor, and `tier_report` prints and keeps the reason. Made by `executor`; calls `partition`,
`service` and `compiled_subgraph`.
"""

from __future__ import annotations

import itertools
import os
import sys
import threading
import time
import weakref
from collections.abc import Generator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

from ltc_core import metrics, progress
from ltc_core.executors import core_sharing
from ltc_core.executors.inductor import step_times
from ltc_core.executors.inductor.compiled_subgraph import compiled_program
from ltc_core.executors.inductor.compiler.request import Request, encode, key
from ltc_core.executors.inductor.compiler.service import CompileService, Outcome, service
from ltc_core.executors.inductor.launcher import Model, load
from ltc_core.executors.inductor.look_budget import LookBudget
from ltc_core.executors.inductor.numeric_flags import NumericFlags
from ltc_core.executors.inductor.partition import eager_nodes, partition
from ltc_core.executors.inductor.tier_report import (
    COMPILED_RUNS,
    OP_BY_OP_RUNS,
    REPLAYED_RUNS,
    Reported,
    State,
    recorded_at,
    refuse,
)
from ltc_core.executors.reference.program import ReferenceProgram
from ltc_core.graph.ir import Graph, TensorMeta
from ltc_core.program.failure import Salvaged
from ltc_core.program.partitioned import PartitionedProgram
from ltc_core.program.program import Program, StepTimes, Tier, Watch, run_to_end
from ltc_core.program.scalar_inputs import vector_metas
from ltc_core.program.specialize import Specialized
from ltc_core.program.subgraph import Subgraph
from ltc_core.settings import settings
from ltc_core.timeline import op_kernels, slices

__all__ = ["TieredProgram"]

# Unless LTC_COMPILE_AFTER says when, a graph is compiled after so many runs, once they have taken as long as compiling
# may take: so compiling never costs more than what has run before it.
_AFTER = 3
_COMPILE_S = 6.0  # of a small graph on an idle core (MLP of 45 ops: 7 s)
_COMPILE_S_PER_OP = 0.04

# A graph whose ops take less than this in C++ is not compiled: to launch compiled code takes longer by 50 to 70 us than
# to run them where they are cut.
_SHORT_NS = 100_000
_MOST_SHORT = 64  # ops of such a graph
_RUNS_TO_TELL = 6  # of a graph that may be one, before an earlier process's compiled code is used

# A graph is compiled for this many sets of constants and numeric flags at most; runs with others are op by op.
_MAX_PROGRAMS = 4

# A word of the problem -> what the user can do about a graph that is refused for it; the last row fits all others.
_NEXT = {
    "AliasingError": "report this; the check has kept a wrong program from being used",
    "memory ran out": "free some memory, and start the script again",
    "LTC_COMPILE_TIMEOUT_S": "raise that limit, or cut the graph by more calls of mark_step",
    "cannot be kept": "make room, or let LTC_CACHE_DIR name a directory that can be written",
    "": "LTC_DEBUG=2 keeps what the compiler printed; report this, with the graph of LTC_SAVE_TENSORS_FILE",
}

_refused_ops: set[str] = set()
_launches = itertools.count(1)
_look_budget = LookBudget()


class TieredProgram(Program, Reported):
    """A graph that runs op by op until it is compiled.

    Args:
        graph: the graph.
        reference: its program on the reference executor.
        hardware: the PyTorch device of the data.
    """

    def __init__(self, graph: Graph, reference: ReferenceProgram, hardware: torch.device) -> None:
        Reported.__init__(self)
        self.graph = graph
        self.reuses = reference.reuses
        self.peak_bytes = reference.peak_bytes
        self.hardware = hardware
        self._reference = reference
        self._programs: Specialized[NumericFlags] = Specialized(_MAX_PROGRAMS)
        self._build: _Build | None = None
        self._runs = 0
        self._given_up = graph.dynamic
        self._is_dropped = False
        self._fits_none = False  # the last run had other scalars or flags than those compiled
        self._has_none = False  # there is no op that can be compiled
        self._is_slower = False  # replay was quicker than compiled code
        self._has_looked = False  # for libraries of an earlier process
        self._least_ns = 0  # time of the processor that a run in C++ has taken
        self._first_run_s = 0.0
        self._times_file: Path | None = None
        self._times: dict[bool, StepTimes] = {}  # whether steps are waited for -> what was measured

    @property
    def tier(self) -> Tier:  # type: ignore[override]
        return Tier.COMPILED if self._programs and not self._is_slower else self._reference.tier

    def prefer(self, tier: Tier) -> None:
        self._is_slower = tier is Tier.REPLAY and self._reference.can_replay

    def step_times(self, is_waited: bool) -> StepTimes | None:
        return self._times.get(is_waited)

    def note_steps(self, is_waited: bool, times: StepTimes) -> None:
        self._times[is_waited] = times
        if self._times_file is not None:
            step_times.write(self._times_file, self._times)
        if settings.explain:
            rhythm = ", if each is waited for" if is_waited else ""
            _say(
                f"{self.title}: {times.replay_ns / 1e6:.3g} ms a step with its ops called one by one, "
                f"{times.compiled_ns / 1e6:.3g} ms compiled{rhythm}"
            )

    def run(self, inputs: Sequence[Any], scalars: Sequence[Any]) -> list[Any]:
        return run_to_end(self.run_in_steps(inputs, scalars))

    def run_in_steps(
        self, inputs: Sequence[Any], scalars: Sequence[Any], watch: Watch | None = None
    ) -> Generator[None, None, list[Any]]:
        compiled = None if self._is_slower else self._program_for(scalars)
        # For the reports: 0.5 us a launch (two busy cores; `timeit` of these lines).
        self.last_run = next(_launches)
        if compiled is None or not compiled.is_native:
            self._note_op_by_op()
        else:
            self.compiled_runs += 1
            metrics.count(COMPILED_RUNS)
        self._fits_none = compiled is None and len(self._programs) > 0 and not self._is_slower
        if compiled is None:
            steps = self._reference.run_in_steps(inputs, scalars, watch)
            return self._counted((yield from steps))
        return (yield from compiled.run_in_steps(inputs, scalars))

    @property
    def native(self) -> Any | None:
        return self._reference.native if self._is_replay_next() else None

    def _is_replay_next(self) -> bool:
        """Whether the next run is a replay, and nothing is to be compiled or looked for before it."""
        if self._is_slower:
            return True
        if self._programs:
            return False
        is_settled = settings.compile == "off" or self._given_up
        return is_settled or not self._is_wanted(self._runs + 1)

    def watched_in_native(self, outputs: Sequence[int]) -> tuple[list[int], int] | None:
        return self._reference.watched_in_native(outputs)

    def results_of(self, found: Any, inputs: list[Any], scalars: Sequence[Any]) -> list[Any]:
        self._runs += 1
        self.last_run = next(_launches)
        self._note_op_by_op()
        return self._counted(self._reference.results_of(found, inputs, scalars))

    def note_native_cost(self, cost_ns: int) -> None:
        self._least_ns = min(self._least_ns or cost_ns, cost_ns)

    def count_native_runs(self, count: int) -> None:
        self._runs += count
        self.last_run = next(_launches)
        self._note_op_by_op(count)
        metrics.count(REPLAYED_RUNS, count)

    def _note_op_by_op(self, count: int = 1) -> None:
        self.op_by_op_runs += count
        metrics.count(OP_BY_OP_RUNS, count)

    def _counted(self, results: list[Any]) -> list[Any]:
        """Results of a run of the reference program, which may have been in C++."""
        if self._reference.is_replayed:
            metrics.count(REPLAYED_RUNS)
        return results

    def salvage(self, inputs: Sequence[Any], scalars: Sequence[Any]) -> Salvaged:
        return self._reference.salvage(inputs, scalars)

    def _program_for(self, scalars: Sequence[Any]) -> PartitionedProgram | None:
        """Compiled program for a run; None if there is none, and then it may be requested."""
        if not self._programs and (settings.compile == "off" or self._given_up):
            return None
        flags = NumericFlags.now()
        compiled = self._programs.find(scalars, flags)
        if compiled is None and settings.compile != "off" and not self._given_up:
            self._programs.note(scalars)
            compiled = self._compiled(scalars, flags)
        return compiled

    def _compiled(self, scalars: Sequence[Any], flags: NumericFlags) -> PartitionedProgram | None:
        """Compiled program for a run; None if it is not built yet, and then it may be requested."""
        self._runs += 1
        build = self._build  # the service's thread resets it when the build is done
        if build is not None and build.is_orphan:
            build = self._build = None
        if build is None and self._is_wanted(self._runs):
            build = self._start(scalars, flags)
        if settings.compile == "sync" and build is not None:
            waited_for = progress.shown(f"compiling {self.title}")
            with slices.watched("wait for the compiler"), metrics.timer("CompilerWait"), waited_for:
                build.done.wait()
        return self._programs.find(scalars, flags)

    def _is_wanted(self, run: int) -> bool:
        if self._is_due(run):
            return True
        is_first = run == 1  # most graphs of a script's start run once
        if self._has_looked or self._is_short or is_first:
            return False
        may_be_short = len(self.graph.nodes) <= _MOST_SHORT and not self._is_set_by_user
        if may_be_short and run <= _RUNS_TO_TELL:
            return False
        return _look_budget.has(len(self.graph.nodes))

    @property
    def _is_set_by_user(self) -> bool:
        """Whether a setting says which graphs are compiled, and when."""
        return settings.compile == "sync" or bool(settings.compile_after)

    @property
    def _is_short(self) -> bool:
        """Whether compiled code would gain less than its launch costs. On a GPU, this time is not that of the ops."""
        is_known = 0 < self._least_ns < _SHORT_NS and self.hardware.type == "cpu"
        return is_known and not self._is_set_by_user

    def _is_due(self, run: int) -> bool:
        """Whether it is time to compile at this run; before, only libraries that are there are used."""
        if settings.compile == "sync":
            return True
        if settings.compile_after:
            return run >= settings.compile_after
        if self._is_short:
            return False
        if not self._first_run_s:
            self._first_run_s = time.monotonic()
        runs_s = time.monotonic() - self._first_run_s
        return run >= _AFTER and runs_s >= _COMPILE_S + _COMPILE_S_PER_OP * len(self.graph.nodes)

    def _start(self, scalars: Sequence[Any], flags: NumericFlags) -> _Build | None:
        """Request the compiled program; None if nothing is to be compiled now."""
        compiler = service()
        why = compiler.available()
        if why:
            self.give_up(
                f"no graph is compiled, all run op by op: {why}",
                "install g++, or let CXX name a C++ compiler" if "C++" in why else _next(why),
            )
            return None
        refused = frozenset(_refused_ops)
        with _look_budget.take():
            subgraphs = partition(self.graph, scalars, self._programs.varied, refused)
            build = _Build(self, subgraphs, compiler, refused, flags)
            if not build.requests:
                self._note_kept(scalars, refused)
                self._given_up = self._has_none = True
                return None
            is_cached = build.is_cached()
        self._has_looked = True
        if not is_cached and not self._is_due(self._runs):
            return None
        self._build = build
        if settings.explain and not is_cached:
            _say(
                f"{self.title} is compiled in the background; its ops are called one by one meanwhile"
            )
        self._note_kept(scalars, refused)
        build.submit()
        return build

    def _note_kept(self, scalars: Sequence[Any], refused: frozenset[str]) -> None:
        """Note for the reports which ops are not compiled; those that the compiler refused have their own sentence."""
        kept = {}
        for at, why in eager_nodes(self.graph, scalars, refused).items():
            node = self.graph.nodes[at]
            if str(node.op) not in refused:
                name = node.op._schema.name
                kept[f"{name} at {node.line}" if node.line else name] = why
        self.kept = kept

    def install(
        self, compiled: PartitionedProgram, flags: NumericFlags, seconds: float, times_file: Path
    ) -> None:
        """Use a program compiled for some flags from the next run on; its build took `seconds`.

        Args:
            times_file: what is kept of its steps (`step_times`).
        """
        self._build = None
        self._times_file = times_file
        self._times = step_times.read(times_file)
        self._fits_none = False
        self._runs = 0
        self._programs.add(compiled, flags)
        metrics.count("CompiledProgram")
        if settings.explain:
            size = len(self.graph.nodes)
            _say(
                f"compiled a graph of {size} ops in {seconds:.1f} s{self._where()}: it runs as native code now"
                f"{_all_but(compiled)}"
            )
        if self._programs.is_full:
            self.give_up(
                f"a graph of {len(self.graph.nodes)} ops was compiled for {_MAX_PROGRAMS} values of numbers that are "
                "constants of compiled programs, or of PyTorch's numeric flags; with other values it runs op by op"
                f"{self._where()}",
                "let numbers that change be tensors on the device, or give them few values",
            )

    def retry(self) -> None:
        """Partition and compile again at a later run: the compiler refused another op."""
        self._build = None

    def give_up(self, sentence: str, next: str) -> None:
        """Stop compiling this graph: scalars that no compiled program fits run on the reference executor.

        Args:
            sentence: why.
            next: what the user can do about it.
        """
        self._given_up = True
        self._build = None
        metrics.count("CompileRefused")
        refuse(sentence, next)

    def refuse(self, outcome: Outcome, refused: frozenset[str]) -> None:
        """Handle a subgraph that could not be compiled: retry without the refused op, or give up.

        `refused` are the ops that the build left out; another graph may have refused more of them meanwhile.
        """
        if outcome.is_dropped:  # the process ends
            self._given_up = self._is_dropped = True
            self._build = None
            return
        if outcome.op and outcome.op not in refused:
            _refused_ops.add(outcome.op)
            refuse(
                f"{outcome.op} runs op by op between compiled parts: {outcome.problem}",
                "nothing if it is a small part of the step, else use another op",
            )
            self.retry()
            return
        size = len(self.graph.nodes)
        self.give_up(
            f"a graph of {size} ops stays op by op: {outcome.problem}{self._where()}",
            _next(outcome.problem),
        )

    # -- for the reports -----------------------------------------------------------------------------

    @property
    def state(self) -> State:
        if self._build is not None:
            return State.BUILDING
        if self._is_slower:
            return State.SLOWER
        if self._programs and not self._fits_none:
            is_native = any(program.is_native for program in self._programs)
            return State.COMPILED if is_native else State.REFUSED
        if settings.compile == "off":
            return State.OFF
        if self._programs:
            return State.OTHER_VALUES
        if self._is_dropped:
            return State.DROPPED
        if self._has_none:
            return State.NOTHING
        if self.graph.dynamic:
            return State.DYNAMIC
        if self._is_short:
            return State.SHORT
        return State.REFUSED if self._given_up else State.NEW

    @property
    def title(self) -> str:
        return f"a graph of {len(self.graph.nodes)} ops{self._where()}"

    @property
    def progress(self) -> str:
        build = self._build
        if build is not None:
            return f", for {build.seconds:.0f} s so far"
        if self.state is not State.COMPILED:
            return ""
        return _all_but(self._programs.newest)

    def _where(self) -> str:
        return recorded_at(self.graph.nodes)


def _say(text: str) -> None:
    """A line for LTC_EXPLAIN."""
    print(f"[ltc] {text}", file=sys.stderr, flush=True)


def _next(problem: str) -> str:
    return next(advice for word, advice in _NEXT.items() if word in problem)


def _all_but(compiled: PartitionedProgram) -> str:
    """How many ops of a program do not run in compiled code: ', all but 2 of its ops'."""
    return f", all but {compiled.num_eager} of its ops" if compiled.num_eager else ""


class _Build:
    """One attempt to compile the subgraphs of a program. Outcomes arrive in the service's thread."""

    def __init__(
        self,
        program: TieredProgram,
        subgraphs: list[Subgraph],
        compiler: CompileService,
        refused: frozenset[str],
        flags: NumericFlags,
    ) -> None:
        self._refused = refused
        self._flags = flags
        self._program = weakref.ref(program)
        self._title = program.title
        self._graph = program.graph
        self._hardware = program.hardware
        self._subgraphs = subgraphs
        self._compiler = compiler
        self._process = os.getpid()
        self._lock = threading.Lock()
        self._models: dict[int, tuple[Model, Sequence[int]]] = {}
        self._kernels: dict[int, list[tuple[str, list[int]]]] = {}
        self._failed = False
        self._num_found = 0
        num_threads = core_sharing.threads_of_script()
        self._started = time.monotonic()
        self._seen: slices.Slice | None = None
        self.done = threading.Event()
        self.requests = {
            k: Request(subgraph, program.hardware.type, num_threads, flags)
            for k, subgraph in enumerate(subgraphs)
            if subgraph.compiled
        }
        self._keys = {k: key(request) for k, request in self.requests.items()}

    @property
    def is_orphan(self) -> bool:
        """Whether this process is a forked child of the process that requested the build."""
        return self._process != os.getpid()

    @property
    def seconds(self) -> float:
        """Seconds since the build was requested."""
        return time.monotonic() - self._started

    def is_cached(self) -> bool:
        return all(self._compiler.is_cached(k) for k in self._keys.values())

    def submit(self) -> None:
        self._seen = slices.begin("compile", "compiler", ends_elsewhere=True)
        urgent = settings.compile == "sync"
        for k, request in self.requests.items():
            self._compiler.submit(self._keys[k], encode(request), partial(self._take, k), urgent)

    def _take(self, k: int, outcome: Outcome) -> None:
        """Store the outcome of the `k`-th subgraph."""
        with self._lock:
            if self._failed:
                return
            if outcome.path is None:
                self._fail(outcome)
                return
            self._num_found += outcome.from_cache
            try:
                metas = _input_metas(self._subgraphs[k])
                model = load(outcome.path / outcome.facts["library"], metas, str(self._hardware))
                self._models[k] = (model, outcome.facts["returned"])
                self._kernels[k] = outcome.facts["kernels"]
                if len(self._models) == len(self.requests):
                    self._install()
            except Exception as error:  # whatever it is, a run may wait for the outcome
                self._fail(Outcome.failed(f"its library cannot be loaded ({error})"))

    def _install(self) -> None:
        program = self._program()
        if program is not None:
            compiled = compiled_program(self._graph, self._subgraphs, self._models, self._hardware)
            file = step_times.file_of(self._compiler.place, [*self._keys.values()])
            program.install(compiled, self._flags, self.seconds, file)
            if op_kernels.on is not None:
                self._report(op_kernels.on)
        is_found = self._num_found == len(self.requests)
        self._end("found in the cache" if is_found else "compiled")

    def _report(self, report: Any) -> None:
        """Report which nodes each kernel computes."""
        calls = [
            (name, [self._subgraphs[k].nodes[at] for at in computed])
            for k, found in sorted(self._kernels.items())
            for name, computed in found
        ]
        eager = [n for subgraph in self._subgraphs if not subgraph.compiled for n in subgraph.nodes]
        report(self._graph, calls, eager)

    def _fail(self, outcome: Outcome) -> None:
        self._failed = True
        program = self._program()
        if program is not None:
            program.refuse(outcome, self._refused)
        self._end(f"failed: {outcome.problem}" if outcome.problem else "dropped")

    def _end(self, what_happened: str) -> None:
        if self._seen is not None:
            self._seen.note(
                program=self._title, subgraphs=len(self.requests), outcome=what_happened
            )
            self._seen.end()
        self.done.set()


def _input_metas(subgraph: Subgraph) -> list[TensorMeta]:
    return [*subgraph.graph.inputs.values(), *vector_metas(subgraph.scalar_types)]
