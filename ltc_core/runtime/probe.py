"""Probes: a recorded value that needs little of a step is computed by itself, and the step goes on.

A read of a recorded value usually ends the graph: all that was recorded before it runs, and the reader waits for that
and for the steps before. Many reads need little of it. Libraries ask whether a mask is all ones, or how long the
longest sequence is, in the middle of each forward pass. A probe runs the few ops that such a value depends on, in the
thread that reads, on inputs that are there, or will be once a program before has run. The trace stays as it is: the
step remains one graph, and runs beside the recording. Whatever needs the value later computes it again, with its graph.

A value is probed if it depends only on constants, and on integers and bools that were there when the step began, or
since its last cut: masks, lengths, ids, labels, the experts that a router has chosen. What parameters enter is what a
step is cut for. Its ops must draw no random numbers and run no collectives. They are few beside those recorded, or the
script does not wait for its steps and the value is made of more than constants, or of no floats: then a cut would wait
for the step before. Asked by `device_context` before it cuts for a read.
"""

from __future__ import annotations

import bisect
import operator
import time
from typing import Any

from ltc_core import metrics
from ltc_core.executors import Executor
from ltc_core.executors.reference.executor import ReferenceExecutor
from ltc_core.graph import collective
from ltc_core.graph.ir import Graph, TensorMeta, references
from ltc_core.program.failure import NodeFailure
from ltc_core.program.program import Program
from ltc_core.record.step import Step
from ltc_core.record.trace import Trace
from ltc_core.runtime import execution_gate
from ltc_core.runtime.program_cache import graph_of
from ltc_core.settings import settings
from ltc_core.tensor.buffer import Buffer
from ltc_core.tensor.handles import Value
from ltc_core.thread_state import in_own_state, num_dispatch_modes
from ltc_core.timeline import slices
from ltc_core.uninterrupted import uninterrupted

__all__ = ["Probe", "Probes"]

_MOST_OPS = 64
_MOST_BYTES = 1 << 20  # of the values, inputs included
# Where the script waits anyway, a cut of few values costs as much as a probe.
_LEAST_RECORDED = 8
_SHARE = 4  # factor by which more values must be recorded than a probe has ops
_MOST_READS = 64  # of one trace: a script that reads nothing else would record for ever
_MOST_NS = 500_000  # of a run: a value that takes longer is not computed twice
_SLOW = 3  # runs of more than that: the first ones load kernels

_number = operator.itemgetter(0)  # of a row of `Trace.inputs`


class Probe:
    """The program of one value at one step of the trie.

    Attributes:
        run: computes the value.
        inputs: numbers of the inputs.
        least_recorded: values that must be recorded for a read to be worth it where the script waits for its steps.
        is_made: whether floats that nothing but constants decide enter, and nothing that the script gave.
        is_chosen: whether the value was probed before: then it always is, so that steps keep to one graph.
        num_slow: runs that took long.
    """

    __slots__ = ("inputs", "is_chosen", "is_made", "least_recorded", "num_slow", "run")

    def __init__(self, program: Program, graph: Graph) -> None:
        self.run = in_own_state(program.run)
        self.inputs = tuple(graph.inputs)
        self.least_recorded = max(_LEAST_RECORDED, _SHARE * len(graph.nodes))
        made = (meta for node in graph.nodes if not references(node) for meta in node.outs)
        self.is_made = not graph.inputs and not all(map(_is_exact, made))
        self.is_chosen = False
        self.num_slow = 0

    def is_worth_it(self, num_recorded: int, goes_on: bool) -> bool:
        is_small = self.least_recorded <= num_recorded
        return self.is_chosen or is_small or (goes_on and not self.is_made)


