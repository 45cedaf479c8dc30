"""The table of lowerings: an op of ATen -> the function that computes it with JAX.

A rule gets a `Call`, which knows shapes and dtypes as PyTorch has them, and the op's arguments, with `jax.Array`s in
place of tensors. What it returns is converted to the dtype of the call's result.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import ml_dtypes
import numpy as np
import torch
from jax import numpy as jnp

__all__ = [
    "NOT_ON_HOST",
    "RULES",
    "Array",
    "Call",
    "dtype_of",
    "is_narrow_float",
    "lowers",
    "to_dtype",
]

Array = Any  # jax.Array: where the package is missing, mypy has no such type
Op = torch._ops.OpOverload
Rule = Callable[..., Any]

_DTYPES: dict[torch.dtype, Any] = {
    torch.bool: np.bool_,
    torch.uint8: np.uint8,
    torch.uint16: np.uint16,
    torch.uint32: np.uint32,
    torch.uint64: np.uint64,
    torch.int8: np.int8,
    torch.int16: np.int16,
    torch.int32: np.int32,
    torch.int64: np.int64,
    torch.float8_e4m3fn: ml_dtypes.float8_e4m3fn,
    torch.float8_e5m2: ml_dtypes.float8_e5m2,
    torch.float16: np.float16,
    torch.bfloat16: ml_dtypes.bfloat16,
    torch.float32: np.float32,
    torch.float64: np.float64,
    torch.complex64: np.complex64,
    torch.complex128: np.complex128,
}

RULES: dict[Op, Rule] = {}
# Ops that must not run on the host: they read what another op's kernel on the CPU has left, and a rule has not.
NOT_ON_HOST = frozenset({torch.ops.aten.mkldnn_rnn_layer_backward.default})


class Call:
    """One call of an op.

    Attributes:
        op: the op.
        result: the fake tensor of its result, or several.
        args: its arguments, with nodes of the FX graph in place of tensors.
    """

    def __init__(self, op: Op, result: Any, args: Sequence[Any]) -> None:
        self.op = op
        self.result = result
        self._args = args

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.result.shape)

    @property
    def dtype(self) -> Any:
        return dtype_of(self.result.dtype)

    @property
    def common_dtype(self) -> Any:
        """The dtype in which PyTorch computes the first two arguments."""
        first, second = (
            a.meta["val"] if isinstance(a, torch.fx.Node) else a for a in self._args[:2]
        )
        return dtype_of(torch.result_type(first, second))


def dtype_of(dtype: torch.dtype) -> Any:
    """JAX's dtype.

    Raises:
        NotImplementedError: it has none.
    """
    found = _DTYPES.get(dtype)
    if found is None:
        raise NotImplementedError(f"JAX has no {dtype}")
    return found


def is_narrow_float(dtype: Any) -> bool:
    """Whether a dtype is float16 or bfloat16, for which ATen's kernels compute in float32."""
    return np.dtype(dtype).itemsize == 2 and bool(jnp.issubdtype(dtype, jnp.floating))


def to_dtype(x: Any, dtype: Any) -> Array:
    """`x` converted as PyTorch does: complex numbers lose their imaginary part; all but zero is True."""
    x = jnp.asarray(x)
    if x.dtype == dtype:
        return x
    if jnp.issubdtype(x.dtype, jnp.complexfloating) and dtype != np.bool_:
        if not jnp.issubdtype(dtype, jnp.complexfloating):
            x = x.real
    if dtype == np.bool_:
        return x != 0
    return x.astype(dtype)


def lowers(*names: str) -> Callable[[Rule], Rule]:
    """Enter a rule for ops, such as "add.Tensor". Ops that this version of PyTorch lacks are left out."""

    def enter(rule: Rule) -> Rule:
        for name in names:
            packet, _, overload = name.partition(".")
            found = getattr(torch.ops.aten, packet, None)
            op = getattr(found, overload or "default", None)
            if op is not None:
                RULES[op] = rule
        return rule

    return enter
