"""The nodes of a subgraph called again, one by one and without side effects, so that a compiler can trace the calls.

In-place ops return new values. Foreach ops become one op for each tensor, which compilers fuse again. Scalars that are
inputs are 0-dim tensors; the rules of `scalar_inputs` compute with them. Each compiler overrides what it needs in a
subclass: `executors.inductor.lowering.lower` traces with fake tensors, `executors.torch_xla.launch` with tensors of the
device.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from ltc_core.graph.arguments import leaves, map_leaves, place_results
from ltc_core.graph.ir import Node, Ref, Scalar, TensorMeta, Write
from ltc_core.graph.lens import apply_lens, real_view
from ltc_core.program.lowering.default_dtype import in_recorded_dtype
from ltc_core.program.scalar_inputs import (
    WHOLE_RULES,
    base_name,
    kinds,
    rounds_scalars,
    rule_for,
)
from ltc_core.program.subgraph import Subgraph

__all__ = ["Refused", "Retrace", "apply_rule"]

aten = torch.ops.aten
Tensor = torch.Tensor
# Decomposition of an op into others; it returns None if the op itself is to be called.
Decomposition = Callable[..., Sequence[Tensor | None] | None]
# Reductions that convert their operand to the dtype of `out` first.
_OF_THE_DTYPE_OF_OUT = frozenset({"cumprod", "cumsum", "mean", "nansum", "prod", "sum"})


class Refused(Exception):
    """The compiler cannot compile an op; `op` is its name."""

    def __init__(self, op: str, why: str) -> None:
        super().__init__(f"{op}: {why}")
        self.op = op


class Retrace:
    """Calls the nodes of a subgraph on given tensors.

    Args:
        subgraph: the subgraph.
        copied: outputs to be cloned, because they share memory with another value.
        device: device of the tensors that factory ops make.
    """

    decompositions: Mapping[str, Decomposition] = {}  # name of an op -> its decomposition
    all_by_rule = False  # whether `WHOLE_RULES` also apply to nodes without scalar inputs

    def __init__(self, subgraph: Subgraph, copied: frozenset[int], device: str) -> None:
        self._subgraph = subgraph
        self._copied = copied
        self._device = device
        self._metas = subgraph.graph.metas()

    def run(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        """Outputs of the subgraph.

        Args:
            inputs: its inputs, then the vectors of its float and int scalars, if it has any.

        Raises:
            Refused: an op failed.
        """
        graph = self._subgraph.graph
        count = len(graph.inputs)
        self._values: dict[int, Any] = dict(zip(graph.inputs, inputs[:count], strict=True))
        self._numbers = _unpack(self._subgraph.scalar_types, inputs[count:])
        for node in graph.nodes:
            try:
                self.call_node(node)
            except Refused:
                raise
            except Exception as error:
                raise Refused(str(node.op), f"{type(error).__name__}: {error}") from error
        return tuple(self._output(i) for i in graph.outputs)

    def _output(self, value: int) -> Tensor:
        t: Tensor = self._values[value]
        if value in self._copied or value in self._subgraph.graph.inputs:
            t = t.clone()
        return self.laid_out(t, self._metas[value])

    # -- what a subclass may override ----------------------------------------------------------

    def call(self, node: Node, op: Callable[..., Any], args: list[Any], kwargs: Any) -> Any:
        """Call the op of a node."""
        return op(*args, **kwargs)

    def laid_out(self, t: Tensor, meta: TensorMeta) -> Tensor:
        """`t` with its recorded strides; the same tensor if it has them."""
        return _with_strides(t, meta)

    # -- one node ------------------------------------------------------------------------------

    def call_node(self, node: Node) -> None:
        """Run one node on the values computed so far, and store its results."""
        decomposed = self.decompositions.get(node.op._opname)
        if decomposed is not None:
            results = decomposed(*self._fill(node.args, ()), **self._fill_named(node.kwargs, ()))
            if results is not None:
                self._place_all(node, results)
                return
        numbers = _numbers_in(node)
        whole = WHOLE_RULES.get(node.op._opname)
        if whole is not None and (numbers or self.all_by_rule or _writes_unmarked(node)):
            self._call_whole(node, whole)
        elif not (numbers or _is_foreach(node)):
            self._call(node)
        elif _writes_whole(node):
            old = [self._values[w] for w in node.writes]
            self._place_all(node, self._apply(node, old))
        elif node.op._opname.endswith("_"):
            self._write_parts(node)
        else:
            self._call(node)

    def _call_whole(self, node: Node, rule: Callable[..., Sequence[Any]]) -> None:
        """Call the rule of a whole op; writes through views go to a copy of the whole tensor."""
        written = _writes_of(node)
        wholes = {w.base for w in written if not w.lens}
        if len(set(written)) < len(written) or any(w.lens and w.base in wholes for w in written):
            raise Refused(str(node.op), "it writes one tensor twice, the second time on the first")
        through_views = any(w.lens for w in written)
        olds = self._wholes(node) if through_views else [self._values[w] for w in node.writes]
        results = list(rule(*self._fill(node.args, olds), **self._fill_named(node.kwargs, olds)))
        del results[len(node.outs) :]  # an overload may write fewer operands
        if through_views:
            count = len(results) - len(written)
            for w, new in zip(written, results[count:], strict=True):
                apply_lens(olds[w.base], w.lens).copy_(new)
            results[count:] = olds
        self._place_all(node, results)

    def _apply(self, node: Node, written: Sequence[Tensor]) -> list[Tensor]:
        """Results of a node's rule, called once for each tensor of a foreach op."""
        args, kwargs = self._fill(node.args, written), self._fill_named(node.kwargs, written)
        if not _is_foreach(node):
            return [apply_rule(node.op, args, kwargs, node.outs[0])]
        return [
            apply_rule(node.op, *call, meta)
            for call, meta in zip(_transposed(args, kwargs), node.outs, strict=False)
        ]

    def _write_parts(self, node: Node) -> None:
        """Call the rule of an op that writes through views, and copy the result into each part that it writes."""
        wholes = self._wholes(node)
        args, kwargs = self._fill(node.args, wholes), self._fill_named(node.kwargs, wholes)
        calls = _transposed(args, kwargs) if _is_foreach(node) else [(args, kwargs)]
        for call_args, call_kwargs in calls:
            part = call_args[0]
            part.copy_(apply_rule(node.op, call_args, call_kwargs, TensorMeta.like(part)))
        self._place_all(node, wholes)

    def _wholes(self, node: Node) -> list[Tensor]:
        """Copies of the tensors that a node writes; it writes these instead."""
        return [self.laid_out(self._values[w], self._metas[w]).clone() for w in node.writes]

    def _place_all(self, node: Node, results: Sequence[Any]) -> None:
        for i, result in enumerate(results):
            self._values[node.first + i] = result

    def _call(self, node: Node) -> None:
        """Call the op itself; it writes copies of its operands."""
        wholes = self._wholes(node)
        args = self._fill(node.args, wholes)
        kwargs = self._fill_named(node.kwargs, wholes)
        if node.op._opname in _OF_THE_DTYPE_OF_OUT and "out" in kwargs and not kwargs.get("dtype"):
            kwargs["dtype"] = kwargs["out"].dtype  # functionalization ignores the dtype of `out`
        if self._device != "cpu" and any(a.name == "device" for a in node.op._schema.arguments):
            kwargs["device"] = self._device
        if node.uses_default_dtype:
            args, kwargs = in_recorded_dtype(node, args, kwargs, torch.float32)
        result = self.call(node, real_view(node.op), args, kwargs)
        if node.uses_default_dtype:
            assert node.outs[0] is not None
            result = result.to(node.outs[0].dtype)
        place_results(node.result, result, self._values, node.first)
        for k, written in enumerate(wholes):
            self._values[node.first_write + k] = written

    # -- arguments and results -----------------------------------------------------------------

    def _fill(self, items: Sequence[Any], wholes: Sequence[Tensor]) -> list[Any]:
        def filled(item: Any) -> Any:
            kind = type(item)
            if kind is Ref:
                return self._values[item]
            if kind is Scalar:
                return self._numbers[item]
            if kind is Write:
                return apply_lens(wholes[item.base], item.lens)
            return item

        return [map_leaves(filled, item) for item in items]

    def _fill_named(self, items: dict[str, Any], wholes: Sequence[Tensor]) -> dict[str, Any]:
        return dict(zip(items, self._fill([*items.values()], wholes), strict=True))


