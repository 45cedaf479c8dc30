"""From a cut to a program: the graph of the path, pruned, compiled, and kept where the path ends.

What a cut needs besides its path is what was alive and which inputs were given up; both are part of the cache's
key. Comes from `runtime`, goes to an executor.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from typing import Any

from ltc_core import metrics
from ltc_core.executors import Executor, Program
from ltc_core.graph import Graph, TensorMeta, references
from ltc_core.passes import count_ops, prune
from ltc_core.settings import settings
from ltc_core.trace import Cut, Step, Trace

__all__ = ["Compiled", "Compiler"]


class Compiled:
    """A program with what the runtime must know to launch it: which inputs, which metas come out.

    `recorded` counts all ops of the path, those that turned out dead included. `is_small` says that its ops are
    so short that Python's lock bounds it: such a program is run where it was cut. In the worker each of its ops
    would wait for the thread that records (MLP of design section 6 on two cores: 4.1 ms a step there, 2.2 ms so).
    """

    _SMALL_OP_NS = 20_000
    _SMALL_RUN_NS = 5_000_000

    __slots__ = (
        "_cost_ns",
        "is_small",
        "graph",
        "input_slots",
        "key",
        "metas",
        "path",
        "program",
        "recorded",
        "runs",
    )

    def __init__(
        self, graph: Graph, program: Program, input_slots: tuple[int, ...], recorded: dict[str, int]
    ) -> None:
        self.graph = graph
        self.program = program
        self.input_slots = input_slots
        self.recorded = recorded
        metas = graph.metas()
        self.metas: tuple[TensorMeta, ...] = tuple(metas[i] for i in graph.outputs)
        self.path: Step | None = None
        self.key: Any = None
        self.runs = 0
        self.is_small = False
        self._cost_ns = 0.0

    def note_run(self, elapsed_ns: int) -> None:
        """Learn from the processor time of a run."""
        self._cost_ns = (
            elapsed_ns if not self._cost_ns else 0.75 * self._cost_ns + 0.25 * elapsed_ns
        )
        small_op = self._cost_ns < self._SMALL_OP_NS * max(len(self.graph.nodes), 1)
        self.is_small = small_op and self._cost_ns < self._SMALL_RUN_NS


class Compiler:
    """Programs of one device, at most `settings.compilation_cache_size` of them; the longest unused go first."""

    def __init__(self, executor: Executor) -> None:
        self.executor = executor
        self._recent: OrderedDict[int, Compiled] = OrderedDict()

    def compile(self, trace: Trace, cut: Cut, donated: tuple[int, ...]) -> Compiled:
        """Give the program for a cut. Cost: compiles if this path was never cut like this before."""
        outputs = tuple(index for index, _ in cut.alive)
        key = (outputs, donated)
        if cut.path.programs is None:
            cut.path.programs = {}
        found: Compiled | None = cut.path.programs.get(key)
        if found is None:
            found = self._build(trace, cut, outputs, donated)
            found.path, found.key = cut.path, key
            cut.path.programs[key] = found
            metrics.count("UncachedCompile")
            self._evict()
        else:
            metrics.count("CachedCompile")
        self._recent[id(found)] = found
        self._recent.move_to_end(id(found))
        found.runs += 1
        return found

    def _build(
        self, trace: Trace, cut: Cut, outputs: tuple[int, ...], donated: tuple[int, ...]
    ) -> Compiled:
        started = time.perf_counter_ns()
        path = trace.path(cut.path)
        nodes = [step.node for step in path if step.node is not None]
        kept = prune(nodes, outputs)
        metas = {index: meta for step in path for index, meta in step.inputs}
        read = _inputs_read(kept, metas)
        inputs = {i: metas[i] for i in metas if i in read}
        graph = Graph(kept, inputs, outputs, frozenset(donated) & read)
        slots = tuple(k for k, (index, _, _) in enumerate(cut.inputs) if index in read)
        program = self.executor.compile(graph)
        metrics.observe("CompileTime", time.perf_counter_ns() - started)
        metrics.observe("TensorsGraphSize", len(kept))
        return Compiled(graph, program, slots, count_ops(nodes))

    def _evict(self) -> None:
        while len(self._recent) >= settings.compilation_cache_size:
            _, oldest = self._recent.popitem(last=False)
            if oldest.path is not None and oldest.path.programs is not None:
                oldest.path.programs.pop(oldest.key, None)
            metrics.count("EvictedCompile")

    def forget(self) -> None:
        """Drop all programs."""
        self._recent.clear()


def _inputs_read(nodes: Any, metas: dict[int, TensorMeta]) -> set[int]:
    return {i for node in nodes for i in references(node) if i in metas}
