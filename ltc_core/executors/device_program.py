"""Programs on a device with memory of its own: compiled subgraphs there, and the rest on the host between them.

A graph is split into subgraphs, most often one. Scalars and the keys of random draws are inputs of the compiled ones,
uploaded in one transfer. Ops that the device's compiler does not take, and collectives that cannot be in a program, run
on the host. States of random streams stay on the host. `DeviceRuntime` is what a device does for that; each executor of
such devices has one.
"""

from __future__ import annotations

import abc
import hashlib
import weakref
from collections.abc import Hashable, Mapping, Sequence, Set
from typing import Any, NamedTuple

import torch

from ltc_core import metrics, progress, source
from ltc_core.errors import CollectiveError, ShardingError
from ltc_core.executors.base import CPU, Executor
from ltc_core.executors.compiled_again import Change, tell
from ltc_core.executors.reference.program import ReferenceProgram
from ltc_core.graph import collective
from ltc_core.graph.ir import Graph, Node, TensorMeta, references
from ltc_core.graph.manual_sharding import Misused, value_error
from ltc_core.graph.passes import origins
from ltc_core.program.backend import Backend, divide
from ltc_core.program.failure import NodeFailure, Salvaged, SubgraphFailure
from ltc_core.program.lowering.retrace import Refused
from ltc_core.program.partitioned import PartitionedProgram, SubgraphRunner
from ltc_core.program.passes import random_keys
from ltc_core.program.passes.initial_state import initial_values, without_operands
from ltc_core.program.passes.narrow_dtypes import StorageTypes
from ltc_core.program.plan import plan
from ltc_core.program.program import Program, Tier
from ltc_core.program.scalar_inputs import SCALAR_DTYPES, kinds
from ltc_core.program.specialize import Specialized
from ltc_core.program.subgraph import Subgraph
from ltc_core.settings import settings
from ltc_core.timeline import slices

__all__ = [
    "Apart",
    "Cost",
    "DeviceExecutor",
    "DeviceRuntime",
    "IndexOutOfRange",
    "Interrupted",
    "Launch",
    "launches",
]

Tensor = torch.Tensor

# Programs kept for one graph: each is compiled for other values of the scalars that are constants.
_MAX_PROGRAMS = 16
# In this many first runs of a graph, its initial values, such as an optimizer's zeros, are made on the host.
_FIRST_RUNS = 3


class IndexOutOfRange(Exception):
    """An index among the inputs is out of range; nothing has run.

    Args:
        error: for the user, where no op can be run on the host, because other processes have parts of its operands.
    """

    def __init__(self, error: IndexError | None = None) -> None:
        super().__init__()
        self.error = error


class Apart(Exception):
    """Other processes run another program; nothing has run. The collectives of this one run on the host this time."""


class Interrupted(Exception):
    """A program with collectives failed while it ran; the cause is the error. Donated inputs may be overwritten."""


class Cost(NamedTuple):
    """What one run of a program takes, as its compiler reckons it."""

    flops: float
    accessed_bytes: float
    temporary_bytes: int


class Launch(abc.ABC):
    """The compiled program of a subgraph.

    Attributes:
        subgraph: the subgraph.
        runs: how often it has run.
        is_saved: whether `Program.take_hlo` has returned its text.
    """

    runs = 0
    is_saved = False

    def __init__(self, subgraph: Subgraph) -> None:
        self.subgraph = subgraph

    def hlo(self) -> str:
        """StableHLO of the program, for devices that show it. Cost: traces the subgraph again."""
        raise NotImplementedError

    def cost(self) -> Cost | None:
        """What a run takes, if the compiler says so. Cost: some milliseconds."""
        return None

    @abc.abstractmethod
    def run(self, inputs: Sequence[Any]) -> list[Any]:
        """Data of the subgraph's outputs, from that of its inputs, then of the vectors of its scalars.

        Raises:
            Apart: nothing has run; the collectives are to run on the host.
            CollectiveError: nothing has run; other processes are at another collective, or have ended.
            IndexOutOfRange: nothing has run; run op by op, the op at fault raises its own error.
            Interrupted: a collective of the program failed.
            IndexError, RuntimeError: it failed; donated inputs may be overwritten.
        """


