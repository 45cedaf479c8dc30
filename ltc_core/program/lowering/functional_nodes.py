"""A node as a functional FX graph of PyTorch's core ops, for compilers that take these.

`FunctionalNodes.of` calls the node on fake tensors (`retrace`), and traces the calls: without writes, and decomposed as
far as the compiler has no rule for an op. Nodes of equal text share the graph. Tensors are packed here, whatever their
recorded strides are.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch._decomp import decomposition_table
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import GraphModule

from ltc_core.graph.ir import Node, TensorMeta
from ltc_core.program.lowering.decompositions import FOR_XLA
from ltc_core.program.lowering.functional import trace
from ltc_core.program.lowering.random_draws import draw
from ltc_core.program.lowering.retrace import Retrace
from ltc_core.program.scalar_inputs import vector_metas
from ltc_core.program.subgraph import Subgraph, of_node

__all__ = ["FunctionalNodes"]

Tensor = torch.Tensor
# Graphs that are kept: batches of ever new lengths have ever new calls.
_MOST = 20_000


class FunctionalNodes:
    """The functional graphs of nodes, by text.

    Args:
        has_rule: whether the compiler has a rule for an op. Other ops are decomposed, if PyTorch can.

    Attributes:
        decompositions: op -> how PyTorch decomposes it, for the ops without a rule.
    """

    def __init__(self, has_rule: Callable[[torch._ops.OpOverload], bool]) -> None:
        self.decompositions = {
            op: rule
            for op, rule in decomposition_table.items()
            if isinstance(op, torch._ops.OpOverload) and not has_rule(op) and not _is_composite(op)
        }
        self._graphs: dict[str, GraphModule] = {}

    def of(
        self, subgraph: Subgraph, node: Node, metas: Mapping[int, TensorMeta]
    ) -> tuple[GraphModule, Subgraph]:
        """The graph of a node of `subgraph`, and the node as a subgraph of its own.

        `metas` are those of the subgraph's values. The graph's inputs are those of the node's subgraph, then the
        vectors of its float and int scalars, if it has any. Cost: 20 us for a known node, else
        some milliseconds.

        Raises:
            Refused: the node cannot be traced.
        """
        alone = of_node(subgraph, node, metas)
        text = alone.text()
        graph = self._graphs.get(text)
        if graph is None:
            graph = self._trace(alone)
            if len(self._graphs) >= _MOST:
                self._graphs.clear()
            self._graphs[text] = graph
        return graph, alone

    def _trace(self, alone: Subgraph) -> GraphModule:
        mode = FakeTensorMode()
        metas = [*alone.graph.inputs.values(), *vector_metas(alone.scalar_types)]
        with mode:
            fakes = [torch.empty(meta.size, dtype=meta.dtype) for meta in metas]
        return trace(_Functional(alone).run, fakes, mode, self.decompositions)


def _is_composite(op: torch._ops.OpOverload) -> bool:
    """Whether the dispatcher takes an op apart by itself: into ops of ATen, where a decomposition may take `prims`."""
    return op.has_kernel_for_dispatch_key(torch._C.DispatchKey.CompositeImplicitAutograd)


class _Functional(Retrace):
    decompositions = FOR_XLA
    all_by_rule = True

    def __init__(self, subgraph: Subgraph) -> None:
        super().__init__(subgraph, frozenset(), "cpu")

    def call(self, node: Node, op: Callable[..., Any], args: list[Any], kwargs: Any) -> Any:
        if "generator" in kwargs:
            return draw(node, args, kwargs)
        return super().call(node, op, args, kwargs)

    def laid_out(self, t: Tensor, meta: TensorMeta) -> Tensor:
        return t if t.dtype is meta.dtype else t.to(meta.dtype)
