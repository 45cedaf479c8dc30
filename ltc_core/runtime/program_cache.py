"""From a cut to its program: the path's graph is pruned and compiled, and kept at the last step of the path.

The key of a program is the path, the values that are alive at the cut, and the inputs that are donated. Called by
`device_context`, calls the executor.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import Any

from ltc_core import metrics
from ltc_core.debug.explain import Cause, KnownGraphs, explain, on_compile
from ltc_core.debug.report import graph_hash
from ltc_core.executors import Executor
from ltc_core.executors.inductor.tier_report import recorded_at
from ltc_core.graph import collective
from ltc_core.graph.check import check
from ltc_core.graph.ir import Graph, TensorMeta, references
from ltc_core.graph.passes import count_ops, prune
from ltc_core.program.novelty import novelty
from ltc_core.program.plan import plan
from ltc_core.program.program import Program
from ltc_core.record import fast_path
from ltc_core.record.trace import Cut, Step, Trace
from ltc_core.report import recording
from ltc_core.runtime.family import Families, Family
from ltc_core.runtime.habit import Habit
from ltc_core.runtime.run_policy import RunPolicy
from ltc_core.settings import settings
from ltc_core.thread_state import in_own_state
from ltc_core.timeline import slices

__all__ = ["CompiledGraph", "ProgramCache", "graph_of"]


class CompiledGraph:
    """A program, and what the runtime needs to launch it: its inputs and outputs.

    `recorded` is the number of ops of the path, dead ones included. `outputs` are, for each output, its bytes and the
    position of the donated input whose memory it reuses (-1: none). `lines` are those of the graph's collectives.
    `known_cut` makes the cut again in C++; None where it cannot.
    """

    __slots__ = (
        "__weakref__",
        "_largest",
        "_num_runs",
        "_peak_bytes",
        "begun_ns",
        "cause",
        "facts",
        "family",
        "graph",
        "habit",
        "lines",
        "input_slots",
        "key",
        "known_cut",
        "num_parts",
        "outputs",
        "path",
        "policy",
        "program",
        "recorded",
        "watched",
        "whole_for",
    )

    def __init__(
        self,
        graph: Graph,
        program: Program,
        input_slots: tuple[int, ...],
        outputs: tuple[tuple[int, int], ...],
        recorded: dict[str, int],
        family: Family,
        known_cut: Any = None,
    ) -> None:
        self.graph = graph
        self.lines = collective.lines_of(graph.nodes)
        self.program = program
        self.input_slots = input_slots
        self.outputs = outputs
        self.recorded = recorded
        self.known_cut = known_cut
        self.family = family
        self.policy = RunPolicy(len(graph.nodes), family)
        self.path: Step | None = None
        self.key: Any = None
        self.cause: Cause | None = None
        self._num_runs = 0
        self.facts = ""
        self.num_parts = 0  # in which steps are quicker (`streaming`); 0: whole, or not measured
        self.habit = Habit()
        self.watched: tuple[int, ...] = ()  # positions of the outputs that the script waits for
        self.begun_ns = (0, 0)  # CPU time and duration of what has run early, until the run ends
        self.whole_for = 0  # steps until parts are tried again
        self._largest, self._peak_bytes = 0, program.peak_bytes

    @property
    def runs(self) -> int:
        """How often it was used, by C++ too."""
        uncounted = 0 if self.known_cut is None else self.known_cut.num_runs
        return self._num_runs + uncounted

    def count_runs(self, count: int) -> None:
        self._num_runs += count

    def peak_bytes(self, sized: Mapping[int, TensorMeta]) -> int:
        """Peak memory of the values of a run within the graph; of many sizes, that of the largest run so far.

        Args:
            sized: number -> meta of this run, where the graph has that of another one.

        Cost: plans the memory anew for a run that is larger than all before.
        """
        num_bytes = sum(meta.nbytes for meta in sized.values())
        if num_bytes > self._largest:
            self._largest = num_bytes
            peak_bytes = plan(self.graph.sized(sized)).peak_bytes
            self._peak_bytes = max(self._peak_bytes, peak_bytes)
            if self.known_cut is not None:
                self.known_cut.note_sizes(self._largest, self._peak_bytes)
        return self._peak_bytes

    def described(self) -> str:
        """What the timeline shows of each run, encoded once."""
        if not self.facts:
            nodes = self.graph.nodes
            self.facts = slices.facts(
                program=f"a graph of {len(nodes)} ops{recorded_at(nodes)}",
                graph=graph_hash(self.graph),
                line=next((node.line for node in nodes if node.line), ""),
            )
        return self.facts


class ProgramCache:
    """Programs of one device, at most `settings.compilation_cache_size`; the least recently used are dropped."""

    def __init__(self, executor: Executor) -> None:
        self.executor = executor
        self._known = KnownGraphs()
        self._families = Families()
        self._recent: OrderedDict[int, CompiledGraph] = OrderedDict()

    def compile(
        self, trace: Trace, cut: Cut, donated: tuple[int, ...], reason: str
    ) -> CompiledGraph:
        """Return the program for a cut, made for `reason`. Cost: compiles on a cache miss."""
        outputs = tuple(index for index, _ in cut.alive)
        key = (outputs, donated)
        if cut.path.programs is None:
            cut.path.programs = {}
        found: CompiledGraph | None = cut.path.programs.get(key)
        if found is None:
            found = self._build(trace, cut, outputs, donated)
            found.path, found.key = cut.path, key
            cut.path.programs[key] = found
            metrics.count("UncachedCompile")
            novelty.note_new()
            found.cause = explain(found.graph, self._known, reason, cut.path)
            on_compile(found.cause)
            recording.note_program(found.graph, found.cause, reason)
            self._evict()
        else:
            metrics.count("CachedCompile")
            novelty.note_again()
        self._note_use(found)
        return found

    def note_found(self, compiled: CompiledGraph) -> None:
        """Note that a program is used again, which was found without `compile`."""
        metrics.count("CachedCompile")
        novelty.note_again()
        self._note_use(compiled)

    def _note_use(self, compiled: CompiledGraph) -> None:
        self.note_newest(compiled)
        compiled.count_runs(1)

    def note_newest(self, compiled: CompiledGraph) -> None:
        """Note that a program is the last one that ran; its runs are counted elsewhere."""
        self._recent[id(compiled)] = compiled
        self._recent.move_to_end(id(compiled))

    @in_own_state
    def _build(
        self, trace: Trace, cut: Cut, outputs: tuple[int, ...], donated: tuple[int, ...]
    ) -> CompiledGraph:
        started = time.perf_counter_ns()
        path = trace.path(cut.path)
        graph = graph_of(path, outputs, frozenset(donated))
        if settings.check_graphs or settings.debug:
            check(graph)
        slots = tuple(k for k, (index, _, _) in enumerate(cut.inputs) if index in graph.inputs)
        program = self.executor.compile(graph)
        metric = "EagerOpCompileTime" if settings.eager else "CompileTime"
        metrics.observe(metric, time.perf_counter_ns() - started)
        metrics.observe("TensorsGraphSize", len(graph.nodes))
        metrics.observe("InputOutputAliasCount", len(program.reuses))
        results = self._outputs(graph, program)
        known_cut = None
        if not graph.dynamic or self._stores_as_recorded(graph):
            is_donated = tuple(value is None for _, value, _ in cut.inputs)
            known_cut = fast_path.known_cut(
                outputs, is_donated, slots, results, program.peak_bytes, graph.dynamic
            )
        recorded = count_ops([step.node for step in path if step.node is not None])
        family = self._families.of(graph)
        return CompiledGraph(graph, program, slots, results, recorded, family, known_cut)

    def _stores_as_recorded(self, graph: Graph) -> bool:
        """Whether the device stores the outputs in as many bytes as their metas say."""
        metas = graph.metas()
        return all(self.executor.nbytes(metas[i]) == metas[i].nbytes for i in graph.outputs)

    def _outputs(self, graph: Graph, program: Program) -> tuple[tuple[int, int], ...]:
        metas = graph.metas()
        taken = {number: k for k, number in enumerate(graph.inputs)}
        return tuple(
            (
                self.executor.nbytes(metas[i]),
                taken[program.reuses[i]] if i in program.reuses else -1,
            )
            for i in graph.outputs
        )

    def _evict(self) -> None:
        while len(self._recent) >= settings.compilation_cache_size:
            _, oldest = self._recent.popitem(last=False)
            if oldest.path is not None and oldest.path.programs is not None:
                oldest.path.programs.pop(oldest.key, None)
                if oldest.path.known is oldest:
                    oldest.path.known = None
            metrics.count("EvictedCompile")

    @property
    def newest(self) -> CompiledGraph | None:
        """The program that ran last. None if there is none, or if a cut of another thread is under way."""
        try:
            return self._recent[next(reversed(self._recent))]
        except (KeyError, RuntimeError, StopIteration):
            return None

    def __len__(self) -> int:
        return len(self._recent)

    def forget(self) -> None:
        """Drop all programs."""
        self._recent.clear()
        self._known.forget()


def graph_of(
    path: Sequence[Step], outputs: tuple[int, ...], donated: frozenset[int] = frozenset()
) -> Graph:
    """The graph of what some values of a path need.

    Args:
        path: the steps from the first one on (`Trace.path`).
        donated: inputs that nothing else holds, among them some that the graph does not read.
    """
    nodes = prune([step.node for step in path if step.node is not None], outputs)
    read = {i for node in nodes for i in references(node)}
    inputs = {index: meta for step in path for index, meta in step.inputs if index in read}
    is_dynamic = bool(path) and path[-1].dynamic is not None
    return Graph(nodes, inputs, outputs, donated.intersection(inputs), is_dynamic)
