"""The XLA executor: whole graphs on a TPU, or on whatever else PJRT runs, through torch_xla's library.

Data are torch_xla tensors that stay on the device. A graph's part is replayed on them once, which traces it; the
program XLA makes of the trace is kept, and each later run launches it without tracing. Numbers and the keys of draws
are inputs, sent in one transfer; donated inputs give their memory to the outputs. Ops that torch_xla does not lower,
and collectives between processes, run on the host between compiled parts. States of random streams stay on the host.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch

from ltc_core import collective, errors, metrics
from ltc_core.executors import keys, xla_runtime
from ltc_core.executors.base import CPU, Executor, NodeFailure, Program
from ltc_core.executors.chain import Chain, Link
from ltc_core.executors.draws import DRAWS
from ltc_core.executors.number_rules import NUMBER_DTYPES, kinds
from ltc_core.executors.part import Part, parts_of
from ltc_core.executors.reference import ReferenceProgram
from ltc_core.executors.replay import Refused, Replay
from ltc_core.executors.spelled_out import EVERYWHERE
from ltc_core.executors.stages import stages
from ltc_core.executors.storage import StorageTypes
from ltc_core.executors.xla_collectives import Collectives, plan_of
from ltc_core.executors.xla_lowering import Lowering
from ltc_core.graph import Graph, Node, TensorMeta
from ltc_core.passes import origins, plan
from ltc_core.settings import settings

__all__ = ["XlaExecutor"]

Tensor = torch.Tensor
_BITS = torch.ops.aten.view.dtype

# Programs kept of one graph: one for each set of numbers that are constants of it.
_MAX_CHAINS = 16

# Tracing changes state that all of the library's tensors share.
_tracing = threading.RLock()
_lowering = Lowering()


class XlaExecutor(Executor):
    """One device of PJRT.

    Args:
        index: which of this process's.

    Raises:
        DeviceError: torch_xla cannot be loaded, or has no such device.
    """

    name = "torch_xla"

    def __init__(self, index: int) -> None:
        self.library = xla_runtime.load()
        found = self.library._xla_get_devices()
        if index >= len(found):
            raise errors.DeviceError(
                f"{settings.device_name}:{index} has no device of PJRT",
                got=f"{len(found)} in this process: {errors.listed(found)}",
                next="lower LTC_NUM_DEVICES, or start fewer processes",
            )
        super().__init__(torch.device("xla", index))
        self.device = f"xla:{index}"
        self._real_device = self.library._xla_real_devices([self.device])  # such as ['TPU:0']
        self.types = StorageTypes.for_xla()
        self.collectives = Collectives(self.library, self.device)

    # -- data ----------------------------------------------------------------------------------

    def place(self, tensor: Tensor) -> Any:
        return self.place_all([tensor])[0]

    def place_all(self, tensors: Sequence[Tensor]) -> list[Any]:
        # Copies: the transfer may still read while the caller writes.
        return self.send([t.detach().to(self.types.of(t.dtype), copy=True) for t in tensors])

    def send(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Copy CPU tensors, that nobody writes any more, to the device in one transfer."""
        found = self.library._xla_tensors_from_aten(list(tensors), [self.device] * len(tensors))
        return found  # type: ignore[no-any-return]

    def fetch(self, data: Sequence[Any]) -> list[Tensor]:
        """Give data as CPU tensors of the stored dtype, in one transfer. Cost: waits for what computes them."""
        there = [k for k, d in enumerate(data) if d.device.type != "cpu"]
        found = list(data)
        if there:
            copies = self.library._xla_get_cpu_tensors([data[k] for k in there])
            for k, copy in zip(there, copies, strict=True):
                found[k] = copy
        return found

    def copy(self, data: Any) -> Any:
        copied = data.clone()
        if copied.device.type != "cpu":
            with _tracing:
                self.library._xla_sync_multi([copied], [self.device], False, True)
        return copied

    def view(self, data: Any, meta: TensorMeta) -> Tensor:
        return self.fetch([data])[0].to(meta.dtype)

    def nbytes(self, meta: TensorMeta) -> int:
        return self.types.stored_meta(meta).nbytes

    # -- programs ------------------------------------------------------------------------------

    def compile(self, graph: Graph) -> Program:
        return XlaProgram(self.types.rewrite_all(graph), self)

    def synchronize(self) -> None:
        self.library._xla_wait_device_ops(self._real_device)

    def memory_info(self) -> tuple[int, int]:
        try:
            found = self.library._xla_memory_info(self.device)
        except RuntimeError:  # PJRT's CPU client does not say
            return super().memory_info()
        return found["bytes_limit"] - found["bytes_used"], found["bytes_limit"]

    @property
    def kind(self) -> str:
        return str(self.library._xla_device_kind(self.device))


