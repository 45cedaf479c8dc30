"""Large float32 matrix products run in oneDNN where it is quicker than MKL, which PyTorch calls for them.

MKL keeps to AVX2 on processors that are not Intel's; oneDNN uses the AVX-512 they have. EPYC with two cores, GFLOP/s of
MKL and oneDNN: (512, 128) @ (128, 512) 165 and 197, (256, 512) @ (512, 2048) 157 and 194; of products whose left side
lies transposed, where only wide ones gain, 118 and 155. The rule looks at shapes alone: the same graph gives the same
numbers in each run. Called by `lower`; `gemm_lowering` says how the compiler calls oneDNN.
"""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import torch
from torch.fx import GraphModule

__all__ = ["LINEAR", "use_onednn"]

aten = torch.ops.aten

# Below, calling oneDNN costs more than it saves.
_MIN_FLOP = 1 << 25
_MIN_COLUMNS = 128
# A left operand that lies transposed is repacked: that pays for products much wider than high.
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
    """Replace, in a traced graph, the products that oneDNN is quicker with."""
    if not _is_quicker():
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
    """Return (left, right, bias) of a plain matrix product."""
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
