"""`torch_xla.experimental.fori_loop`: loops, over `ltc_core.api.loops`.

The import also teaches PyTorch's own `while_loop` to run on the device, as it does in torch_xla.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch._higher_order_ops.while_loop import while_loop_op

from ltc_core.api.loops import fori_loop, while_loop
from ltc_core.tensor.lazy_tensor import LazyTensor

__all__ = ["_xla_while_loop_wrapper", "fori_loop", "while_loop"]


def _xla_while_loop_wrapper(
    cond_fn: Callable[..., Any],
    body_fn: Callable[..., Any],
    carried_inputs: Sequence[Any],
    additional_inputs: Sequence[Any] | None = None,
    fake_tensor: bool = False,
) -> Any:
    """The same as `while_loop`. `fake_tensor` is accepted: nothing is traced."""
    return while_loop(cond_fn, body_fn, carried_inputs, additional_inputs)


# A higher-order op asks the tensors' class for its rule.
while_loop_op.py_impl(LazyTensor)(while_loop)