def _unpack(types: Sequence[type], vectors: Sequence[Tensor]) -> list[Tensor]:
    """The scalars as 0-dim tensors, in order, unpacked from their vectors."""
    rest = {kind: iter(v.unbind(0)) for kind, v in zip(kinds(types), vectors, strict=True)}
    return [next(rest[kind]) for kind in types]


def _numbers_in(node: Node) -> bool:
    """Whether a node has scalars that are inputs."""
    return any(type(item) is Scalar for item in leaves(node.args, *node.kwargs.values()))


def _writes_of(node: Node) -> list[Write]:
    """Operands that a node writes, in order."""
    return [w for w in leaves(node.args, *node.kwargs.values()) if type(w) is Write]


def _writes_unmarked(node: Node) -> bool:
    """Whether a node writes operands that its op's schema does not mark as written: tracers miss such writes."""
    return bool(node.writes) and not node.op._schema.is_mutable


def _is_foreach(node: Node) -> bool:
    return node.op._opname.startswith("_foreach_")


def _writes_whole(node: Node) -> bool:
    """Whether a node writes nothing, or only its first operand: whole tensors, each once."""
    if not node.writes:
        return True
    first = node.args[0] if node.args else None
    written = list(first) if isinstance(first, list | tuple) else [first]
    whole = [Write(k, ()) for k in range(len(node.writes))]
    return node.op._opname.endswith("_") and written == whole


