"""A subgraph as one XLA program: traced once on the tensors of a run, then launched on those of each run.

A trace calls the nodes on torch_xla's tensors (`program.lowering.retrace`). It shows the inputs of the program, in the
library's order, and the source of each output: a result, an input or a constant. Several outputs may have one source;
it is copied for all but the first. The memory of donated inputs is reused for results. Used by `executor`.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
import hashlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from ltc_core.executors.device_program import Launch
from ltc_core.executors.torch_xla.collectives import plan_of
from ltc_core.executors.torch_xla.device import TRACING, XlaDevice
from ltc_core.executors.torch_xla.lowering import LOWERING
from ltc_core.graph import collective
from ltc_core.graph.ir import Graph, Node, TensorMeta
from ltc_core.program.lowering.decompositions import FOR_XLA
from ltc_core.program.lowering.random_draws import draw
from ltc_core.program.lowering.retrace import Refused, Retrace
from ltc_core.program.plan import plan
from ltc_core.program.subgraph import Subgraph

__all__ = ["XlaRuntime"]

Tensor = torch.Tensor
_BITS = torch.ops.aten.view.dtype


class _From(enum.Enum):
    """Where an output comes from."""

    INPUT = enum.auto()
    RESULT = enum.auto()
    CONSTANT = enum.auto()


class XlaLaunch(Launch):
    """The program of a subgraph: its inputs, and the source of each output.

    Args:
        subgraph: the subgraph.
        inputs: data of this run, on the device, for the trace.
    """

    def __init__(self, subgraph: Subgraph, device: XlaDevice, inputs: Sequence[Tensor]) -> None:
        super().__init__(subgraph)
        self._device = device
        library = self._library = device.library
        with TRACING, torch.no_grad():
            device.synchronize()  # data that are being computed have no handle yet
            library._xla_set_default_device(device.name)
            try:
                self._make(subgraph, inputs)
            finally:
                device.collectives.begin()
                library._clear_pending_irs(device.name)

    def _make(self, subgraph: Subgraph, inputs: Sequence[Tensor]) -> None:
        """Trace and compile."""
        replay, outputs = _trace(subgraph, self._device, inputs)
        # Read after the trace: an op that ran on the host during it may have changed the handles of its operands.
        handles = self._library._get_tensors_handle(list(inputs))
        assert len(set(handles)) == len(handles), "two inputs share one buffer"
        # Replicas that launched different programs would wait for each other forever, so the plans name the program.
        shape = _shape_of(subgraph.graph)
        program = "x".join(map(str, shape[1:]))
        self._plans = {g: f"{plan}; program {program}" for g, plan in replay.plans.items()}
        try:
            self._finish(subgraph.graph, inputs, outputs, handles, shape)
        except RuntimeError:
            replay.refuse_what_is_not_lowered()
            raise

    def _finish(
        self,
        graph: Graph,
        inputs: Sequence[Tensor],
        outputs: Sequence[Tensor],
        handles: list[int],
        shape: tuple[int, ...],
    ) -> None:
        """Compile the program; `shape` is unique to the graph (`_shape_of`)."""
        library = self._library
        index = {handle: k for k, handle in enumerate(handles)}
        sources = {
            library._unique_id_for_ir_and_data(t): (_From.INPUT, k) for k, t in enumerate(inputs)
        }
        computed: list[Tensor] = []
        self._constants: list[Tensor] = []
        self._sources: list[tuple[_From, int]] = []  # of each output
        for t in outputs:
            identity = library._unique_id_for_ir_and_data(t)
            if identity not in sources:
                if library._check_tensor_need_materialization([t])[0]:
                    sources[identity] = _From.RESULT, len(computed)
                    computed.append(t)
                else:
                    sources[identity] = self._known(t, index)
            self._sources.append(sources[identity])
        passing = {k for kind, k in self._sources if kind is _From.INPUT}
        for k, value in enumerate(graph.inputs):
            donated = value in graph.donated and k not in passing
            library._set_buffer_donation(inputs[k], donated)
        self._donated = {k for k, value in enumerate(graph.inputs) if value in graph.donated}
        self._hash = None
        self._takes: list[int | Tensor] = []
        if not computed:
            return
        # The library's hash of a graph does not distinguish inputs of equal shape: (x * y, -x) and (x * y, -y) would be
        # one program. So each program has an extra result without elements, whose shape is unique.
        computed.append(torch.zeros(shape, device=self._device.name))
        _, leaves = library._get_tensors_xla_device_data_node(computed)
        for leaf, handle in zip(leaves, library._get_tensors_handle(leaves), strict=True):
            self._takes.append(index.get(handle, leaf))  # a leaf that is no input is a constant
        self._hash = library._get_graph_hash(computed)
        library._xla_warm_up_cache(computed, [])

    def _known(self, t: Tensor, index: Mapping[int, int]) -> tuple[_From, int]:
        """Source of an output that the program does not compute: an input, or a constant such as a filled tensor."""
        _, (leaf,) = self._library._get_tensors_xla_device_data_node([t])
        (handle,) = self._library._get_tensors_handle([leaf])
        if handle in index:
            return _From.INPUT, index[handle]
        self._constants.append(leaf)
        return _From.CONSTANT, len(self._constants) - 1

    def run(self, inputs: Sequence[Tensor]) -> list[Tensor]:
        results: list[Tensor] = []
        if self._hash is not None:
            self._device.prepare_launch()
            taken = [inputs[k] if type(k) is int else k for k in self._takes]
            start = functools.partial(self._library._run_cached_graph, self._hash, taken)
            if self._plans:
                results = self._device.collectives.launch(self._plans, start)
            else:
                results = start()
        there = {_From.INPUT: inputs, _From.RESULT: results, _From.CONSTANT: self._constants}
        found, used = [], set()
        for source in self._sources:
            kind, k = source
            data = there[kind][k]
            is_free = kind is _From.RESULT or (kind is _From.INPUT and k in self._donated)
            if not is_free or source in used:
                data = self._device.copy(data)
            used.add(source)
            found.append(data)
        return found


class XlaRuntime(XlaDevice):
    """A device of PJRT with its compiler."""

    @property
    def refused_ops(self) -> frozenset[str]:
        return LOWERING.refused_ops

    def refuses(self, node: Node, metas: Mapping[int, TensorMeta]) -> bool:
        return LOWERING.refuses(node, metas)

    def compile(self, subgraph: Subgraph, inputs: Sequence[Tensor]) -> Launch:
        return XlaLaunch(subgraph, self, inputs)


def _shape_of(graph: Graph) -> tuple[int, ...]:
    """Shape without elements that identifies a graph by 60 bits of its digest.

    Replicas run the same program but may name the group differently, so routes are not digested.
    """
    nodes = tuple(
        dataclasses.replace(node, args=node.args[:-1]) if node.op in collective.OPS else node
        for node in graph.nodes
    )
    text = dataclasses.replace(graph, nodes=nodes).text(lines=False)
    digest = int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big")
    return (0, *((digest >> shift & 0x7FFF) + 1 for shift in (0, 15, 30, 45)))


def _trace(
    subgraph: Subgraph, device: XlaDevice, inputs: Sequence[Tensor]
) -> tuple[_Retrace, tuple[Tensor, ...]]:
    """The retrace of a subgraph, and its outputs."""
    while True:
        device.collectives.begin()
        replay = _Retrace(subgraph, device)
        try:
            return replay, replay.run(*inputs)
        except _Again:
            device.library._clear_pending_irs(device.name)


class _Again(BaseException):
    """The trace is to be repeated, with the decomposition of an op."""


class _Retrace(Retrace):
    decompositions = FOR_XLA
    all_by_rule = True

    def __init__(self, subgraph: Subgraph, device: XlaDevice) -> None:
        super().__init__(subgraph, plan(subgraph.graph).copied, device.name)
        self._types = device.types
        self._library = device.library
        self._collectives = device.collectives
        self.plans: dict[str, str] = {}
        self._on_host = self._ran_on_host()

    def call_node(self, node: Node) -> None:
        try:
            super().call_node(node)
        except Exception as error:
            LOWERING.refuse_call(node, self._metas)
            raise Refused(str(node.op), f"{type(error).__name__}: {error}") from error
        before, self._on_host = self._on_host, self._ran_on_host()
        on_host = {name for name, _ in self._on_host ^ before}
        if not on_host:
            self._check(node)
        elif LOWERING.learn(node, self._metas, on_host):
            raise _Again
        else:
            raise Refused(str(node.op), "torch_xla does not lower it")

    def _check(self, node: Node) -> None:
        """Check that a node's results have the recorded shapes, and convert them to the recorded dtypes."""
        for i, meta in enumerate(node.outs):
            if meta is None:
                continue
            t = self._values.get(node.first + i)
            if t is None or t.shape != meta.size:
                LOWERING.refuse_call(node, self._metas)
                found = None if t is None else list(t.shape)
                raise Refused(str(node.op), f"a result of it is {found}, not {meta}")
            self._values[node.first + i] = self.laid_out(t, meta)

    def refuse_what_is_not_lowered(self) -> None:
        """Find the first traced node that XLA cannot lower, and note it in `LOWERING`.

        Raises:
            Refused: there is such a node.
        """
        nodes = self._subgraph.graph.nodes
        good, bad = 0, len(nodes)
        if self._is_lowered(nodes):
            return
        while bad - good > 1:
            middle = (good + bad) // 2
            good, bad = (middle, bad) if self._is_lowered(nodes[:middle]) else (good, middle)
        LOWERING.refuse_call(nodes[good], self._metas)
        raise Refused(str(nodes[good].op), "torch_xla cannot lower it with these operands")

    def _is_lowered(self, nodes: Sequence[Node]) -> bool:
        made = [self._values.get(n.first + i) for n in nodes for i in range(len(n.outs))]
        try:
            self._library._get_xla_tensors_hlo([t for t in made if t is not None])
        except RuntimeError:
            return False
        return True

    def call(self, node: Node, op: Callable[..., Any], args: list[Any], kwargs: Any) -> Any:
        if "generator" in kwargs:
            return draw(node, args, kwargs)
        if node.op in collective.OPS:
            seen = [args[0]] if isinstance(args[0], Tensor) else args[0]
            line = collective.Route.of(args[-1]).line
            before = self.plans.get(line)
            plan = plan_of(node, seen)
            self.plans[line] = plan if before is None else f"{before}; {plan}"
            return self._collectives.call(node, args)
        if node.op is _BITS:
            op = functools.partial(self._types.view_bits, op)
        rule = LOWERING.rule(node, self._metas)
        return (op if rule is None else rule)(*args, **kwargs)

    def laid_out(self, t: Tensor, meta: TensorMeta) -> Tensor:
        return t if t.dtype is meta.dtype else t.to(meta.dtype)

    def _ran_on_host(self) -> set[tuple[str, int]]:
        """Names of the ops that torch_xla has run on the host so far, with their counts."""
        names = [name for name in self._library._xla_counter_names() if name.startswith("aten::")]
        return {(name, self._library._xla_counter_value(name)) for name in names}