class XlaProgram(Program):
    """A graph, compiled when it first runs: only then are its numbers known, and which of them are constants."""

    def __init__(self, graph: Graph, executor: XlaExecutor) -> None:
        memory = plan(graph)
        self.peak_bytes = memory.peak_bytes
        self.reuses = memory.reuses
        self._graph = graph
        self._executor = executor
        self._chains: list[Chain] = []
        self._numbers: list[Any] | None = None
        self._varied: set[int] = set()

    def run(self, inputs: Sequence[Any], scalars: Sequence[Any]) -> list[Any]:
        chain = next((chain for chain in self._chains if chain.fits(scalars)), None)
        if chain is None:
            chain = self._make(scalars)
        steps = chain.run_in_steps(inputs, scalars)
        while True:
            try:
                next(steps)
            except StopIteration as end:
                return end.value  # type: ignore[no-any-return]

    def _make(self, scalars: Sequence[Any]) -> Chain:
        """Make the chain for these numbers; those seen to change are inputs of it where ops allow that."""
        if self._numbers is None:
            self._numbers = list(scalars)
        pairs = zip(self._numbers, scalars, strict=True)
        self._varied.update(k for k, (a, b) in enumerate(pairs) if a != b)
        if len(self._chains) == _MAX_CHAINS:
            del self._chains[0]
        chain = _chain(self._graph, scalars, frozenset(self._varied), self._executor)
        self._chains.append(chain)
        return chain

    def salvage(self, inputs: Sequence[Any], scalars: Sequence[Any]) -> dict[int, Any]:
        given = dict(zip(self._graph.inputs, inputs, strict=True))
        chains = origins(self._graph.nodes, self._graph.outputs)
        kept = {}
        for output, versions in chains.items():
            data = given.get((output, *versions)[-1])
            if data is not None:
                kept[output] = self._executor.copy(data)
        return kept


def _chain(
    graph: Graph, scalars: Sequence[Any], varied: frozenset[int], executor: XlaExecutor
) -> Chain:
    if settings.random == "device":
        graph = keys.with_keys(graph, frozenset(_lowering.refused))
    metas = graph.metas()
    refused = {at for at, node in enumerate(graph.nodes) if _lowering.refuses(node, metas)}
    others = {at for at, node in enumerate(graph.nodes) if _runs_on_host(node, executor)}
    parts = parts_of(graph, stages(graph, refused | others), scalars, varied, refused)
    of_host = keys.of_host(graph)
    links = [
        _Compiled(part, executor) if part.compiled else _Host(part, executor, of_host)
        for part in parts
    ]
    return Chain(graph, links, memory_of=id)


def _runs_on_host(node: Node, executor: XlaExecutor) -> bool:
    if node.op in collective.OPS:
        return not executor.collectives.reduces_in_graph(node)
    return node.op is keys.NEXT_KEY or keys.is_draw(node)