class DeviceRuntime(abc.ABC):
    """What a device does for its programs: transfers, and compiling.

    Data that stay on the host are CPU tensors; those on the device are what `send` returns.

    Attributes:
        name: unique name of the device in this process.
        types: the dtype in which a tensor of each dtype is stored.
        shows_hlo: whether its programs can be shown as StableHLO.
        refused_ops: names of the ops that always run on the host.
    """

    name: str
    types: StorageTypes
    shows_hlo = False

    @property
    @abc.abstractmethod
    def refused_ops(self) -> frozenset[str]: ...

    @abc.abstractmethod
    def stored(self, dtype: torch.dtype, where: str = "") -> torch.dtype:
        """Dtype in which a tensor is stored.

        Raises:
            DeviceError: the device has no such type; `where` is the user's line.
        """

    @abc.abstractmethod
    def is_on_host(self, data: Any) -> bool:
        """Whether data are a CPU tensor."""

    @abc.abstractmethod
    def send(self, tensors: Sequence[Tensor]) -> list[Any]:
        """Upload CPU tensors in one transfer. They must not be overwritten afterwards."""

    def upload(self, tensors: Sequence[Tensor]) -> list[Any]:
        """Upload values of the user's tensors, as `send`; they may be divided over a mesh."""
        return self.send(tensors)

    @abc.abstractmethod
    def fetch(self, data: Sequence[Any]) -> list[Tensor]:
        """Data as CPU tensors of the stored dtype, in one transfer. Cost: waits for the programs that compute them."""

    @abc.abstractmethod
    def copy(self, data: Any) -> Any:
        """Copy of data, on the device or on the host, where they are."""

    @abc.abstractmethod
    def refuses(self, node: Node, metas: Mapping[int, TensorMeta]) -> bool:
        """Whether the device's compiler is known not to take a node."""

    @abc.abstractmethod
    def reduces_in_graph(self, node: Node) -> bool:
        """Whether a node's collective can be an op of a program."""

    @property
    def has_mesh(self) -> bool:
        """Whether data may be divided over several devices."""
        return False

    def sent(self, data: Sequence[Any]) -> Sequence[Any]:
        """Data of the inputs of a program, of which none waits on the host for its first use any more."""
        return data

    def is_manual(self, data: Any, meta: TensorMeta) -> bool:
        """Whether each device of a mesh has a value of its own of a tensor of this meta."""
        return False

    def placement(self, inputs: Sequence[Any]) -> Hashable:
        """What a program depends on besides its subgraph, such as how its inputs are divided over devices."""
        return None

    def change(self, before: Any, after: Any) -> Change:
        """What differs between two results of `placement`."""
        raise AssertionError(f"{self.name} has one placement")

    def place_like(self, data: Any, other: Any) -> Any:
        """Data divided over devices as other data of the same size are."""
        return data

    @abc.abstractmethod
    def compile(self, subgraph: Subgraph, inputs: Sequence[Any]) -> Launch:
        """Compile a subgraph for inputs like these, which are on the device.

        Raises:
            Refused: the compiler does not take a node; `refuses` is true of it from now on.
            RuntimeError: it cannot be compiled.
            Misused: a manual tensor cannot be used so.
        """


class DeviceExecutor(Executor):
    """Runs graphs on one such device.

    Args:
        runtime: the device.
        hardware: the PyTorch device that computes; the host's where PyTorch does not know it.
    """

    def __init__(self, runtime: DeviceRuntime, hardware: torch.device = CPU) -> None:
        super().__init__(hardware)
        self._runtime = runtime

    def upload(self, tensor: Tensor) -> Any:
        return self.upload_all([tensor])[0]

    def upload_all(self, tensors: Sequence[Tensor]) -> list[Any]:
        # Copies, because the caller may overwrite the tensors before the transfer has read them.
        stored = self._runtime.stored
        return self._runtime.upload([t.detach().to(stored(t.dtype), copy=True) for t in tensors])

    def copy(self, data: Any) -> Any:
        return self._runtime.copy(data)

    def view(self, data: Any, meta: TensorMeta) -> Tensor:
        if self._runtime.is_manual(data, meta):
            raise value_error("a manual tensor cannot be read", source.user_line())
        return self._runtime.fetch([data])[0].to(meta.dtype)

    def nbytes(self, meta: TensorMeta) -> int:
        return self._runtime.types.stored_meta(meta).nbytes

    @property
    def has_mesh(self) -> bool:
        return self._runtime.has_mesh

    def place_like(self, data: Any, other: Any) -> Any:
        return self._runtime.place_like(data, other)

    def compile(self, graph: Graph) -> Program:
        return DeviceProgram(graph, self._runtime)


