"""The XLA executor: graphs on a TPU, or on any other device of PJRT, through torch_xla's library.

A graph is split into subgraphs, most often one. A compiled subgraph is traced at its first run and then launched as a
program (`launch`). Scalars and the keys of random draws are its inputs, uploaded in one transfer. Ops that torch_xla
does not lower, and collectives that cannot be in a program, run on the host between compiled subgraphs. States of
random streams stay on the host. Made by `executors.make`.
"""

from __future__ import annotations

import hashlib
import weakref
from collections.abc import Sequence, Set
from typing import Any

import torch

from ltc_core import metrics
from ltc_core.errors import CollectiveError
from ltc_core.executors.base import CPU, Executor
from ltc_core.executors.reference.program import ReferenceProgram
from ltc_core.executors.torch_xla.device import XlaDevice
from ltc_core.executors.torch_xla.launch import Launch
from ltc_core.executors.torch_xla.lowering import LOWERING
from ltc_core.graph import collective
from ltc_core.graph.ir import Graph, Node, TensorMeta
from ltc_core.graph.passes import origins
from ltc_core.program.backend import Backend, divide
from ltc_core.program.failure import NodeFailure, Salvaged, SubgraphFailure
from ltc_core.program.lowering.retrace import Refused
from ltc_core.program.partitioned import PartitionedProgram, SubgraphRunner
from ltc_core.program.passes import random_keys
from ltc_core.program.passes.initial_state import initial_values, without_operands
from ltc_core.program.passes.narrow_dtypes import StorageTypes
from ltc_core.program.plan import plan
from ltc_core.program.program import Program
from ltc_core.program.scalar_inputs import SCALAR_DTYPES, kinds
from ltc_core.program.specialize import Specialized
from ltc_core.program.subgraph import Subgraph
from ltc_core.settings import settings

__all__ = ["XlaExecutor"]

Tensor = torch.Tensor

# Programs kept for one graph: each is compiled for other values of the scalars that are constants.
_MAX_PROGRAMS = 16
# In this many first runs of a graph, its initial values, such as an optimizer's zeros, are made on the host.
_FIRST_RUNS = 3

# (device, digest of a subgraph's text) -> its traced program: equal subgraphs share it.
_launches: weakref.WeakValueDictionary[tuple[str, str], Launch] = weakref.WeakValueDictionary()


class XlaExecutor(Executor):
    """Runs graphs on one device of PJRT.

    Args:
        index: index of the device in this process.

    Raises:
        DeviceError: torch_xla cannot be loaded, or has no such device.
    """

    name = "torch_xla"

    def __init__(self, index: int) -> None:
        self.xla = XlaDevice(index)
        super().__init__(torch.device("xla", index))

    def upload(self, tensor: Tensor) -> Any:
        return self.upload_all([tensor])[0]

    def upload_all(self, tensors: Sequence[Tensor]) -> list[Any]:
        # Copies, because the caller may overwrite the tensors before the transfer has read them.
        stored = self.xla.stored
        return self.xla.send([t.detach().to(stored(t.dtype), copy=True) for t in tensors])

    def copy(self, data: Any) -> Any:
        return self.xla.copy(data)

    def view(self, data: Any, meta: TensorMeta) -> Tensor:
        return self.xla.fetch([data])[0].to(meta.dtype)

    def nbytes(self, meta: TensorMeta) -> int:
        return self.xla.types.stored_meta(meta).nbytes

    def compile(self, graph: Graph) -> Program:
        for node in graph.nodes:
            for meta in node.outs:
                if meta is not None:
                    self.xla.stored(meta.dtype, node.line)
        return XlaProgram(without_operands(self.xla.types.rewrite_all(graph)), self.xla)

    def synchronize(self) -> None:
        self.xla.synchronize()

    def memory_info(self) -> tuple[int, int]:
        try:
            found = self.xla.library._xla_memory_info(self.xla.name)
        except RuntimeError:  # PJRT's CPU client does not report it
            return super().memory_info()
        return found["bytes_limit"] - found["bytes_used"], found["bytes_limit"]

    @property
    def kind(self) -> str:
        return str(self.xla.library._xla_device_kind(self.xla.name))