def _transposed(args: Sequence[Any], kwargs: dict[str, Any]) -> list[tuple[Any, dict[str, Any]]]:
    """Arguments of one call for each tensor of a foreach op."""

    def pick(item: Any, i: int) -> Any:
        return item[i] if type(item) in (list, tuple) else item

    return [
        ([pick(a, i) for a in args], {k: pick(a, i) for k, a in kwargs.items()})
        for i in range(next(len(a) for a in args if type(a) in (list, tuple)))
    ]


def apply_rule(
    op: torch._ops.OpOverload, args: Sequence[Any], kwargs: dict[str, Any], meta: TensorMeta | None
) -> Tensor:
    """Call an op's rule in the dtype ATen computes in; without a rule, call the op (of a foreach op the plain one)."""
    rule = rule_for(op)
    if rule is None:
        return getattr(aten, base_name(op))(*args, **kwargs)  # type: ignore[no-any-return]
    assert meta is not None
    tensors = [a for a in (*args, *kwargs.values()) if isinstance(a, Tensor)]
    dtypes = [t.dtype for t in tensors if t.dim()] or [t.dtype for t in tensors[:1]]
    dtype = functools.reduce(torch.promote_types, dtypes, meta.dtype)
    narrow = dtype in (torch.float16, torch.bfloat16)
    compute = torch.float32 if narrow else dtype
    rounds = narrow and rounds_scalars(op) and tensors[0].device.type == "cpu"

    def cast(item: Any) -> Any:
        if isinstance(item, Tensor) and item.dtype is not torch.bool:
            return (item.to(dtype) if rounds else item).to(compute)
        return item

    result = rule(*map(cast, args), **{k: cast(a) for k, a in kwargs.items()})
    return result.expand(meta.size).to(meta.dtype)  # type: ignore[no-any-return]


def _with_strides(t: Tensor, meta: TensorMeta) -> Tensor:
    """`t` with its recorded strides; the same tensor if it has them, or if the strides are not dense."""
    if not meta.dense or all(
        n == 1 or a == b for n, a, b in zip(t.shape, t.stride(), meta.stride, strict=True)
    ):
        return t
    order = sorted(range(t.dim()), key=lambda d: meta.stride[d], reverse=True)
    packed = t.permute(order).contiguous()
    return packed.permute([order.index(d) for d in range(t.dim())])
