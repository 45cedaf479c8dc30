"""Memory of its own for each output of a compiled subgraph.

PyTorch's compiler takes a copy for nothing where it can: a clone, a cat of one tensor or a pad by zero becomes another
name of its operand. A functional graph computes the same values so; but a later op in place on one output then changes
another output, or the output changes when an input is overwritten. So each output goes through an op that the compiler
does not know: `OWN` for an output that is returned, `BEFORE_WRITES` for one that is written into a donated input. Their
lowering (`own_memory_lowering`) copies where the memory is shared, and only there. Called by `lower`.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch._inductor.fx_passes.reinplace import inplaceable_ops
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import Graph, Node

__all__ = ["BEFORE_WRITES", "OWN", "before_writes", "own"]

_library = torch.library.Library("ltc", "FRAGMENT")  # type: ignore[no-untyped-call]


def _copy(x: torch.Tensor, output: int) -> torch.Tensor:
    return x.clone()


# `output` is the position of the output: no two calls are equal, so none is merged with another.
for _name in ("own", "before_writes"):
    _library.define(f"{_name}(Tensor x, int output) -> Tensor")  # type: ignore[no-untyped-call]
    _library.impl(_name, _copy, "CompositeExplicitAutograd")  # type: ignore[no-untyped-call]
OWN = torch.ops.ltc.own.default
BEFORE_WRITES = torch.ops.ltc.before_writes.default


def own(graph: Graph, results: Sequence[Node], mode: FakeTensorMode) -> list[Node]:
    """Nodes with the values of `results`, each in memory that no other value has."""
    return [_call(graph, OWN, node, k, mode) for k, node in enumerate(results)]


def before_writes(graph: Graph, sources: Sequence[Node], mode: FakeTensorMode) -> list[Node]:
    """Nodes with the values of `sources`, which do not change when inputs are overwritten after them.

    Ops that PyTorch's compiler can run in place on the input that they are written to stay as they are: their results
    have memory of their own, and the op between would hide them.
    """
    return [
        node if node.target in inplaceable_ops else _call(graph, BEFORE_WRITES, node, k, mode)
        for k, node in enumerate(sources)
    ]


def _call(
    graph: Graph, op: torch._ops.OpOverload, source: Node, output: int, mode: FakeTensorMode
) -> Node:
    node = graph.call_function(op, (source, output))
    with mode:
        node.meta["val"] = source.meta["val"].clone()
    return node
