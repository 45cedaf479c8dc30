"""Scalars that are inputs of a compiled program: which ones, and how ops take them as tensors.

A learning rate, Adam's bias correction or a loss scale changes from step to step and must not cause a compile. ATen
takes such scalars as Python numbers; a compiled program gets them as the elements of one vector for each type. So each
op that may have a changing scalar has a rule here: the same arithmetic with 0-dim tensors in place of the scalars.
Scalars of other ops (an exponent, an epsilon) are constants of the program; if one changes, the program is recompiled.
Used by `subgraph` and `retrace`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch._decomp.decompositions import native_batch_norm_helper

from ltc_core.graph.ir import TensorMeta
from ltc_core.program.fused_optimizers import FUSED_OPTIMIZERS

__all__ = [
    "SCALAR_DTYPES",
    "WHOLE_RULES",
    "base_name",
    "kinds",
    "rounds_scalars",
    "rule_for",
    "same_scalar",
    "takes_scalar",
    "vector_metas",
]

SCALAR_DTYPES = {float: torch.float64, int: torch.int64}

Tensor = torch.Tensor
ScalarLike = Any  # a Python number or a 0-dim tensor


def base_name(op: torch._ops.OpOverload) -> str:
    """Name without `_foreach_` and `_`: "add" for both `_foreach_add_` and `add_`."""
    return op._opname.removeprefix("_foreach_").rstrip("_")


def takes_scalar(op: torch._ops.OpOverload, value: Any, varied: bool) -> bool:
    """Whether a scalar of an op is an input of the compiled program.

    Floats of the ops in `_CHANGING` and of fused optimizers always are. Other scalars (the 2 of `x * 2`, the -inf of a
    mask, a batch norm's momentum) are constants until one is `varied`: it has changed between runs.
    """
    if type(value) not in SCALAR_DTYPES:
        return False
    if rule_for(op) is None and op._opname not in WHOLE_RULES:
        return False
    changes = base_name(op) in _CHANGING or op._opname in FUSED_OPTIMIZERS
    return varied or (type(value) is float and changes)


def same_scalar(a: Any, b: Any) -> bool:
    """Whether two scalars have one type and value; nan is nan, and 0.0 is not -0.0."""
    if type(a) is not type(b):
        return False
    return (a == b and (bool(a) or repr(a) == repr(b))) or (a != a and b != b)


def kinds(types: Sequence[type]) -> list[type]:
    """Types for which a program has a vector of scalars, in the order of the vectors."""
    return [kind for kind in SCALAR_DTYPES if kind in types]


def rule_for(op: torch._ops.OpOverload) -> Callable[..., Any] | None:
    if op.namespace != "aten" or op._overloadname in _NOT_ARITHMETIC.get(base_name(op), ()):
        return None
    return RULES.get(base_name(op))


def rounds_scalars(op: torch._ops.OpOverload) -> bool:
    """Whether ATen on the CPU rounds an op's scalars to a 16-bit result's dtype first; others are taken in float32."""
    return base_name(op) in _ROUNDING


def vector_metas(types: Sequence[type]) -> list[TensorMeta]:
    """Metas of a program's vectors of scalars, which follow its tensor inputs."""
    return [TensorMeta.packed((types.count(kind),), SCALAR_DTYPES[kind]) for kind in kinds(types)]


def add(x: Tensor, y: Any, alpha: ScalarLike = 1) -> Any:
    return x + _scaled(y, alpha)


def sub(x: Tensor, y: Any, alpha: ScalarLike = 1) -> Any:
    return x - _scaled(y, alpha)


def rsub(x: Tensor, y: Any, alpha: ScalarLike = 1) -> Any:
    return y - _scaled(x, alpha)


def _scaled(y: Any, alpha: ScalarLike) -> Any:
    return y if type(alpha) is int and alpha == 1 else y * alpha


def mul(x: Tensor, y: Any) -> Any:
    return x * y


def div(x: Tensor, y: Any) -> Any:
    return x / y


def addcmul(x: Tensor, a: Tensor, b: Tensor, value: ScalarLike = 1) -> Any:
    return x + _scaled(a, value) * b  # ATen's order; in another order the product may overflow


def addcdiv(x: Tensor, a: Tensor, b: Tensor, value: ScalarLike = 1) -> Any:
    return x + _scaled(a, value) / b


def lerp(x: Tensor, end: Tensor, weight: Any) -> Any:
    """Interpolate from the nearer end, as ATen does, so that weights 0 and 1 are exact."""
    if not isinstance(weight, Tensor):
        return x + weight * (end - x) if abs(weight) < 0.5 else end - (end - x) * (1 - weight)
    step = end - x
    return torch.where(weight.abs() < 0.5, x + weight * step, end - step * (1 - weight))


def fill(x: Tensor, value: Any) -> Any:
    return _as_tensor(value, x).expand_as(x)  # an addition to zeros would lose the sign of -0.0


def masked_fill(x: Tensor, mask: Tensor, value: Any) -> Any:
    return torch.where(mask, _as_tensor(value, x), x)


def sqrt(x: Tensor) -> Any:
    return x.sqrt()


def neg(x: Tensor) -> Any:
    return -x


def reciprocal(x: Tensor) -> Any:
    return x.reciprocal()


def absolute(x: Tensor) -> Any:
    return x.abs()


def zero(x: Tensor) -> Any:
    return torch.zeros_like(x)


def copy(x: Tensor, y: Tensor, non_blocking: bool = False) -> Any:
    return y.expand_as(x)


def clamp_min(x: Tensor, low: Any) -> Any:
    return torch.maximum(x, _as_tensor(low, x))


def clamp_max(x: Tensor, high: Any) -> Any:
    return torch.minimum(x, _as_tensor(high, x))


def clamp(x: Tensor, low: Any = None, high: Any = None) -> Any:
    if low is not None:
        x = clamp_min(x, low)
    return x if high is None else clamp_max(x, high)


def _as_tensor(value: Any, like: Tensor) -> Tensor:
    return (
        value
        if isinstance(value, Tensor)
        else torch.full((), value, dtype=like.dtype, device=like.device)
    )


def power(x: Any, exponent: Any) -> Any:
    return torch.pow(x, exponent)


def leaky_relu(x: Tensor, slope: ScalarLike = 0.01) -> Any:
    return torch.where(x > 0, x, x * slope)


def leaky_relu_backward(grad: Tensor, x: Tensor, slope: ScalarLike, is_result: bool) -> Any:
    return torch.where(x > 0, grad, grad * slope)


# Base names of ops whose floats may be learning rates, decays or loss scales; fused optimizers have them too.
_CHANGING = frozenset({"add", "addcdiv", "addcmul", "div", "lerp", "mul", "rsub", "sub"})

# Source: aten/src/ATen/native/cpu/BinaryOpsKernel.cpp.
_ROUNDING = frozenset({"add", "rsub", "sub"})

# Base name of an op -> its elementwise arithmetic on tensors of the dtype ATen computes in.
RULES: dict[str, Callable[..., Any]] = {
    "abs": absolute,
    "add": add,
    "addcdiv": addcdiv,
    "addcmul": addcmul,
    "clamp": clamp,
    "clamp_max": clamp_max,
    "clamp_min": clamp_min,
    "copy": copy,
    "div": div,
    "fill": fill,
    "leaky_relu": leaky_relu,
    "leaky_relu_backward": leaky_relu_backward,
    "lerp": lerp,
    "masked_fill": masked_fill,
    "maximum": clamp_min,
    "minimum": clamp_max,
    "mul": mul,
    "neg": neg,
    "reciprocal": reciprocal,
    "rsub": rsub,
    "sqrt": sqrt,
    "sub": sub,
    "zero": zero,
}
# Base name -> overloads that compute something else than its rule.
_NOT_ARITHMETIC: dict[str, Sequence[str]] = {"div": ("Tensor_mode", "Scalar_mode")}


def native_batch_norm(
    x: Tensor,
    weight: Any,
    bias: Any,
    mean: Tensor,
    var: Tensor,
    training: bool,
    momentum: ScalarLike,
    eps: ScalarLike,
) -> tuple[Any, ...]:
    return native_batch_norm_helper(x, weight, bias, mean, var, training, momentum, eps, True)


# Name of an op -> rule that returns the op's results, then the new values of the operands that it writes.
WHOLE_RULES: dict[str, Callable[..., Sequence[Any]]] = {
    "native_batch_norm": native_batch_norm,
    **FUSED_OPTIMIZERS,
}