# (device, digest of a subgraph's text, placement) -> its compiled program: equal subgraphs share it.
_launches: weakref.WeakValueDictionary[tuple[str, str, Hashable], Launch] = (
    weakref.WeakValueDictionary()
)


def launches(device_name: str = "") -> list[Launch]:
    """The compiled programs that are in use, by default those of all devices."""
    # `valuerefs` copies the list in one step: a worker may add to it meanwhile.
    found = [ref() for ref in _launches.valuerefs() if device_name in ("", ref.key[0])]
    return [launch for launch in found if launch is not None]


class DeviceProgram(Program):
    """A graph that is compiled at its first run: only then are its scalars known, of which some become constants.

    Raises:
        DeviceError: a value of the graph has a dtype that the device has not.
    """

    def __init__(self, graph: Graph, device: DeviceRuntime) -> None:
        for node in graph.nodes:
            for meta in node.outs:
                if meta is not None:
                    device.stored(meta.dtype, node.line)
        graph = without_operands(device.types.rewrite_all(graph))
        memory = plan(graph)
        self.peak_bytes = memory.peak_bytes
        self.reuses = memory.reuses
        places = {number: k for k, number in enumerate(graph.inputs)}
        # Position of an output, and of the input whose memory it takes.
        self._replaced = [
            (k, places[self.reuses[output]])
            for k, output in enumerate(graph.outputs)
            if output in self.reuses
        ]
        self._graph = graph
        self._device = device
        self._programs: Specialized[None] = Specialized(_MAX_PROGRAMS)
        # Divided over a mesh as the compiler finds best; on the host they would come back whole.
        self._firsts = set() if device.has_mesh else initial_values(graph)
        self._runs = 0

    @property
    def runs_as(self) -> str:
        return Tier.COMPILED.words

    def run(self, inputs: Sequence[Any], scalars: Sequence[Any]) -> list[Any]:
        self._runs += 1
        inputs = self._device.sent(inputs)
        if self._runs > _FIRST_RUNS and self._firsts:
            self._firsts.clear()  # the graph is no first step: it makes its initial values in each run
            self._programs.clear()
        compiled = self._programs.find(scalars, None)
        if compiled is None:
            compiled = self._make(scalars)
        results = compiled.run(inputs, scalars)
        if self._device.has_mesh:
            self._keep_divided(inputs, results)
        return results

    def take_hlo(self) -> list[str]:
        if not self._device.shows_hlo:
            return [self._graph.text()]
        unsaved = [launch for launch in launches(self._device.name) if not launch.is_saved]
        for launch in unsaved:
            launch.is_saved = True
        return [launch.hlo() for launch in unsaved]

    def _keep_divided(self, inputs: Sequence[Any], results: list[Any]) -> None:
        """Divide what was computed on the host as the memory that it replaces."""
        for k, replaced in self._replaced:
            results[k] = self._device.place_like(results[k], inputs[replaced])

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
    """How a device compiles graphs.

    Args:
        firsts: first values of the nodes that make initial values. They run on the host, so that the compiled subgraphs
            of a first step are those of later steps, where the values are inputs.
        is_apart: whether all collectives run on the host.
    """

    def __init__(self, device: DeviceRuntime, firsts: Set[int], is_apart: bool) -> None:
        self._device = device
        self._firsts = firsts
        self._is_apart = is_apart
        self.passes = (self._with_keys,) if settings.random == "device" else ()

    def refuses(self, graph: Graph, scalars: Sequence[Any]) -> dict[int, str]:
        found = dict.fromkeys(self.has_no_view(graph), "the compiler does not take it")
        for at, node in enumerate(graph.nodes):
            if _runs_on_host(node, self._device, self._is_apart):
                found[at] = "it runs on the host"
            elif node.first in self._firsts:
                found[at] = "it makes an initial value"
        return found

    def has_no_view(self, graph: Graph) -> Set[int]:
        metas = graph.metas()
        return {at for at, node in enumerate(graph.nodes) if self._device.refuses(node, metas)}

    def _with_keys(self, graph: Graph) -> Graph:
        return random_keys.with_keys(graph, self._device.refused_ops)


