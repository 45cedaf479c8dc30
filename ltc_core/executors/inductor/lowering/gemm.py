"""Large float32 matrix products call oneDNN instead of MKL, PyTorch's default, where oneDNN is faster.

MKL uses AVX2 only on processors that are not Intel's; oneDNN uses AVX-512 there. EPYC with two cores, GFLOP/s of MKL
and oneDNN: (512, 128) @ (128, 512) 165 and 197, (256, 512) @ (512, 2048) 157 and 194; a wide product with a transposed
left operand 118 and 155 (narrow ones do not gain). The choice depends on shapes and strides only, so a graph returns
the same numbers in each run. Called by `lower`; `gemm_lowering` is the compiler's lowering of the op.
"""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import torch
from torch.fx import GraphModule

__all__ = ["LINEAR", "use_onednn"]

aten = torch.ops.aten

# For smaller products, the call of oneDNN costs more than it saves.
_MIN_FLOP = 1 << 25
_MIN_COLUMNS = 128
# oneDNN repacks a transposed left operand, which pays only for products much wider than high.
_MIN_WIDTH_OF_TRANSPOSED = 4

_library = torch.library.Library("ltc", "FRAGMENT")  # type: ignore[no-untyped-call]
_library.define("linear(Tensor x, Tensor weight, Tensor? bias) -> Tensor")  # type: ignore[no-untyped-call]
LINEAR = torch.ops.ltc.linear.default


@torch.library.impl(_library, "linear", "CPU")
def _linear(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None
) -> torch.Tensor:
    return torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")  # type: ignore[no-any-return]


@torch.library.impl(_library, "linear", "Meta")
def _linear_meta(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None
) -> torch.Tensor:
    return x.new_empty(x.shape[0], weight.shape[0])


def use_onednn(module: GraphModule) -> None:
    """Replace the matrix products of a traced graph that are faster in oneDNN by calls of it."""
    if not (torch.backends.mkldnn.enabled and _is_quicker()):
        return
    graph = module.graph
    for node in list(graph.nodes):
        operands = _operands(node)
        if operands is None or not _gains(*(n.meta["val"] for n in operands[:2])):
            continue
        left, right, bias = operands
        with graph.inserting_before(node):
            weight = graph.call_function(aten.permute.default, (right, [1, 0]))
            weight.meta["val"] = right.meta["val"].t()
            product = graph.call_function(LINEAR, (left, weight, bias))
        product.meta = dict(node.meta)
        node.replace_all_uses_with(product)
        graph.erase_node(node)
    module.recompile()


@functools.cache
def _is_quicker() -> bool:
    if not torch._C._has_mkldnn or torch.backends.cpu.get_cpu_capability() != "AVX512":
        return False
    try:
        return "AuthenticAMD" in Path("/proc/cpuinfo").read_text(encoding="utf-8")
    except OSError:
        return False


def _operands(node: torch.fx.Node) -> tuple[Any, Any, Any] | None:
    """(left, right, bias) of a matrix product; None for other ops."""
    if node.target is aten.mm.default:
        return node.args[0], node.args[1], None
    if node.target is aten.addmm.default and not node.kwargs:
        bias, left, right = node.args
        if bias.meta["val"].dim() == 1:  # type: ignore[union-attr]
            return left, right, bias
    return None


def _gains(left: torch.Tensor, right: torch.Tensor) -> bool:
    if left.dtype is not torch.float32 or left.device.type != "cpu":
        return False
    (rows, inner), columns = left.shape, right.shape[1]
    if columns < _MIN_COLUMNS or 2 * rows * inner * columns < _MIN_FLOP:
        return False
    return left.stride(1) == 1 or columns >= _MIN_WIDTH_OF_TRANSPOSED * rows