class XlaProgram(Program):
    """A graph that is compiled at its first run: only then are its scalars known, of which some become constants."""

    def __init__(self, graph: Graph, device: XlaDevice) -> None:
        memory = plan(graph)
        self.peak_bytes = memory.peak_bytes
        self.reuses = memory.reuses
        self._graph = graph
        self._device = device
        self._programs: Specialized[None] = Specialized(_MAX_PROGRAMS)
        self._firsts = initial_values(graph)
        self._runs = 0

    def run(self, inputs: Sequence[Any], scalars: Sequence[Any]) -> list[Any]:
        self._runs += 1
        if self._runs > _FIRST_RUNS and self._firsts:
            self._firsts.clear()  # the graph is no first step: it makes its initial values in each run
            self._programs.clear()
        compiled = self._programs.find(scalars, None)
        if compiled is None:
            compiled = self._make(scalars)
        return compiled.run(inputs, scalars)

    def _make(self, scalars: Sequence[Any]) -> PartitionedProgram:
        """Program for these scalars; those that have changed between runs are inputs, if their ops allow it."""
        self._programs.note(scalars)
        varied = self._programs.varied
        compiled = _partitioned(self._graph, scalars, varied, self._device, self._firsts)
        self._programs.add(compiled, None)
        return compiled

    def salvage(self, inputs: Sequence[Any], scalars: Sequence[Any]) -> Salvaged:
        given = dict(zip(self._graph.inputs, inputs, strict=True))
        chains = origins(self._graph.nodes, self._graph.outputs)
        kept = {}
        for output, versions in chains.items():
            data = given.get((output, *versions)[-1])
            if data is not None:
                kept[output] = self._device.copy(data)
        return Salvaged(kept, frozenset(output for output in kept if chains[output]), {})


class _Backend(Backend):
    """How torch_xla's library is used.

    Args:
        firsts: first values of the nodes that make initial values. They run on the host, so that the compiled subgraphs
            of a first step are those of later steps, where the values are inputs.
    """

    def __init__(self, device: XlaDevice, firsts: Set[int]) -> None:
        self._device = device
        self._firsts = firsts
        self.passes = (_with_keys,) if settings.random == "device" else ()

    def refuses(self, graph: Graph, scalars: Sequence[Any]) -> dict[int, str]:
        found = dict.fromkeys(self.has_no_view(graph), "torch_xla does not lower it")
        for at, node in enumerate(graph.nodes):
            if _runs_on_host(node, self._device):
                found[at] = "it runs on the host"
            elif node.first in self._firsts:
                found[at] = "it makes an initial value"
        return found

    def has_no_view(self, graph: Graph) -> Set[int]:
        metas = graph.metas()
        return {at for at, node in enumerate(graph.nodes) if LOWERING.refuses(node, metas)}


def _with_keys(graph: Graph) -> Graph:
    return random_keys.with_keys(graph, LOWERING.refused_ops)


def _partitioned(
    graph: Graph,
    scalars: Sequence[Any],
    varied: frozenset[int],
    device: XlaDevice,
    firsts: Set[int] = frozenset(),
) -> PartitionedProgram:
    """Program of a graph; `firsts` are the positions of the nodes that make initial values."""
    backend = _Backend(device, {graph.nodes[at].first for at in firsts})
    graph, subgraphs = divide(graph, backend, scalars, varied)
    of_host = random_keys.of_host(graph)
    runners = [
        _Compiled(subgraph, device) if subgraph.compiled else _Host(subgraph, device, of_host)
        for subgraph in subgraphs
    ]
    return PartitionedProgram(graph, runners, memory_of=id)


def _runs_on_host(node: Node, device: XlaDevice) -> bool:
    if node.op in collective.OPS:
        return not device.collectives.reduces_in_graph(node)
    return node.op is random_keys.NEXT_KEY or random_keys.is_draw(node)


class _Host(SubgraphRunner):
    """Runs a subgraph op by op on the host. Results in `of_host` stay there, others are uploaded."""

    def __init__(self, subgraph: Subgraph, device: XlaDevice, of_host: frozenset[int]) -> None:
        super().__init__(subgraph)
        self._device = device
        # The graph has stored dtypes already. `StorageTypes` runs ops without a kernel for a narrow dtype in float32.
        self._program = ReferenceProgram(
            subgraph.graph, plan(subgraph.graph), StorageTypes({}), CPU
        )
        self._sent = [k for k, value in enumerate(subgraph.outputs) if value not in of_host]
        metas = subgraph.graph.metas()
        self._fallbacks = [
            f"aten::{node.op._opname}"
            for node in subgraph.graph.nodes
            if LOWERING.refuses(node, metas)
        ]

    def run(self, values: dict[int, Any], scalars: Sequence[Any]) -> None:
        subgraph = self.subgraph
        for name in self._fallbacks:
            metrics.count(name)
        given = [values[i] for i in subgraph.inputs]
        try:
            results = self._program.run_or_stop(
                self._device.fetch(given), [scalars[k] for k in subgraph.scalars]
            )
        except SubgraphFailure as failure:  # its inputs are still on the device
            failure.values.update(zip(subgraph.graph.inputs, given, strict=True))
            raise
        if self._sent:
            sent = self._device.send([results[k] for k in self._sent])
            for k, data in zip(self._sent, sent, strict=True):
                results[k] = data
        values.update(zip(subgraph.outputs, results, strict=True))