def _partitioned(
    graph: Graph,
    scalars: Sequence[Any],
    varied: frozenset[int],
    device: DeviceRuntime,
    firsts: Set[int] = frozenset(),
    is_apart: bool = False,
) -> PartitionedProgram:
    """Program of a graph; `firsts` are the positions of the nodes that make initial values."""
    backend = _Backend(device, {graph.nodes[at].first for at in firsts}, is_apart)
    names = graph.outputs
    graph, subgraphs = divide(graph, backend, scalars, varied)
    of_host = random_keys.of_host(graph)
    runners = [
        _Compiled(subgraph, device) if subgraph.compiled else _Host(subgraph, device, of_host)
        for subgraph in subgraphs
    ]
    return PartitionedProgram(graph, runners, memory_of=id, names=names)


def _runs_on_host(node: Node, device: DeviceRuntime, is_apart: bool) -> bool:
    if node.op in collective.OPS:
        return is_apart or not device.reduces_in_graph(node)
    return node.op is random_keys.NEXT_KEY or random_keys.is_draw(node)


class _Host(SubgraphRunner):
    """Runs a subgraph op by op on the host. Results in `of_host` stay there, others are uploaded."""

    def __init__(self, subgraph: Subgraph, device: DeviceRuntime, of_host: frozenset[int]) -> None:
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
            if device.refuses(node, metas)
        ]

    def run(self, values: dict[int, Any], scalars: Sequence[Any]) -> None:
        subgraph = self.subgraph
        for name in self._fallbacks:
            metrics.count(name)
        given = [values[i] for i in subgraph.inputs]
        self._check_whole(given)
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

    def _check_whole(self, given: Sequence[Any]) -> None:
        """Check that no input is a manual tensor.

        Raises:
            SubgraphFailure: one is.
        """
        graph = self.subgraph.graph
        for (number, meta), data in zip(graph.inputs.items(), given, strict=True):
            if self._device.is_manual(data, meta):
                node = next((n for n in graph.nodes if number in references(n)), graph.nodes[0])
                error = value_error(
                    f"{node.op} of a manual tensor would run on the host", node.line
                )
                kept = dict(zip(graph.inputs, given, strict=True))
                raise SubgraphFailure(node, kept) from error


