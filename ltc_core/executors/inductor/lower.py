"""From a part's graph to the FX graph PyTorch's compiler takes: functional, decomposed, with its writes at the end.

Nodes are called one after the other on fake tensors; what they call is traced. In-place ops become new values; a
value that ends in a donated input's memory is copied there at the end, which the compiler turns into a store in
place. Foreach ops become one op for each tensor, which it fuses again. Convolutions are given channels-last tensors,
the format oneDNN is fast with, and everything between them follows. Runs in the compiler's process only.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch._functorch.compile_utils import fx_graph_cse
from torch._inductor.decomposition import select_decomp_table
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import GraphModule
from torch.fx.experimental.proxy_tensor import make_fx

from ltc_core.executors.inductor.gemm import use_onednn
from ltc_core.executors.inductor.number_rules import (
    WHOLE_RULES,
    base_name,
    kinds,
    rule_for,
    vector_metas,
)
from ltc_core.executors.inductor.part import Part
from ltc_core.executors.inductor.spelled_out import SPELLED_OUT
from ltc_core.graph import Graph, Node, Ref, Scalar, TensorMeta, Write
from ltc_core.passes import plan
from ltc_core.schema import is_view_op
from ltc_core.views import apply_lens, real_view

__all__ = ["Lowered", "Refused", "lower"]

aten = torch.ops.aten
Tensor = torch.Tensor
_CONVOLUTIONS = {aten.convolution.default: (0, 1), aten.convolution_backward.default: (0, 2)}


class Refused(Exception):
    """An op the compiler cannot take; `op` is its name."""

    def __init__(self, op: str, why: str) -> None:
        super().__init__(f"{op}: {why}")
        self.op = op


class Lowered:
    """What `lower` gives.

    Attributes:
        module: the FX graph. Its inputs are those of the part, then the vector of floats, then that of whole
            numbers, where there are such.
        fakes: fake tensors for the inputs.
        returned: which of the part's outputs it returns, in order; the others are written into their inputs.
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


def lower(part: Part, device: str) -> Lowered:
    """Trace a part.

    Raises:
        Refused: an op could not be traced.
    """
    memory = plan(part.graph)
    mode = FakeTensorMode()
    with mode:
        fakes = [_fake(meta, device) for meta in part.graph.inputs.values()]
        fakes += [_fake(meta, device) for meta in vector_metas(part.types)]
    trace = _Tracer(part, memory.copied, device).run
    with torch.no_grad(), mode:
        module = make_fx(
            torch.func.functionalize(trace, remove="mutations"),
            decomposition_table=select_decomp_table(),
            tracing_mode="real",
        )(*fakes)
    module.graph = fx_graph_cse(module.graph)
    use_onednn(module)
    returned = _write_back(module, part.graph, memory.reuses)
    return Lowered(module, fakes, returned, mode)


def _fake(meta: TensorMeta, device: str) -> Tensor:
    return torch.empty_strided(meta.size, meta.stride, dtype=meta.dtype, device=device)