class _Compiled(SubgraphRunner):
    """Runs a subgraph as one XLA program. If an op of it turns out not to be lowered, the subgraph is split again."""

    def __init__(self, subgraph: Subgraph, device: XlaDevice) -> None:
        super().__init__(subgraph)
        self._device = device
        self._launch: Launch | None = None
        self._partitioned: PartitionedProgram | None = None
        typed = list(zip(subgraph.scalars, subgraph.scalar_types, strict=True))
        self._vectors = [
            (SCALAR_DTYPES[kind], [k for k, t in typed if t is kind])
            for kind in kinds(subgraph.scalar_types)
        ]
        self._numbers: list[tuple[Any, ...]] = []  # the scalars in `_vectors_sent`
        self._vectors_sent: list[Tensor] = []

    def run(self, values: dict[int, Any], scalars: Sequence[Any]) -> None:
        subgraph = self.subgraph
        given = [values[i] for i in subgraph.inputs]
        if self._partitioned is None:
            inputs = self._on_device(given, scalars)
            try:
                results = self._launched(inputs)
            except SubgraphFailure as failure:
                is_written = self._launch is not None and not isinstance(
                    failure.__cause__, CollectiveError
                )
                failure.values.update(self._kept(given, is_written))
                raise
            except Refused:  # LOWERING has noted the op
                numbers = [scalars[k] for k in subgraph.scalars]
                varied = frozenset(range(len(numbers)))
                self._partitioned = _partitioned(subgraph.graph, numbers, varied, self._device)
        if self._partitioned is not None:
            numbers = [scalars[k] for k in subgraph.scalars]
            try:
                results = self._partitioned.run(given, numbers)
            except NodeFailure as failure:
                raise self._failure_of(failure, given) from failure.__cause__
        values.update(zip(subgraph.outputs, results, strict=True))

    def _kept(self, given: Sequence[Any], is_written: bool) -> dict[int, Any]:
        """Number -> data of the inputs; if `is_written`, without the donated ones, which may be overwritten."""
        graph = self.subgraph.graph
        return {
            number: data
            for number, data in zip(graph.inputs, given, strict=True)
            if not (is_written and number in graph.donated)
        }

    def _failure_of(self, failure: NodeFailure, given: Sequence[Any]) -> SubgraphFailure:
        """The `SubgraphFailure` of a split subgraph; an output's earlier version is stored as the input it was."""
        graph = self.subgraph.graph
        chains = origins(graph.nodes, graph.outputs)
        left = {
            (chains[output][-1] if output in failure.left.older else output): data
            for output, data in failure.left.data.items()
        }
        node = failure.node if failure.node in graph.nodes else None
        return SubgraphFailure(node, {**self._kept(given, is_written=True), **left})

    def _on_device(self, given: Sequence[Any], scalars: Sequence[Any]) -> list[Tensor]:
        """Inputs of the program, with the vectors of scalars; those on the host are uploaded in one transfer."""
        numbers = [tuple(scalars[k] for k in positions) for _, positions in self._vectors]
        are_new = numbers != self._numbers
        vectors = self._vectors_sent
        if are_new:
            vectors = [
                torch.tensor(row, dtype=dtype)
                for row, (dtype, _) in zip(numbers, self._vectors, strict=True)
            ]
        inputs = [*given, *vectors]
        here = [k for k, data in enumerate(inputs) if data.device.type == "cpu"]
        if here:
            for k, data in zip(here, self._device.send([inputs[k] for k in here]), strict=True):
                inputs[k] = data
        self._numbers, self._vectors_sent = numbers, inputs[len(given) :]
        return inputs

    def _launched(self, inputs: list[Tensor]) -> list[Tensor]:
        """Results of the program, which is traced at the first call.

        Raises:
            Refused: an op is not lowered; nothing has run.
            SubgraphFailure: XLA could not compile the program, or it failed.
        """
        try:
            if self._launch is None:
                self._launch = self._traced(inputs)
            return self._launch.run(inputs)
        except Refused:
            raise
        except RuntimeError as error:
            raise SubgraphFailure(None, {}) from error

    def _traced(self, inputs: list[Tensor]) -> Launch:
        text = hashlib.sha256(self.subgraph.text().encode()).hexdigest()
        found = _launches.get((self._device.name, text))
        if found is None:
            found = _launches[self._device.name, text] = Launch(self.subgraph, self._device, inputs)
            metrics.count("CompiledProgram")
        return found
