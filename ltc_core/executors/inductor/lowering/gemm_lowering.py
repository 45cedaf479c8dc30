"""The compiler's lowering of the matrix products that `gemm` replaced: calls of oneDNN.

PyTorch's own lowering of oneDNN's linear layer needs constant weights and copies operands that are not contiguous. In a
training step, weights change and operands may be transposed. Used by `build_artifact`, in the compiler's process only.
"""

from __future__ import annotations

from typing import Any

from torch._inductor import mkldnn_ir
from torch._inductor.ir import FixedLayout, TensorBox
from torch._inductor.lowering import register_lowering

from ltc_core.executors.inductor.lowering.gemm import LINEAR

__all__ = ["register"]


class _Linear(mkldnn_ir.LinearUnary):
    """oneDNN's linear layer on operands of any strides; PyTorch's class copies those that are not contiguous."""

    @classmethod
    def call(cls, x: Any, weight: Any, bias: Any) -> Any:
        given = [t for t in (x, weight, bias) if t is not None]
        inputs = [cls.require_stride1(cls.realize_input(t)) for t in given]
        plain = ["none", [-1], ""]
        size = [x.get_size()[0], weight.get_size()[0]]
        layout = FixedLayout(device=x.get_device(), dtype=x.get_dtype(), size=size)
        return mkldnn_ir._create_output_node(  # type: ignore[no-untyped-call]
            cls(layout=layout, inputs=inputs, constant_args=plain if bias else [None, *plain])
        )


def register() -> None:
    """Register the lowering of the op."""
    register_lowering(LINEAR, type_promotion_kind=None)(_lower)


def _lower(x: Any, weight: Any, bias: Any = None) -> Any:
    return TensorBox.create(_Linear.call(x, weight, bias))