class _Compiled(SubgraphRunner):
    """Runs a subgraph as one program. If the compiler turns out not to take an op of it, it is split again."""

    def __init__(self, subgraph: Subgraph, device: DeviceRuntime) -> None:
        super().__init__(subgraph)
        self._device = device
        self._launches: dict[Hashable, Launch] = {}  # by placement
        self._placement: Hashable = None  # of the last run
        self._partitioned: PartitionedProgram | None = None
        self._apart: PartitionedProgram | None = None  # with the collectives on the host
        self._is_interrupted = False
        typed = list(zip(subgraph.scalars, subgraph.scalar_types, strict=True))
        self._vectors = [
            (SCALAR_DTYPES[kind], [k for k, t in typed if t is kind])
            for kind in kinds(subgraph.scalar_types)
        ]
        self._numbers: list[tuple[Any, ...]] = []  # the scalars in `_vectors_sent`
        self._vectors_sent: list[Any] = []

    def run(self, values: dict[int, Any], scalars: Sequence[Any]) -> None:
        subgraph = self.subgraph
        given = [values[i] for i in subgraph.inputs]
        divided = self._partitioned
        if divided is None:
            inputs = self._on_device(given, scalars)
            try:
                results = self._launched(inputs)
            except SubgraphFailure as failure:
                has_not_run = isinstance(failure.__cause__, CollectiveError | ShardingError)
                is_written = self._is_interrupted or (bool(self._launches) and not has_not_run)
                failure.values.update(self._kept(given, is_written))
                raise
            except IndexOutOfRange as found:
                if found.error is not None:
                    raise SubgraphFailure(
                        None, self._kept(given, is_written=False)
                    ) from found.error
                return _Host(subgraph, self._device, frozenset()).run(values, scalars)
            except Refused:  # the device has noted the op
                divided = self._partitioned = self._divided(scalars, is_apart=False)
            except Apart:
                self._apart = self._apart or self._divided(scalars, is_apart=True)
                divided = self._apart
        if divided is not None:
            numbers = [scalars[k] for k in subgraph.scalars]
            try:
                results = divided.run(given, numbers)
            except NodeFailure as failure:
                raise self._failure_of(failure, given) from failure.__cause__
        values.update(zip(subgraph.outputs, results, strict=True))

    def _divided(self, scalars: Sequence[Any], is_apart: bool) -> PartitionedProgram:
        """The subgraph as several."""
        numbers = [scalars[k] for k in self.subgraph.scalars]
        varied = frozenset(range(len(numbers)))
        return _partitioned(self.subgraph.graph, numbers, varied, self._device, is_apart=is_apart)

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

    def _on_device(self, given: Sequence[Any], scalars: Sequence[Any]) -> list[Any]:
        """Inputs of the program, with the vectors of scalars; those on the host are uploaded in one transfer."""
        numbers = [tuple(scalars[k] for k in positions) for _, positions in self._vectors]
        are_new = numbers != self._numbers
        vectors: list[Any] = self._vectors_sent
        if are_new:
            vectors = [
                torch.tensor(row, dtype=dtype)
                for row, (dtype, _) in zip(numbers, self._vectors, strict=True)
            ]
        inputs = [*given, *vectors]
        here = [k for k, data in enumerate(inputs) if self._device.is_on_host(data)]
        if here:
            for k, data in zip(here, self._device.send([inputs[k] for k in here]), strict=True):
                inputs[k] = data
        self._numbers, self._vectors_sent = numbers, inputs[len(given) :]
        return inputs

    def _launched(self, inputs: list[Any]) -> list[Any]:
        """Results of the program, which is compiled at the first call.

        Raises:
            Apart: the collectives are to run on the host this time; nothing has run.
            Refused: the compiler does not take an op; nothing has run.
            SubgraphFailure: the program could not be compiled, or it failed.
        """
        try:
            placement = self._device.placement(inputs)
            launch = self._launches.get(placement)
            if launch is None:
                if self._launches:
                    tell(self._device.change(self._placement, placement), self.subgraph.graph)
                launch = self._launches[placement] = self._compiled(inputs, placement)
            self._placement = placement
            launch.runs += 1
            return launch.run(inputs)
        except Refused:
            raise
        except Interrupted as error:
            self._is_interrupted = True
            raise SubgraphFailure(None, {}) from error.__cause__
        except Misused as found:
            raise SubgraphFailure(found.node, {}) from found.error
        except (IndexError, RuntimeError) as error:
            raise SubgraphFailure(None, {}) from error

    def _compiled(self, inputs: list[Any], placement: Hashable) -> Launch:
        text = hashlib.sha256(self.subgraph.text().encode()).hexdigest()
        found = _launches.get((self._device.name, text, placement))
        if found is None:
            waited_for = progress.shown(f"compiling a graph of {len(self.subgraph.nodes)} ops")
            with slices.watched("compile") as seen, metrics.timer("CompilerWait"), waited_for:
                if seen is not None:
                    seen.note(ops=len(self.subgraph.nodes))
                found = self._device.compile(self.subgraph, inputs)
            _launches[self._device.name, text, placement] = found
            metrics.count("CompiledProgram")
        return found
