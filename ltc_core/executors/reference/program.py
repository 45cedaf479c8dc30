"""The program of the reference executor: ATen on ordinary tensors, op by op. It defines the semantics of a graph.

A program is a list of instructions over a list of values. A value is freed at its last use. A write overwrites the old
value's memory if the plan (`program.plan`) allows it, else a copy. A program runs in C++ (`replay`) once that part is
built. Other executors use it for subgraphs that run op by op.
"""

from __future__ import annotations

import bisect
import itertools
import operator
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from typing import Any

import torch

from ltc_core.executors.base import CPU
from ltc_core.executors.reference import replay
from ltc_core.executors.reference.instruction import Instruction
from ltc_core.graph import collective
from ltc_core.graph.ir import Graph, Node
from ltc_core.program.failure import NodeFailure, Salvaged, SubgraphFailure
from ltc_core.program.novelty import novelty
from ltc_core.program.passes.narrow_dtypes import StorageTypes
from ltc_core.program.plan import MemoryPlan
from ltc_core.program.program import Program, Tier, Watch
from ltc_core.program.salvage import salvage
from ltc_core.settings import settings
from ltc_core.thread_state import in_own_state
from ltc_core.timeline import op_times

__all__ = ["ReferenceProgram", "rest_runner"]

# What C++ is told of a `Watch`: numbers of the outputs, how many nodes must have run for them, and whom to give them.
_Watched = tuple[list[int], int, Callable[[list[Any]], None]]


def _generator(hardware: torch.device) -> torch.Generator:
    return torch.Generator(hardware if hardware.type == "cuda" else "cpu")


class _Code:
    """The instructions of a program, which are made where they run in Python, and the generator that they draw from."""

    def __init__(
        self,
        nodes: Sequence[Node],
        memory: MemoryPlan,
        types: StorageTypes | None,
        hardware: torch.device,
    ) -> None:
        self._rows = list(zip(nodes, memory.in_place, memory.frees, strict=True))
        self._types, self._hardware = types, hardware
        self._made: list[Instruction | None] = [None] * len(self._rows)
        self.generator = _generator(hardware)

    def at(self, position: int) -> Instruction:
        made = self._made[position]
        if made is None:
            made = Instruction(*self._rows[position], self._types, self._hardware)
            self._made[position] = made
        return made

    def __iter__(self) -> Iterator[Instruction]:
        return map(self.at, range(len(self._made)))

    def run_one(self, position: int, values: dict[int, Any], scalars: Sequence[Any]) -> None:
        """Run the instruction at a position on some of the values. Called from C++."""
        self.at(position).run(values, scalars, self.generator)