class _Tracer:
    """Calls a part's nodes on whatever tensors it is given."""

    def __init__(self, part: Part, copied: frozenset[int], device: str) -> None:
        self._part = part
        self._copied = copied
        self._device = device
        self._metas = part.graph.metas()

    def run(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        graph = self._part.graph
        count = len(graph.inputs)
        self._values: dict[int, Any] = dict(zip(graph.inputs, inputs[:count], strict=True))
        self._packed: dict[int, Tensor] = {}
        self._numbers = _unpack(self._part.types, inputs[count:])
        for node in graph.nodes:
            try:
                self._node(node)
            except Exception as error:
                raise Refused(str(node.op), f"{type(error).__name__}: {error}") from error
        return tuple(self._output(i) for i in graph.outputs)

    def _output(self, value: int) -> Tensor:
        t: Tensor = self._values[value]
        if value in self._copied or value in self._part.graph.inputs:
            t = t.clone()
        return _with_strides(t, self._metas[value])

    # -- one node ------------------------------------------------------------------------------

    def _node(self, node: Node) -> None:
        spelled = SPELLED_OUT.get(node.op._opname)
        if spelled is not None:
            results = spelled(*self._fill(node.args, ()), **self._fill_named(node.kwargs, ()))
            if results is not None:
                self._place_all(node, results)
                return
        numbers = _numbers_in(node)
        whole = WHOLE_RULES.get(node.op._opname)
        if whole is not None and numbers:
            old = [self._values[w] for w in node.writes]
            results = whole(*self._fill(node.args, old), **self._fill_named(node.kwargs, old))
            self._place_all(node, results)
        elif not (numbers or _is_foreach(node)):
            self._call(node)
        elif _writes_whole(node):
            old = [self._values[w] for w in node.writes]
            self._place_all(node, self._apply(node, old))
        elif node.op._opname.endswith("_"):
            self._write_parts(node)
        else:
            self._call(node)

    def _apply(self, node: Node, written: Sequence[Tensor]) -> list[Tensor]:
        """Call a node's rule, for each tensor of a foreach op."""
        args, kwargs = self._fill(node.args, written), self._fill_named(node.kwargs, written)
        if not _is_foreach(node):
            return [_apply(node.op, args, kwargs, node.outs[0])]
        return [
            _apply(node.op, *call, meta)
            for call, meta in zip(_transposed(args, kwargs), node.outs, strict=False)
        ]

    def _write_parts(self, node: Node) -> None:
        """Call the rule of an op that writes through views, and write what it gives."""
        wholes = [_with_strides(self._values[w], self._metas[w]).clone() for w in node.writes]
        args, kwargs = self._fill(node.args, wholes), self._fill_named(node.kwargs, wholes)
        calls = _transposed(args, kwargs) if _is_foreach(node) else [(args, kwargs)]
        for call_args, call_kwargs in calls:
            part = call_args[0]
            part.copy_(_apply(node.op, call_args, call_kwargs, TensorMeta.like(part)))
        self._place_all(node, wholes)

    def _place_all(self, node: Node, results: Sequence[Any]) -> None:
        for i, result in enumerate(results):
            self._values[node.first + i] = result

    def _call(self, node: Node) -> None:
        """Call the op itself; what it writes, it writes in a copy."""
        wholes = [_with_strides(self._values[w], self._metas[w]).clone() for w in node.writes]
        args = self._fill(node.args, wholes)
        kwargs = self._fill_named(node.kwargs, wholes)
        if self._device != "cpu" and any(a.name == "device" for a in node.op._schema.arguments):
            kwargs["device"] = self._device
        for position in _CONVOLUTIONS.get(node.op, ()):
            args[position] = self._channels_last(node.args[position], args[position])
        result = real_view(node.op)(*args, **kwargs)
        if node.follows_default:
            assert node.outs[0] is not None
            result = result.to(node.outs[0].dtype)
        self._place(node.result, result, node.first)
        for k, written in enumerate(wholes):
            self._values[node.first_write + k] = written

    def _channels_last(self, value: Any, t: Tensor) -> Tensor:
        if t.dim() != 4:
            return t
        if value not in self._packed:
            self._packed[value] = t.contiguous(memory_format=torch.channels_last)
        return self._packed[value]

    # -- arguments and results -----------------------------------------------------------------

    def _fill(self, items: Sequence[Any], wholes: Sequence[Tensor]) -> list[Any]:
        return [self._item(item, wholes) for item in items]

    def _fill_named(self, items: dict[str, Any], wholes: Sequence[Tensor]) -> dict[str, Any]:
        return {name: self._item(item, wholes) for name, item in items.items()}

    def _item(self, item: Any, wholes: Sequence[Tensor]) -> Any:
        kind = type(item)
        if kind is Ref:
            return self._values[item]
        if kind is Scalar:
            return self._numbers[item]
        if kind is Write:
            return apply_lens(wholes[item.base], item.lens)
        if kind in (list, tuple):
            return self._fill(item, wholes)
        return item

    def _place(self, spec: Any, result: Any, first: int) -> None:
        if type(spec) is int:
            self._values[first + spec] = result
        elif type(spec) in (list, tuple):
            for s, r in zip(spec, result, strict=True):
                self._place(s, r, first)


def _unpack(types: Sequence[type], vectors: Sequence[Tensor]) -> list[Tensor]:
    """Take the numbers out of their vectors, in order."""
    rest = {kind: iter(v.unbind(0)) for kind, v in zip(kinds(types), vectors, strict=True)}
    return [next(rest[kind]) for kind in types]


def _numbers_in(node: Node) -> bool:
    """Tell whether a node is given numbers that are inputs."""
    stack: list[Any] = [*node.args, *node.kwargs.values()]
    while stack:
        item = stack.pop()
        if type(item) is Scalar:
            return True
        if type(item) in (list, tuple):
            stack.extend(item)
    return False


def _is_foreach(node: Node) -> bool:
    return node.op._opname.startswith("_foreach_")


def _writes_whole(node: Node) -> bool:
    """Tell whether a node writes, if anything, its first operand: whole tensors, each once."""
    if not node.writes:
        return True
    first = node.args[0] if node.args else None
    written = list(first) if isinstance(first, list | tuple) else [first]
    whole = [Write(k, ()) for k in range(len(node.writes))]
    return node.op._opname.endswith("_") and written == whole


def _transposed(args: Sequence[Any], kwargs: dict[str, Any]) -> list[tuple[Any, dict[str, Any]]]:
    """Turn the arguments of a foreach op into those of a call for each tensor."""

    def pick(item: Any, i: int) -> Any:
        return item[i] if type(item) in (list, tuple) else item

    return [
        ([pick(a, i) for a in args], {k: pick(a, i) for k, a in kwargs.items()})
        for i in range(len(args[0]))
    ]


def _apply(
    op: torch._ops.OpOverload, args: Sequence[Any], kwargs: dict[str, Any], meta: TensorMeta | None
) -> Tensor:
    """Call an op's rule, or the plain op of a foreach op, in the dtype ATen computes in."""
    rule = rule_for(op)
    if rule is None:
        return getattr(aten, base_name(op))(*args, **kwargs)  # type: ignore[no-any-return]
    assert meta is not None
    tensors = [a for a in (*args, *kwargs.values()) if isinstance(a, Tensor)]
    dtypes = [t.dtype for t in tensors if t.dim()] or [t.dtype for t in tensors[:1]]
    dtype = functools.reduce(torch.promote_types, dtypes, meta.dtype)
    compute = torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype

    def cast(item: Any) -> Any:
        if isinstance(item, Tensor) and item.dtype is not torch.bool:
            return item.to(compute)
        return item

    result = rule(*map(cast, args), **{k: cast(a) for k, a in kwargs.items()})
    return result.expand(meta.size).to(meta.dtype)  # type: ignore[no-any-return]


def _with_strides(t: Tensor, meta: TensorMeta) -> Tensor:
    """Give `t` with the strides recorded for it; the same tensor if it has them."""
    if not meta.dense or all(
        n == 1 or a == b for n, a, b in zip(t.shape, t.stride(), meta.stride, strict=True)
    ):
        return t
    order = sorted(range(t.dim()), key=lambda d: meta.stride[d], reverse=True)
    packed = t.permute(order).contiguous()
    return packed.permute([order.index(d) for d in range(t.dim())])


def _write_back(module: GraphModule, graph: Graph, reuses: dict[int, int]) -> tuple[int, ...]:
    """Let values that end in an input's memory be written there; give the other outputs, which are returned."""
    fx = module.graph
    inputs = dict(zip(graph.inputs, (n for n in fx.nodes if n.op == "placeholder"), strict=False))
    end = next(n for n in reversed(fx.nodes) if n.op == "output")
    returned, results = [], []
    written = []
    for value, node in zip(graph.outputs, end.args[0], strict=True):
        target = inputs.get(reuses.get(value, -1))
        if target is not None and target.meta["val"].shape == node.meta["val"].shape:
            written.append((target, node))
        else:
            returned.append(value)
            results.append(node)
    targets = {target for target, _ in written}
    with fx.inserting_before(end):
        # What is only a view of memory that is written here must be read before.
        sources = [_copied(fx, node) if _root(node) in targets else node for _, node in written]
        for (target, _), source in zip(written, sources, strict=True):
            copy = fx.call_function(aten.copy_.default, (target, source))
            copy.meta["val"] = target.meta["val"]
    end.args = (tuple(results),)
    end.meta["user_visible_output_idxs"] = list(range(len(results)))
    end.meta["original_output_strides"] = [n.meta["val"].stride() for n in results]
    fx.lint()
    module.recompile()
    return tuple(returned)


def _root(node: torch.fx.Node) -> torch.fx.Node:
    """Follow views to what they are views of."""
    while isinstance(node.target, torch._ops.OpOverload) and is_view_op(node.target):
        node = node.all_input_nodes[0]
    return node


def _copied(fx: torch.fx.Graph, node: torch.fx.Node) -> torch.fx.Node:
    copy = fx.call_function(aten.clone.default, (node,))
    copy.meta["val"] = node.meta["val"]
    return copy