class _Host(Link):
    """A part on the host, op by op. What is `of_host` stays there, other results go to the device."""

    def __init__(self, part: Part, executor: XlaExecutor, of_host: frozenset[int]) -> None:
        super().__init__(part)
        self._executor = executor
        # The graph names stored dtypes already; this is for ops without a narrow kernel.
        self._program = ReferenceProgram(part.graph, plan(part.graph), StorageTypes({}), CPU)
        self._sent = [k for k, value in enumerate(part.outputs) if value not in of_host]
        metas = part.graph.metas()
        self._fallbacks = [
            f"aten::{node.op._opname}"
            for node in part.graph.nodes
            if _lowering.refuses(node, metas)
        ]

    def run(self, values: dict[int, Any], scalars: Sequence[Any]) -> None:
        part = self.part
        for name in self._fallbacks:
            metrics.count(name)
        inputs = self._executor.fetch([values[i] for i in part.inputs])
        results = self._program.run(inputs, [scalars[k] for k in part.numbers])
        if self._sent:
            sent = self._executor.send([results[k] for k in self._sent])
            for k, data in zip(self._sent, sent, strict=True):
                results[k] = data
        values.update(zip(part.outputs, results, strict=True))


class _Compiled(Link):
    """A part as one program of XLA; as a chain of its own once an op of it turned out not to be lowered."""

    def __init__(self, part: Part, executor: XlaExecutor) -> None:
        super().__init__(part)
        self._executor = executor
        self._launch: _Launch | None = None
        self._chain: Chain | None = None
        typed = list(zip(part.numbers, part.types, strict=True))
        self._vectors = [
            (NUMBER_DTYPES[kind], [k for k, t in typed if t is kind]) for kind in kinds(part.types)
        ]

    def run(self, values: dict[int, Any], scalars: Sequence[Any]) -> None:
        part = self.part
        given = [values[i] for i in part.inputs]
        if self._chain is None:
            inputs = self._on_device(given, scalars)
            try:
                results = self._launched(inputs)
            except Refused:  # _lowering knows by now
                numbers = [scalars[k] for k in part.numbers]
                varied = frozenset(range(len(numbers)))
                self._chain = _chain(part.graph, numbers, varied, self._executor)
        if self._chain is not None:
            results = self._by_chain(given, [scalars[k] for k in part.numbers])
        values.update(zip(part.outputs, results, strict=True))

    def _on_device(self, given: Sequence[Any], scalars: Sequence[Any]) -> list[Tensor]:
        """Give the inputs with the vectors of numbers; what is on the host is sent in one transfer."""
        inputs = [
            *given,
            *(
                torch.tensor([scalars[k] for k in positions], dtype=dtype)
                for dtype, positions in self._vectors
            ),
        ]
        here = [k for k, data in enumerate(inputs) if data.device.type == "cpu"]
        if here:
            for k, data in zip(here, self._executor.send([inputs[k] for k in here]), strict=True):
                inputs[k] = data
        return inputs

    def _launched(self, inputs: list[Tensor]) -> list[Tensor]:
        """Run the program; make it first.

        Raises:
            Refused: an op is not lowered; nothing has run.
            NodeFailure: XLA could not compile it, or it failed.
        """
        try:
            if self._launch is None:
                self._launch = _Launch(self.part, self._executor, inputs)
                metrics.count("CompiledProgram")
            return self._launch.run(inputs)
        except Refused:
            raise
        except RuntimeError as error:
            raise NodeFailure(None, {}) from error

    def _by_chain(self, given: Sequence[Any], numbers: Sequence[Any]) -> list[Any]:
        assert self._chain is not None
        steps = self._chain.run_in_steps(given, numbers)
        while True:
            try:
                next(steps)
            except StopIteration as end:
                return end.value  # type: ignore[no-any-return]


