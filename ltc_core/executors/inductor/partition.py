"""Splits a graph into subgraphs for PyTorch's compiler and subgraphs that run op by op.

Not compiled are collectives, draws from PyTorch's generator (their numbers must not depend on the executor), writes
through views that cannot be made functional, ops that check values, and ops that the compiler refused. In: a graph and
the scalars of a run. Out: subgraphs that run one after the other. Called by `tiers`; compiled ones go to `request`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from ltc_core.graph import collective, recurrent
from ltc_core.graph.arguments import leaves
from ltc_core.graph.ir import Graph, Lens, Node, Scalar, TensorMeta, Write
from ltc_core.graph.lens import open_lens
from ltc_core.program.backend import Backend, divide
from ltc_core.program.index_checks import find_bounds
from ltc_core.program.passes.initial_state import without_operands
from ltc_core.program.passes.layout import keep_channels_last
from ltc_core.program.passes.overlap import overlap_reductions
from ltc_core.program.scalar_inputs import base_name
from ltc_core.program.schedule import Stage
from ltc_core.program.subgraph import Subgraph
from ltc_core.shapes.shape_inference import WITHOUT_KERNEL

__all__ = ["eager_nodes", "partition"]

aten = torch.ops.aten
# Base names of divisions whose result is an integer for integers.
_DIVISIONS = frozenset({"div", "floor_divide", "fmod", "remainder"})
# Ops that check the values of their operands and raise. PyTorch's compiler drops the check, or its library stops in the
# middle of a run.
_CHECKED = frozenset(
    {
        "_ctc_loss", "_embedding_bag", "_embedding_bag_forward_only", "_functional_assert_async",
        "_histogramdd_from_bin_cts", "_histogramdd_from_bin_tensors", "_linalg_eigh", "_linalg_eigvals",
        "_linalg_svd", "binary_cross_entropy", "cholesky", "histc", "histogram", "linalg_eig", "linalg_eigvals",
        "linalg_lstsq", "lu_unpack", "masked_scatter", "max_unpool2d", "max_unpool3d", "multi_margin_loss",
        "multilabel_margin_loss_forward", "searchsorted", "segment_reduce",
    }
)  # fmt: skip


# oneDNN's layers: the compiler's own call of the forward drops the workspace that the backward reads.
_ONEDNN = frozenset({aten.mkldnn_rnn_layer.default, aten.mkldnn_rnn_layer_backward.default})


class InductorBackend(Backend):
    """How PyTorch's compiler is used.

    Args:
        refused: names of ops that it cannot compile.
    """

    passes = (overlap_reductions, without_operands)

    def __init__(self, refused: frozenset[str]) -> None:
        self._refused = refused

    def refuses(self, graph: Graph, scalars: Sequence[Any]) -> dict[int, str]:
        return eager_nodes(graph, scalars, self._refused)

    def laid_out(self, graph: Graph, stages: Sequence[Stage]) -> Graph:
        return keep_channels_last(graph, stages)


def partition(
    graph: Graph, scalars: Sequence[Any], varied: frozenset[int], refused: frozenset[str]
) -> list[Subgraph]:
    """Subgraphs of `graph`, in the order in which they run (`program.backend.divide`)."""
    return divide(graph, InductorBackend(refused), scalars, varied)[1]


def eager_nodes(graph: Graph, scalars: Sequence[Any], refused: frozenset[str]) -> dict[int, str]:
    """Positions of the nodes that are not compiled, each with the reason in words."""
    metas = graph.metas()
    _, unchecked = find_bounds(graph)
    found = {}
    for at, node in enumerate(graph.nodes):
        why = "compiled code cannot check its indices" if at in unchecked else ""
        why = why or _why_eager(node, metas, scalars, refused)
        if why:
            found[at] = why
    return found


def _why_eager(
    node: Node, metas: Mapping[int, TensorMeta], scalars: Sequence[Any], refused: frozenset[str]
) -> str:
    """Why a node is not compiled; "" if it is."""
    if str(node.op) in refused:
        return "the compiler refused it"
    if "generator" in node.kwargs:
        return "its random numbers must be those of eager"
    if node.op in _ONEDNN:
        return "the compiler does not keep what its gradient needs"
    if node.op in recurrent.OPS:
        return "it is a loop over the steps of a sequence"
    if node.op in collective.OPS:
        return "it exchanges data with other processes"
    if node.op._opname.rstrip("_") in _CHECKED:
        return "it checks the values of its operands, which compiled code does not"
    if node.op._opname in WITHOUT_KERNEL:
        return "the compiler does not know the sizes of its results"
    if any(
        not _is_plain_view(item.lens, metas[node.writes[item.base]])
        for item in leaves(node.args, *node.kwargs.values())
        if type(item) is Write
    ):
        return "it writes through a view that compiled code cannot write through"
    if _may_divide_by_zero(node, metas, scalars):
        return "it divides integers: by zero, compiled code would end the process"
    if _has_negative_power(node, scalars):
        return "it raises integers to a negative power, an error that compiled code does not see"
    return ""


def _may_divide_by_zero(
    node: Node, metas: Mapping[int, TensorMeta], scalars: Sequence[Any]
) -> bool:
    """Whether a node may divide integers by zero: eager raises, but compiled code ends the process."""
    if base_name(node.op) not in _DIVISIONS or len(node.args) < 2:
        return False
    result = node.outs[0]
    if result is None or result.dtype.is_floating_point or result.dtype.is_complex:
        return False
    divisor = node.args[1]
    if type(divisor) is Scalar:
        divisor = scalars[divisor]
    return type(divisor) not in (int, bool) or divisor == 0


def _has_negative_power(node: Node, scalars: Sequence[Any]) -> bool:
    """Whether a node raises integers to a negative power: eager raises an error, compiled code gives a number."""
    result = node.outs[0]
    if base_name(node.op) != "pow" or len(node.args) < 2 or result is None:
        return False
    if result.dtype.is_floating_point or result.dtype.is_complex:
        return False
    exponents = [scalars[e] if type(e) is Scalar else e for e in leaves(node.args[1])]
    return any(type(e) is int and e < 0 for e in exponents)


def _is_plain_view(lens: Lens, meta: TensorMeta) -> bool:
    """Whether a lens is a view of the memory as in eager, without copies, and PyTorch can make a write functional.

    It cannot for `as_strided` of another view. For `unfold` it would set the elements between the windows to zero: its
    inverse there is the backward formula.
    """
    if len(lens) > 1 and any(step.op is aten.as_strided.default for step in lens):
        return False
    if any(step.op is aten.unfold.default for step in lens):
        return False
    return not lens or not open_lens(meta.meta_tensor(), lens)[1]
