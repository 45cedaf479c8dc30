"""The reference executor: ATen on ordinary tensors, op by op. It defines the semantics of a graph.

A program is a list of instructions over a list of values. A value is freed at its last use. A write overwrites the old
value's memory if the plan (`graph.passes.plan`) allows it, else a copy. From its second run on a program runs in C++
(`replay`). Chosen in `executors`; the other executors use it for subgraphs that run op by op (`partitioned_program`,
`xla.executor`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from ltc_core.compile.default_dtype import in_recorded_dtype
from ltc_core.executors import replay
from ltc_core.executors.base import (
    CPU,
    Executor,
    NodeFailure,
    Program,
    Salvaged,
    SubgraphFailure,
    Tier,
)
from ltc_core.executors.narrow_dtypes import StorageTypes
from ltc_core.executors.salvage import salvage
from ltc_core.graph.arguments import leaves, place_results
from ltc_core.graph.ir import Graph, Node, Ref, Scalar, TensorMeta, Write
from ltc_core.graph.lens import close_lens, open_lens, real_view
from ltc_core.graph.op_schema import runs_with_grad
from ltc_core.graph.passes import MemoryPlan, plan
from ltc_core.settings import settings

__all__ = ["ReferenceExecutor", "ReferenceProgram", "on_cpu", "rest_runner"]

aten = torch.ops.aten


class _Instruction:
    """One node with prepared arguments: constants are in place, values and scalars are filled in at each run."""

    __slots__ = (
        "args", "call", "draws", "first", "frees", "kwargs", "named", "nested", "node", "numbers",
        "refs", "result", "writes",
    )  # fmt: skip

    def __init__(
        self,
        node: Node,
        in_place: Sequence[bool],
        frees: tuple[int, ...],
        types: StorageTypes | None,
        hardware: torch.device,
    ) -> None:
        self.node = node
        call: Callable[..., Any] = real_view(node.op)
        if runs_with_grad(node.op, node.args):
            call = torch.enable_grad()(call)
        draws = "generator" in node.kwargs
        if draws and hardware.type != "cpu":
            call = on_cpu(call, hardware)
        if node.uses_default_dtype:
            call = _casting(node, call)
        self.call = call if types is None else types.call(node, call)
        self.first = node.first
        self.frees = frees
        self.result = node.result
        self.writes = tuple(
            (old, node.first_write + k, reuse)
            for k, (old, reuse) in enumerate(zip(node.writes, in_place, strict=True))
        )
        self.draws: int | None = None
        self.args: list[Any] = list(node.args)
        found: tuple[list[Any], ...] = ([], [], [])
        for position, item in enumerate(node.args):
            self._prepare(position, item, *found)
        self.refs, self.numbers, self.nested = map(tuple, found)
        self.kwargs = node.kwargs
        if not draws and hardware.type != "cpu" and _takes_device(node):
            self.kwargs = {**node.kwargs, "device": hardware}
        self.named = {k: v for k, v in node.kwargs.items() if _is_filled(v)}
        if self.named:
            self.kwargs = {k: v for k, v in self.kwargs.items() if k not in self.named}
        generator = self.named.pop("generator", None)
        if isinstance(generator, Write):
            self.draws = node.first_write + generator.base

    def _prepare(self, position: int, item: Any, refs: Any, numbers: Any, nested: Any) -> None:
        if type(item) is Ref:
            refs.append((position, int(item)))
        elif type(item) is Write and not item.lens:
            refs.append((position, self.node.first_write + item.base))
        elif type(item) is Scalar:
            numbers.append((position, int(item)))
        elif _is_filled(item):
            nested.append((position, item))

    def run(self, values: Any, scalars: Sequence[Any], generator: torch.Generator) -> None:
        for old, new, reuse in self.writes:
            values[new] = values[old] if reuse else values[old].clone()
        args = self.args.copy()
        for position, i in self.refs:
            args[position] = values[i]
        for position, i in self.numbers:
            args[position] = scalars[i]
        pending: list[Any] = []
        for position, item in self.nested:
            args[position] = self._fill(item, values, scalars, pending)
        kwargs = self.kwargs
        if self.named:
            kwargs = {
                **kwargs,
                **{k: self._fill(v, values, scalars, pending) for k, v in self.named.items()},
            }
        if self.draws is None:
            result = self.call(*args, **kwargs)
        else:
            state = values[self.draws]
            generator.set_state(state)
            result = self.call(*args, **kwargs, generator=generator)
            state.copy_(generator.get_state())
        if pending:
            close_lens(pending)
        if self.result is not None:
            place_results(self.result, result, values, self.first)
        for i in self.frees:
            values[i] = None

    def _fill(self, item: Any, values: Any, scalars: Sequence[Any], pending: list[Any]) -> Any:
        kind = type(item)
        if kind is Ref:
            return values[item]
        if kind is Scalar:
            return scalars[item]
        if kind is Write:
            whole = values[self.node.first_write + item.base]
            if not item.lens:
                return whole
            part, copies = open_lens(whole, item.lens)
            pending += copies
            return part
        if kind in (list, tuple):
            return [self._fill(i, values, scalars, pending) for i in item]
        return item


def _takes_device(node: Node) -> bool:
    return any(a.name == "device" for a in node.op._schema.arguments)


def on_cpu(call: Callable[..., Any], hardware: torch.device) -> Callable[..., Any]:
    """`call` on the CPU, where the random stream is, so that a seed gives the same numbers on all hardware."""

    def run(*args: Any, **kwargs: Any) -> Any:
        here = [a.cpu() if isinstance(a, torch.Tensor) else a for a in args]
        result = call(*here, **kwargs)
        for there, copy in zip(args, here, strict=True):
            if isinstance(copy, torch.Tensor) and copy._version:
                there.copy_(copy)
        if isinstance(result, torch.Tensor):
            written = [there for there, copy in zip(args, here, strict=True) if copy is result]
            return written[0] if written else result.to(hardware)
        return result if result is None else type(result)(r.to(hardware) for r in result)

    return run


def _casting(node: Node, call: Callable[..., Any]) -> Callable[..., Any]:
    """`call` in the recorded dtype: the default dtype may have changed since."""

    def run(*args: Any, **kwargs: Any) -> Any:
        args, kwargs = in_recorded_dtype(node, args, kwargs, torch.get_default_dtype())
        result = call(*args, **kwargs)
        if isinstance(result, torch.Tensor):
            assert node.outs[0] is not None
            return result.to(node.outs[0].dtype)
        return result

    return run


def _is_filled(item: Any) -> bool:
    """Whether an argument has values or scalars to fill in at run time."""
    return any(type(i) in (Ref, Scalar, Write) for i in leaves(item))


class _Code:
    """The instructions of a program, and the generator that they draw from."""

    def __init__(self, instructions: list[_Instruction]) -> None:
        self.instructions = instructions
        self.generator = torch.Generator()

    def run_one(self, position: int, values: dict[int, Any], scalars: Sequence[Any]) -> None:
        """Run the instruction at a position on some of the values. Called from C++."""
        self.instructions[position].run(values, scalars, self.generator)


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
        self._code = _Code(
            [
                _Instruction(node, reuse, frees, types, hardware)
                for node, reuse, frees in zip(
                    graph.nodes, memory.in_place, memory.frees, strict=True
                )
            ]
        )
        last = graph.nodes[-1] if graph.nodes else None
        self._size = max([*graph.inputs, -1]) + 1
        if last is not None:
            self._size = max(self._size, last.first + len(last.outs))
        self._types, self._hardware = types, hardware
        # A GPU draws on the CPU, and narrow dtypes are converted at each op: that is Python's.
        can_replay = bool(graph.nodes) and types is None and hardware.type == "cpu"
        self._plan = memory if can_replay else None  # until it is built
        self._replay: replay.Replay | None = None
        self._has_run = False

    @property
    def tier(self) -> Tier:  # type: ignore[override]
        return Tier.OP_BY_OP if self._replay is None else Tier.REPLAY

    @property
    def can_replay(self) -> bool:
        """Whether its next runs but one are in C++."""
        is_near = self._plan is not None and replay.extension.loaded is not None
        return settings.replay != "never" and (self._replay is not None or is_near)

    def run(self, inputs: Sequence[Any], scalars: Sequence[Any]) -> list[Any]:
        try:
            return self.run_or_stop(inputs, scalars)
        except SubgraphFailure as failure:
            assert failure.node is not None
            found = self._salvage(failure.values, inputs, scalars, failure.node)
            raise NodeFailure(
                failure.node, found.data, found.older, found.causes
            ) from failure.__cause__

    def run_or_stop(self, inputs: Sequence[Any], scalars: Sequence[Any]) -> list[Any]:
        """As `run`, but without computing what is left after a failure.

        Raises:
            SubgraphFailure: an op failed; chained to its exception.
        """
        if self._plan is not None and settings.replay != "never":
            self._choose()
        if self._replay is not None:
            results = self._run_replay(self._replay, inputs, scalars)
            if results is not None:
                return results
        self.is_replayed = False
        values: list[Any] = [None] * self._size
        for i, data in zip(self._inputs, inputs, strict=True):
            values[i] = data
        generator = self._code.generator
        for instruction in self._code.instructions:
            try:
                instruction.run(values, scalars, generator)
            except Exception as error:
                there = {i: data for i, data in enumerate(values) if data is not None}
                raise _failure(instruction.node, there) from error
        return [self._output(values[i], copied, dtype) for i, copied, dtype in self._outputs]

    def _choose(self) -> None:
        """Build the replay at the second run: most graphs that run once never run again.

        Not before the C++ part is built, which a thread of the background does.
        """
        is_waited_for = settings.replay == "always"
        if not is_waited_for and not (self._has_run and replay.extension.loaded):
            self._has_run = True
            return
        assert self._plan is not None
        memory, self._plan = self._plan, None
        self._replay = replay.build(
            self._nodes,
            memory,
            self._inputs,
            self._donated,
            self._outputs,
            self._size,
            self._code.run_one,
        )

    def _run_replay(
        self, program: replay.Replay, inputs: Sequence[Any], scalars: Sequence[Any]
    ) -> list[Any] | None:
        """Results of a run in C++; None if it does not take these scalars, and Python has to run it."""
        found = program.run(inputs if type(inputs) is list else list(inputs), scalars)
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
    generator = torch.Generator()

    def run(node: Node, values: dict[int, Any]) -> None:
        instruction = _Instruction(node, [False] * len(node.writes), (), types, hardware)
        instruction.run(values, scalars, generator)

    return run


class ReferenceExecutor(Executor):
    """ATen op by op, on the CPU or a GPU."""

    name = "reference"

    def __init__(self, hardware: torch.device = CPU) -> None:
        super().__init__(hardware)
        self._types = StorageTypes.from_settings()

    @property
    def stores_narrow(self) -> bool:
        """Whether tensors are stored in another dtype than they report."""
        return self._types is not None

    def upload(self, tensor: torch.Tensor) -> Any:
        dtype = tensor.dtype if self._types is None else self._types.of(tensor.dtype)
        return tensor.detach().to(self.hardware, dtype, copy=True)

    def copy(self, data: Any) -> Any:
        return data.clone()

    def nbytes(self, meta: TensorMeta) -> int:
        dtype = meta.dtype if self._types is None else self._types.of(meta.dtype)
        return meta.numel * dtype.itemsize

    def view(self, data: Any, meta: TensorMeta) -> torch.Tensor:
        return data.to("cpu", meta.dtype)  # type: ignore[no-any-return]

    def compile(self, graph: Graph) -> Program:
        return self.interpret(graph)

    def interpret(self, graph: Graph) -> ReferenceProgram:
        """Program that runs a graph op by op."""
        if self._types is not None:
            graph = self._types.rewrite(graph)
        return ReferenceProgram(graph, plan(graph), self._types, self.hardware)

    @property
    def kind(self) -> str:
        if self.hardware.type == "cuda":
            return torch.cuda.get_device_name(self.hardware)
        return super().kind

    def synchronize(self) -> None:
        if self.hardware.type == "cuda":
            torch.cuda.synchronize(self.hardware)

    def empty_cache(self) -> None:
        if self.hardware.type == "cuda":
            torch.cuda.empty_cache()

    def memory_info(self) -> tuple[int, int]:
        if self.hardware.type == "cuda":
            return torch.cuda.mem_get_info(self.hardware)
        return super().memory_info()