class _Launch:
    """A traced part and how to launch it: which tensors its program takes, which outputs it gives.

    Args:
        part: the part.
        inputs: what it is traced on: data of this run, on the device.
    """

    def __init__(self, part: Part, executor: XlaExecutor, inputs: Sequence[Tensor]) -> None:
        self._executor = executor
        self._graph = part.graph
        library = self._library = executor.library
        with _tracing, torch.no_grad():
            executor.synchronize()  # what is still being computed has no handle yet
            library._xla_set_default_device(executor.device)
            try:
                replay, outputs = _trace(part, executor, inputs)
                # Not before: an op that ran on the host while it was traced may have given its operands others.
                handles = library._get_tensors_handle(list(inputs))
                assert len(set(handles)) == len(handles), "two inputs share one buffer"
                self._plans = replay.plans
                try:
                    self._finish(part.graph, inputs, outputs, handles)
                except RuntimeError:
                    replay.refuse_what_is_not_lowered()
                    raise
            finally:
                replay, outputs = None, ()
                executor.collectives.begin()
                library._clear_pending_irs(executor.device)

    def _finish(
        self, graph: Graph, inputs: Sequence[Tensor], outputs: Sequence[Tensor], handles: list[int]
    ) -> None:
        """Compile what computes the outputs."""
        library = self._library
        sources: dict[int, tuple[bool, int]] = {
            library._unique_id_for_ir_and_data(t): (True, k) for k, t in enumerate(inputs)
        }
        computed: list[Tensor] = []
        # For each output: whether it is an input as it is, and which input or result.
        self._sources: list[tuple[bool, int]] = []
        for t in outputs:
            identity = library._unique_id_for_ir_and_data(t)
            if identity not in sources:
                sources[identity] = (False, len(computed))
                computed.append(t)
            self._sources.append(sources[identity])
        passing = {k for is_input, k in self._sources if is_input}
        for k, value in enumerate(graph.inputs):
            donated = value in graph.donated and k not in passing
            library._set_buffer_donation(inputs[k], donated)
        self._donated = {k for k, value in enumerate(graph.inputs) if value in graph.donated}
        self._hash = None
        self._takes: list[int | Tensor] = []
        if not computed:
            return
        # The library's hash of a graph does not tell inputs of one shape apart: (x * y, -x) and (x * y, -y) would be
        # one program. So each part has a result of no elements, whose shape is its own.
        computed.append(torch.zeros(_shape_of(graph), device=self._executor.device))
        _, leaves = library._get_tensors_xla_device_data_node(computed)
        index = {handle: k for k, handle in enumerate(handles)}
        for leaf, handle in zip(leaves, library._get_tensors_handle(leaves), strict=True):
            self._takes.append(index.get(handle, leaf))  # a leaf of its own is a constant
        self._hash = library._get_graph_hash(computed)
        library._xla_warm_up_cache(computed, [])

    def run(self, inputs: Sequence[Tensor]) -> list[Tensor]:
        results: list[Tensor] = []
        if self._hash is not None:
            # It runs on the calling thread's device, wherever its inputs are.
            self._library._xla_set_default_device(self._executor.device)
            # The launch waits for the run before, and has Python's lock; so wait here without it.
            self._executor.synchronize()
            taken = [inputs[k] if type(k) is int else k for k in self._takes]
            start = functools.partial(self._library._run_cached_graph, self._hash, taken)
            if self._plans:
                results = self._executor.collectives.launch(self._plans, start)
            else:
                results = start()
        found, used = [], set()
        for is_input, k in self._sources:
            data = inputs[k] if is_input else results[k]
            is_free = k in self._donated if is_input else True
            if not is_free or (is_input, k) in used:
                data = self._executor.copy(data)
            used.add((is_input, k))
            found.append(data)
        return found


def _shape_of(graph: Graph) -> tuple[int, ...]:
    """Give the shape of no elements that stands for a graph: 60 bits of its digest.

    Replicas run one program, but each may call its group by another name.
    """
    nodes = tuple(
        dataclasses.replace(node, args=node.args[:-1]) if node.op in collective.OPS else node
        for node in graph.nodes
    )
    text = dataclasses.replace(graph, nodes=nodes).text(lines=False)
    digest = int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big")
    return (0, *((digest >> shift & 0x7FFF) + 1 for shift in (0, 15, 30, 45)))


