"""Lowers a subgraph to the FX graph that PyTorch's compiler takes: functional, decomposed, with the writes at the end.

The nodes are called on fake tensors and the calls are traced (`program.lowering.retrace`). In-place ops become new
values. A value that belongs in a donated input's memory is copied there at the end, which the compiler turns into a
store in place; the others get memory of their own (`own_memory`). Convolutions get channels-last tensors, the format in
which oneDNN is fast, and the ops between them keep it.
Called by `build_artifact`, in the compiler's process only.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from typing import Any

import torch
from torch._functorch.compile_utils import fx_graph_cse
from torch._inductor.decomposition import select_decomp_table
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import GraphModule, traceback
from torch.fx.node import map_aggregate

from ltc_core.executors.inductor.lowering.complex_scalars import COMPLEX_SCALARS
from ltc_core.executors.inductor.lowering.exact import exact_decompositions, with_rules
from ltc_core.executors.inductor.lowering.gemm import use_onednn
from ltc_core.executors.inductor.lowering.own_memory import before_writes, own
from ltc_core.graph.ir import Graph, Node, TensorMeta
from ltc_core.program.lowering.decompositions import FOR_INDUCTOR
from ltc_core.program.lowering.functional import trace
from ltc_core.program.lowering.retrace import Refused, Retrace
from ltc_core.program.plan import plan
from ltc_core.program.scalar_inputs import vector_metas
from ltc_core.program.subgraph import Subgraph

__all__ = ["Lowered", "lower", "position_of"]

aten = torch.ops.aten
Tensor = torch.Tensor
_POSITION = (
    "ltc_position"  # in an FX node's "custom" metadata, which passes of PyTorch's compiler copy
)
_CALLED = (aten.index_add.default,)  # of bfloat16
_NUMBERS = (int, float, complex)
_CONVOLUTIONS = {aten.convolution.default: (0, 1), aten.convolution_backward.default: (0, 2)}


class Lowered:
    """The result of `lower`.

    Attributes:
        module: the FX graph. Its inputs are those of the subgraph, then the vectors of its float and int scalars, if
            it has any.
        fakes: fake tensors for the inputs.
        returned: the outputs of the subgraph that it returns, in order; it writes the others into donated inputs.
        mode: the fake mode the graph was traced with.
    """

    def __init__(
        self,
        module: GraphModule,
        fakes: list[Tensor],
        returned: tuple[int, ...],
        mode: FakeTensorMode,
    ) -> None:
        self.module = module
        self.fakes = fakes
        self.returned = returned
        self.mode = mode


def lower(subgraph: Subgraph, device: str) -> Lowered:
    """FX graph of a subgraph.

    Raises:
        Refused: an op could not be traced, or the compiler cannot pass its complex scalar on.
    """
    memory = plan(subgraph.graph)
    mode = FakeTensorMode()
    with mode:
        fakes = [_fake(meta, device) for meta in subgraph.graph.inputs.values()]
        fakes += [_fake(meta, device) for meta in vector_metas(subgraph.scalar_types)]
    run = _Retrace(subgraph, memory.copied, device).run
    with traceback.preserve_node_meta():
        table = with_rules(COMPLEX_SCALARS, exact_decompositions(select_decomp_table()))
        module = trace(run, fakes, mode, table)
    _merge_equal_calls(module)
    use_onednn(module)
    _write_numbers_out(module, subgraph)
    returned = _write_back(module, subgraph.graph, memory.reuses, mode)
    return Lowered(module, fakes, returned, mode)


def position_of(node: torch.fx.Node) -> int | None:
    """Position in the subgraph of the node that an FX node was traced from; None for what `lower` has added."""
    return node.meta.get("custom", {}).get(_POSITION)  # type: ignore[no-any-return]


class _MinusZero(float):
    """-0.0 in a graph whose equal calls are merged: equal to no other number, 0.0 included."""

    __hash__ = object.__hash__

    def __eq__(self, other: object) -> bool:
        return self is other


def _merge_equal_calls(module: GraphModule) -> None:
    """Merge calls with equal arguments; -0.0 is not 0.0."""

    def marked(item: Any) -> Any:
        is_minus_zero = type(item) is float and item == 0 and math.copysign(1, item) < 0
        return _MinusZero(item) if is_minus_zero else item

    def plain(item: Any) -> Any:
        return float(item) if type(item) is _MinusZero else item

    for change in (marked, plain):
        for node in module.graph.nodes:
            node.args = map_aggregate(node.args, change)
            node.kwargs = map_aggregate(node.kwargs, change)
        if change is marked:
            module.graph = fx_graph_cse(module.graph)


def _write_numbers_out(module: GraphModule, subgraph: Subgraph) -> None:
    """In ops that the compiler calls, replace int scalars by floats, and Python numbers in place of tensors by tensors.

    The compiler calls ATen for complex tensors. It passes an int scalar, also a default one, as an operand that ATen's
    call does not take, and it refuses a Python number if the schema has a tensor.

    Raises:
        Refused: a call has a complex scalar that no rule (`complex_scalars`) replaces.
    """
    for node in list(module.graph.nodes):
        if not isinstance(node.target, torch._ops.OpOverload) or not _is_called(node):
            continue
        for k, argument in enumerate(node.target._schema.arguments):
            given = k < len(node.args)
            value = (
                node.args[k] if given else node.kwargs.get(argument.name, argument.default_value)
            )
            if isinstance(argument.real_type, torch.NumberType) and type(value) is complex:
                at = position_of(node)
                op = node.target if at is None else subgraph.nodes[at].op
                raise Refused(
                    str(op), "it takes a complex number that compiled code cannot pass on"
                )
            if isinstance(argument.type, torch.NumberType) and type(value) is int:
                value = float(value)
            elif isinstance(argument.type, torch.TensorType) and type(value) in _NUMBERS:
                value = _tensor_of(module, node, value)
            else:
                continue
            if given:
                node.update_arg(k, value)
            else:
                node.update_kwarg(argument.name, value)
    module.recompile()


def _tensor_of(module: GraphModule, before: torch.fx.Node, value: complex) -> torch.fx.Node:
    """A number as a 0-dim tensor; a complex one is made of real ones, which the compiler can write."""
    like: Tensor = before.meta["val"]
    dtype = like.dtype.to_real()
    options: dict[str, Any] = {"dtype": dtype, "device": like.device}
    parts = [value.real, value.imag] if isinstance(value, complex) else [float(value)]
    with module.graph.inserting_before(before):
        nodes = [module.graph.call_function(aten.full.default, ((), x), options) for x in parts]
        for node in nodes:
            node.meta["val"] = like.new_empty((), dtype=dtype)
        if len(nodes) == 1:
            return nodes[0]
        node = module.graph.call_function(aten.complex.default, tuple(nodes))
        node.meta["val"] = like.new_empty(())
        return node


def _is_called(node: Any) -> bool:
    """Whether the compiler calls ATen for an op of numbers that are not integers, instead of writing its loop."""
    value = node.meta.get("val")
    if not isinstance(value, Tensor):
        return False
    return value.is_complex() or node.target in _CALLED and value.is_floating_point()


def _fake(meta: TensorMeta, device: str) -> Tensor:
    return torch.empty_strided(meta.size, meta.stride, dtype=meta.dtype, device=device)


class _Retrace(Retrace):
    decompositions = FOR_INDUCTOR

    def run(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        self._packed: dict[int, Tensor] = {}
        self._positions = itertools.count()
        return super().run(*inputs)

    def call_node(self, node: Node) -> None:
        # As `traceback.annotate`, which PyTorch 2.9 does not have.
        of_new_nodes = traceback.get_current_meta()
        of_new_nodes["custom"] = {_POSITION: next(self._positions)}
        try:
            super().call_node(node)
        finally:
            del of_new_nodes["custom"]

    def call(self, node: Node, op: Callable[..., Any], args: list[Any], kwargs: Any) -> Any:
        for position in _CONVOLUTIONS.get(node.op, ()):
            args[position] = self._channels_last(node.args[position], args[position])
        return super().call(node, op, args, kwargs)

    def _channels_last(self, value: Any, t: Tensor) -> Tensor:
        if t.dim() != 4:
            return t
        if value not in self._packed:
            self._packed[value] = t.contiguous(memory_format=torch.channels_last)
        return self._packed[value]


def _write_back(
    module: GraphModule, graph: Graph, reuses: dict[int, int], mode: FakeTensorMode
) -> tuple[int, ...]:
    """Outputs that the module returns; the others are written into the memory of the donated inputs that they reuse.

    All that reads an input comes before the first write: returned outputs are computed, and sources that are memory of
    written inputs are copied.
    """
    fx = module.graph
    inputs = dict(zip(graph.inputs, (n for n in fx.nodes if n.op == "placeholder"), strict=False))
    end = next(n for n in reversed(fx.nodes) if n.op == "output")
    returned, results = [], []
    targets, sources = [], []
    for value, node in zip(graph.outputs, end.args[0], strict=True):
        target = inputs.get(reuses.get(value, -1))
        if target is node:  # the input is the output
            continue
        if target is not None and target.meta["val"].shape == node.meta["val"].shape:
            targets.append(target)
            sources.append(node)
        else:
            returned.append(value)
            results.append(node)
    with fx.inserting_before(end):
        results = own(fx, results, mode)
        for target, source in zip(targets, before_writes(fx, sources, mode), strict=True):
            copy = fx.call_function(aten.copy_.default, (target, source))
            copy.meta["val"] = target.meta["val"]
    end.args = (tuple(results),)
    end.meta["user_visible_output_idxs"] = list(range(len(results)))
    end.meta["original_output_strides"] = [n.meta["val"].stride() for n in results]
    fx.lint()
    module.recompile()
    return tuple(returned)