class ReferenceProgram(Program):
    """Runs the instructions of a graph in order.

    Attributes:
        is_replayed: whether the last run was in C++.
    """

    is_replayed = False

    def __init__(
        self,
        graph: Graph,
        memory: MemoryPlan,
        types: StorageTypes | None,
        hardware: torch.device = CPU,
    ) -> None:
        self.reuses = memory.reuses
        self.peak_bytes = memory.peak_bytes
        self._inputs = tuple(graph.inputs)
        self._donated = graph.donated
        metas = graph.metas()
        stored = (lambda dtype: dtype) if types is None else types.of
        self._outputs = [(i, i in memory.copied, stored(metas[i].dtype)) for i in graph.outputs]
        self._origins = memory.origins
        self._nodes = graph.nodes
        self._may_block = collective.may_block(graph.nodes)
        self._code = _Code(graph.nodes, memory, types, hardware)
        last = graph.nodes[-1] if graph.nodes else None
        self._size = max([*graph.inputs, -1]) + 1
        if last is not None:
            self._size = max(self._size, last.first + len(last.outs))
        self._types, self._hardware = types, hardware
        # Narrow dtypes are converted at each op: that is Python's.
        can_replay = bool(graph.nodes) and types is None and hardware.type in ("cpu", "cuda")
        self._plan = memory if can_replay else None  # until it is built
        self._replay: replay.Replay | None = None
        self._num_runs = 0  # in Python, before the replay is built

    @property
    def tier(self) -> Tier:  # type: ignore[override]
        return Tier.OP_BY_OP if self._replay is None else Tier.REPLAY

    @property
    def can_replay(self) -> bool:
        """Whether its next runs are in C++."""
        is_near = self._plan is not None and replay.extension.loaded is not None
        return settings.replay != "never" and (self._replay is not None or is_near)

    def run(
        self, inputs: Sequence[Any], scalars: Sequence[Any], watch: Watch | None = None
    ) -> list[Any]:
        try:
            return self.run_or_stop(inputs, scalars, watch)
        except SubgraphFailure as failure:
            raise self._salvaged(failure, inputs, scalars) from failure.__cause__

    def run_in_steps(
        self, inputs: Sequence[Any], scalars: Sequence[Any], watch: Watch | None = None
    ) -> Generator[None, None, list[Any]]:
        if self._may_block:
            yield
        return self.run(inputs, scalars, watch)

    def _watched(self, watch: Watch) -> _Watched | None:
        """What C++ is told of the outputs that are waited for; None if it cannot give them before the others."""
        found = self.watched_in_native(watch.outputs)
        return None if found is None else (*found, watch.publish)

    def watched_in_native(self, outputs: Sequence[int]) -> tuple[list[int], int] | None:
        rows = [self._outputs[k] for k in outputs]
        if not rows or any(copied for _, copied, _ in rows):
            return None
        numbers = [number for number, _, _ in rows]
        return numbers, max(self._made_at(number) for number in numbers)

    def _made_at(self, number: int) -> int:
        """How many of the nodes must have run for a value."""
        if number in self._inputs:
            return 0
        return bisect.bisect_right(self._nodes, number, key=operator.attrgetter("first"))

    @property
    def native(self) -> Any | None:
        if self._replay is None or not self._replay.is_native or settings.replay == "never":
            return None
        if self._plan is not None:  # it is built once more
            return None
        return self._replay.program

    def results_of(self, found: Any, inputs: list[Any], scalars: Sequence[Any]) -> list[Any]:
        if isinstance(found, BaseException):
            raise found
        try:
            results = self._results(replay.outcome(found))
        except SubgraphFailure as failure:
            raise self._salvaged(failure, inputs, scalars) from failure.__cause__
        return in_own_state(self.run)(inputs, scalars) if results is None else results

    def run_or_stop(
        self, inputs: Sequence[Any], scalars: Sequence[Any], watch: Watch | None = None
    ) -> list[Any]:
        """As `run`, but without computing what is left after a failure.

        Raises:
            SubgraphFailure: an op failed; chained to its exception.
        """
        if self._plan is not None and settings.replay != "never":
            self._choose()
        if self._replay is not None:
            results = self._run_replay(self._replay, inputs, scalars, watch)
            if results is not None:
                return results
        self.is_replayed = False
        values: list[Any] = [None] * self._size
        for i, data in zip(self._inputs, inputs, strict=True):
            values[i] = data
        generator = self._code.generator
        is_timed = op_times.on is not None and self._hardware.type == "cpu"
        ends_ns = [time.perf_counter_ns()]
        for instruction in self._code:
            try:
                instruction.run(values, scalars, generator)
            except Exception as error:
                there = {i: data for i, data in enumerate(values) if data is not None}
                raise _failure(instruction.node, there) from error
            if is_timed:
                ends_ns.append(time.perf_counter_ns())
        if is_timed and op_times.on is not None:
            op_times.on(self._nodes, [end - start for start, end in itertools.pairwise(ends_ns)])
        return [self._output(values[i], copied, dtype) for i, copied, dtype in self._outputs]

    def _choose(self) -> None:
        """Build the replay at the first run, once the C++ part is built, which a thread of the background does.

        Where graphs do not come again, what only later runs gain from is left out, and built at the second run.

        While the ops are timed, two runs are in Python: in the first one many ops load libraries and touch new memory.
        """
        is_waited_for = settings.replay == "always"
        least_runs = 0 if op_times.on is None else 2
        if not is_waited_for and not (self._num_runs >= least_runs and replay.extension.loaded):
            self._num_runs += 1
            return
        memory = self._plan
        assert memory is not None
        is_for_once = novelty.is_rule and self._replay is None
        if not is_for_once:
            self._plan = None
        self._replay = replay.build(
            self._nodes,
            memory,
            is_for_once,
            self._inputs,
            self._donated,
            self._outputs,
            self._size,
            self._code.run_one,
            self._code.generator,
        )

    def _run_replay(
        self,
        program: replay.Replay,
        inputs: Sequence[Any],
        scalars: Sequence[Any],
        watch: Watch | None,
    ) -> list[Any] | None:
        """Results of a run in C++; None if it does not take these scalars, and Python has to run it."""
        watched = None if watch is None else self._watched(watch)
        given = inputs if type(inputs) is list else list(inputs)
        return self._results(program.run(given, scalars, watched))

    def _results(self, found: list[Any] | replay.Failed | None) -> list[Any] | None:
        if found is None:
            return None
        self.is_replayed = True
        if isinstance(found, replay.Failed):
            if not isinstance(found.error, Exception):
                raise found.error
            raise _failure(self._nodes[found.position], found.values) from found.error
        return found

    @staticmethod
    def _output(data: torch.Tensor, copied: bool, dtype: torch.dtype) -> torch.Tensor:
        if data.dtype is not dtype:  # stored dtypes may promote otherwise than reported ones
            return data.to(dtype)
        return data.clone() if copied else data

    def salvage(self, inputs: Sequence[Any], scalars: Sequence[Any]) -> Salvaged:
        return self._salvage({}, inputs, scalars, None)

    @in_own_state
    def _salvaged(
        self, failure: SubgraphFailure, inputs: Sequence[Any], scalars: Sequence[Any]
    ) -> NodeFailure:
        """The failure of a run, with the outputs that are left after it."""
        assert failure.node is not None
        return NodeFailure(
            failure.node, self._salvage(failure.values, inputs, scalars, failure.node)
        )

    def _salvage(
        self,
        values: dict[int, Any],
        inputs: Sequence[Any],
        scalars: Sequence[Any],
        failed: Node | None,
    ) -> Salvaged:
        """Outputs that are left after node `failed`; with None, no node has run because inputs are lost."""
        taken = set()
        for i, data in zip(self._inputs, inputs, strict=True):
            if data is not None:
                values.setdefault(i, data)
                if i not in self._donated:
                    taken.add(data.untyped_storage()._cdata)
        nodes = self._nodes
        rest = nodes[nodes.index(failed) :] if failed is not None else nodes
        firsts = (failed.first,) if failed is not None else ()
        run = rest_runner(scalars, self._types, self._hardware)
        found = salvage(self._origins, self._inputs, values, rest, firsts, run)
        dtypes = {output: dtype for output, _, dtype in self._outputs}
        for output, data in found.data.items():
            storage = data.untyped_storage()._cdata
            found.data[output] = self._output(data, storage in taken, dtypes[output])
            taken.add(storage)
        return found


def _failure(node: Node, values: dict[int, Any]) -> SubgraphFailure:
    """The failure of a node; what it may have half made is not among the values."""
    made = range(node.first, node.first + len(node.outs))
    return SubgraphFailure(node, {i: data for i, data in values.items() if i not in made})


def rest_runner(
    scalars: Sequence[Any], types: StorageTypes | None, hardware: torch.device
) -> Callable[[Node, dict[int, Any]], None]:
    """Function that runs single nodes for `salvage`; it overwrites copies only."""
    generator = _generator(hardware)

    def run(node: Node, values: dict[int, Any]) -> None:
        instruction = Instruction(node, [False] * len(node.writes), (), types, hardware)
        instruction.run(values, scalars, generator)

    return run