def _trace(
    part: Part, executor: XlaExecutor, inputs: Sequence[Tensor]
) -> tuple[_Replay, tuple[Tensor, ...]]:
    """Give the outputs, and what made them."""
    while True:
        executor.collectives.begin()
        replay = _Replay(part, executor)
        try:
            return replay, replay.run(*inputs)
        except _Again:
            executor.library._clear_pending_irs(executor.device)


class _Again(BaseException):
    """An op is to be traced as what it consists of."""


class _Replay(Replay):
    spelled_out = EVERYWHERE
    all_by_rule = True

    def __init__(self, part: Part, executor: XlaExecutor) -> None:
        super().__init__(part, plan(part.graph).copied, executor.device)
        self._types = executor.types
        self._library = executor.library
        self._collectives = executor.collectives
        self.plans: dict[str, str] = {}

    def call_node(self, node: Node) -> None:
        before = self._count_fallbacks()
        try:
            super().call_node(node)
        except Exception as error:
            _lowering.refuse_call(node, self._metas)
            raise Refused(str(node.op), f"{type(error).__name__}: {error}") from error
        if self._count_fallbacks() == before:
            self._check(node)
        elif _lowering.spell(node):
            raise _Again
        else:
            _lowering.refuse_op(node)
            raise Refused(str(node.op), "torch_xla does not lower it")

    def _check(self, node: Node) -> None:
        """See that a node's results are what was recorded; give them its dtypes."""
        for i, meta in enumerate(node.outs):
            if meta is None:
                continue
            t = self._values.get(node.first + i)
            if t is None or t.shape != meta.size:
                _lowering.refuse_call(node, self._metas)
                found = None if t is None else list(t.shape)
                raise Refused(str(node.op), f"a result of it is {found}, not {meta}")
            self._values[node.first + i] = self.laid_out(t, meta)

    def refuse_what_is_not_lowered(self) -> None:
        """Find the first node that cannot be lowered after all.

        Raises:
            Refused: there is one.
        """
        nodes = self._part.graph.nodes
        good, bad = 0, len(nodes)
        if self._is_lowered(nodes):
            return
        while bad - good > 1:
            middle = (good + bad) // 2
            good, bad = (middle, bad) if self._is_lowered(nodes[:middle]) else (good, middle)
        _lowering.refuse_call(nodes[good], self._metas)
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
            return self._draw(node, args, kwargs)
        if node.op in collective.OPS:
            seen = [args[0]] if isinstance(args[0], Tensor) else args[0]
            before = self.plans.get(args[-1])
            plan = plan_of(node, seen)
            self.plans[args[-1]] = plan if before is None else f"{before}; {plan}"
            return self._collectives.call(node, args)
        if node.op is _BITS:
            op = self._types.view_bits(op)
        return _lowering.rules.get(node.op, op)(*args, **kwargs)

    def _draw(self, node: Node, args: list[Any], kwargs: dict[str, Any]) -> Any:
        """Make a draw's numbers, and write those that the op writes."""
        key = kwargs.pop("generator")
        drawn = DRAWS[node.op](key, *args, **kwargs)
        results = list(drawn) if isinstance(drawn, tuple) else [drawn]
        written = [args[i] for i in _written(node.op) if i < len(args)]
        # Operands that are not returned come last.
        first = 0 if node.op._opname.endswith("_") else len(results) - len(written)
        for target, numbers in zip(written, results[first:], strict=True):
            target.copy_(numbers)
        return written[0] if first == 0 and written else results[0]

    def laid_out(self, t: Tensor, meta: TensorMeta) -> Tensor:
        return t if t.dtype is meta.dtype else t.to(meta.dtype)

    def _count_fallbacks(self) -> int:
        library = self._library
        names = [n for n in library._xla_counter_names() if n.startswith("aten::")]
        return sum(library._xla_counter_value(name) for name in names)


def _written(op: torch._ops.OpOverload) -> list[int]:
    """Give the positions of the operands that an op writes."""
    infos = [a.alias_info for a in op._schema.arguments]
    return [i for i, info in enumerate(infos) if info is not None and info.is_write]