class Probes:
    """The probes of one device.

    Args:
        trace: that of the device.
        executor: probes run on the CPU, by the reference executor or one that is based on it.
    """

    def __init__(self, trace: Trace, executor: Executor) -> None:
        self._trace = trace
        self._executor = executor
        self._epoch = self._num_reads = 0  # the trace that was last probed, and how often

    def data(self, value: Value, goes_on: bool) -> Any | None:
        """The data of a value that is only recorded, not to be written; None if it needs a cut.

        Args:
            goes_on: whether the script does not wait for its steps.

        Cost: 15 us, and the run, where the read repeats; 1 us for a value that needs a cut.
        """
        if not self._executor.keeps_host_tensors or settings.eager or execution_gate.is_closed:
            return None
        trace = self._trace
        known = trace.cursor.probes
        if known is not None and value.index in known:
            probe = known[value.index]
            if probe is None or not probe.is_worth_it(trace.count, goes_on):
                return None
        if num_dispatch_modes():  # they see the ops of a cut
            return None
        while True:
            with trace.lock:
                found = self._data(value, goes_on)
            if not isinstance(found, Buffer):
                return found
            found.wait_done()  # without the lock: a finalizer in the worker may record ops

    @uninterrupted  # a signal handler may cut, and then a program may write to the inputs
    def _data(self, value: Value, goes_on: bool) -> Any | Buffer | None:
        """The data of a value; an input of it that has to be waited for; None if it needs a cut."""
        trace = self._trace
        step = trace.cursor
        if value.epoch != trace.epoch or value.buffer is not None:
            return None
        probe = self._probe(step, value.index)
        if probe is None or not probe.is_worth_it(trace.count, goes_on):
            return None
        inputs = self._inputs(probe)
        if inputs is None or isinstance(inputs, Buffer):
            return inputs
        if not self._count_read():
            return None
        probe.is_chosen = True
        started_ns = time.thread_time_ns()  # that others use the cores does not count
        with slices.watched("probe"):
            try:
                (data,) = probe.run(inputs, trace.scalars)
            except NodeFailure:  # the cut's program fails, too, and says where
                return None
        self._note(probe, step, value.index, time.thread_time_ns() - started_ns)
        metrics.count("ProbedRead")
        return data

    def _count_read(self) -> bool:
        """Count a read of this trace; False if there were too many."""
        if self._epoch != self._trace.epoch:
            self._epoch, self._num_reads = self._trace.epoch, 0
        self._num_reads += 1
        return self._num_reads <= _MOST_READS

    def _inputs(self, probe: Probe) -> list[Any] | Buffer | None:
        """The data of a probe's inputs; one that a program makes now; None if one is lost."""
        rows = self._trace.inputs
        found = []
        for number in probe.inputs:
            buffer: Buffer | None = rows[bisect.bisect_left(rows, number, key=_number)][2]
            if buffer is not None and buffer.job is not None:
                return buffer
            if (
                buffer is None or buffer.data is None
            ):  # lost, or a program in this thread makes it now
                return None
            found.append(buffer.data)
        return found

    def _note(self, probe: Probe, step: Step, number: int, took_ns: int) -> None:
        if took_ns < _MOST_NS:
            probe.num_slow = 0
            return
        probe.num_slow += 1
        if probe.num_slow == _SLOW and step.probes is not None:
            step.probes[number] = None

    def _probe(self, step: Step, number: int) -> Probe | None:
        """The probe of a value at the step that was recorded last; None if it may have none."""
        if step.probes is None:
            step.probes = {}
        if number not in step.probes:
            step.probes[number] = self._build(step, number)
        return step.probes[number]  # type: ignore[no-any-return]

    def _build(self, step: Step, number: int) -> Probe | None:
        if not _may_have_probe(step, number):
            return None
        graph = graph_of(self._trace.path(step), (number,))
        nodes = graph.nodes
        draws = any("generator" in node.kwargs for node in nodes)
        if len(nodes) > _MOST_OPS or draws or collective.lines_of(nodes):
            return None
        if not all(map(_is_exact, graph.inputs.values())):
            return None
        if any(old in graph.inputs for node in nodes for old in node.writes):
            return None  # a state of the script, not data
        if sum(meta.nbytes for meta in graph.metas().values()) > _MOST_BYTES:
            return None
        assert isinstance(self._executor, ReferenceExecutor)
        return Probe(in_own_state(self._executor.interpret)(graph), graph)


def _may_have_probe(step: Step | None, number: int) -> bool:
    """Whether a value needs few ops, and no input of floats. Cost: that of the ops up to the first that says no."""
    needed = {number}
    count = 0
    while step is not None and step.node is not None:
        node = step.node
        if not needed.isdisjoint(range(node.first, node.first + len(node.outs))):
            needed.update(references(node))
            count += 1
            has_floats = any(index in needed and not _is_exact(meta) for index, meta in step.inputs)
            if has_floats or count > _MOST_OPS:
                return False
        step = step.parent
    return True


def _is_exact(meta: TensorMeta | None) -> bool:
    """Whether a value is of integers or bools."""
    return meta is None or not (meta.dtype.is_floating_point or meta.dtype.is_complex)
