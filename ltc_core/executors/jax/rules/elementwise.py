"""Elementwise ops: arithmetic, comparisons, functions of one number."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax import lax
from jax import numpy as jnp

from ltc_core.executors.jax.table import Array, Call, lowers, to_dtype

__all__: list[str] = []


def _is_float(x: Array) -> bool:
    return bool(jnp.issubdtype(x.dtype, jnp.inexact))


# -- arithmetic ----------------------------------------------------------------------------------


@lowers("add.Tensor", "add.Scalar")
def add(c: Call, x: Any, y: Any, alpha: Any = 1) -> Array:
    return to_dtype(x, c.dtype) + _scaled(to_dtype(y, c.dtype), alpha)


@lowers("sub.Tensor", "sub.Scalar")
def sub(c: Call, x: Any, y: Any, alpha: Any = 1) -> Array:
    return to_dtype(x, c.dtype) - _scaled(to_dtype(y, c.dtype), alpha)


@lowers("rsub.Tensor", "rsub.Scalar")
def rsub(c: Call, x: Any, y: Any, alpha: Any = 1) -> Array:
    return to_dtype(y, c.dtype) - _scaled(to_dtype(x, c.dtype), alpha)


def _scaled(y: Array, alpha: Any) -> Array:
    if alpha == 1:
        return y
    return y * to_dtype(alpha, y.dtype)


@lowers("mul.Tensor", "mul.Scalar")
def mul(c: Call, x: Any, y: Any) -> Array:
    return to_dtype(x, c.dtype) * to_dtype(y, c.dtype)


@lowers("div.Tensor", "div.Scalar", "true_divide.Tensor")
def div(c: Call, x: Any, y: Any) -> Array:
    return to_dtype(x, c.dtype) / to_dtype(y, c.dtype)


@lowers("div.Tensor_mode", "div.Scalar_mode")
def div_mode(c: Call, x: Any, y: Any, rounding_mode: str | None = None) -> Array:
    x, y = to_dtype(x, c.dtype), to_dtype(y, c.dtype)
    if rounding_mode is None:
        return x / y
    if _is_float(x):
        return jnp.trunc(x / y) if rounding_mode == "trunc" else _floor_divide(x, y)
    _refuse_constant_zero(y)
    return lax.div(*jnp.broadcast_arrays(x, y)) if rounding_mode == "trunc" else x // y


def _refuse_constant_zero(y: Array) -> None:
    if not isinstance(y, jax.core.Tracer) and not np.all(np.asarray(y)):
        raise NotImplementedError("a whole number is divided by zero")


@lowers("floor_divide", "floor_divide.Scalar")
def floor_divide(c: Call, x: Any, y: Any) -> Array:
    return div_mode(c, x, y, "floor")


def _floor_divide(x: Array, y: Array) -> Array:
    """ATen's: the quotient of what is left after the remainder, so that it is exact where the division rounds up."""
    rest = lax.rem(*jnp.broadcast_arrays(x, y))
    quotient = (x - rest) / y
    quotient = jnp.where((rest != 0) & ((y < 0) != (rest < 0)), quotient - 1, quotient)
    floored = jnp.floor(quotient)
    floored = jnp.where(quotient - floored > 0.5, floored + 1, floored)
    floored = jnp.where(quotient != 0, floored, jnp.copysign(jnp.zeros_like(quotient), x / y))
    return jnp.where(y == 0, x / y, floored)


@lowers("remainder.Tensor", "remainder.Scalar", "remainder.Scalar_Tensor")
def remainder(c: Call, x: Any, y: Any) -> Array:
    x, y = jnp.broadcast_arrays(to_dtype(x, c.dtype), to_dtype(y, c.dtype))
    rest = lax.rem(x, y)
    return jnp.where((rest != 0) & ((rest < 0) != (y < 0)), rest + y, rest)


@lowers("fmod.Tensor", "fmod.Scalar")
def fmod(c: Call, x: Any, y: Any) -> Array:
    return lax.rem(*jnp.broadcast_arrays(to_dtype(x, c.dtype), to_dtype(y, c.dtype)))


@lowers("pow.Tensor_Tensor", "pow.Tensor_Scalar", "pow.Scalar")
def power(c: Call, x: Any, y: Any) -> Array:
    if isinstance(y, int | float) and not isinstance(y, bool):
        base = to_dtype(x, c.dtype)
        if y == 0.5 and _is_float(base):
            return jnp.sqrt(base)
        if y == int(y) and abs(y) <= 4 and (y >= 0 or _is_float(base)):
            return lax.integer_pow(base, int(y))
    x, y = to_dtype(x, c.dtype), to_dtype(y, c.dtype)
    if _is_float(x):
        return jnp.power(x, y)
    return _whole_power(*jnp.broadcast_arrays(x, y))


def _whole_power(x: Array, y: Array) -> Array:
    """Power of whole numbers. A negative exponent gives 0, except for 1 and -1."""
    result, square, rest = jnp.ones_like(x), x, y
    for _ in range(x.dtype.itemsize * 8 - 1):
        result = jnp.where(rest & 1, result * square, result)
        square, rest = square * square, rest >> 1
    if not jnp.issubdtype(x.dtype, jnp.signedinteger):
        return result
    sign = jnp.where((x == -1) & (y & 1 == 1), -1, 1).astype(x.dtype)
    inverse = jnp.where(abs(x) == 1, sign, 0).astype(x.dtype)
    return jnp.where(y < 0, inverse, result)


@lowers("where.self")
def where(c: Call, condition: Array, x: Array, y: Array) -> Array:
    return jnp.where(condition, to_dtype(x, c.dtype), to_dtype(y, c.dtype))


@lowers("clamp", "clamp.Tensor")
def clamp(c: Call, x: Any, low: Any = None, high: Any = None) -> Array:
    x = to_dtype(x, c.dtype)
    if low is not None:
        x = jnp.maximum(x, to_dtype(low, c.dtype))
    return x if high is None else jnp.minimum(x, to_dtype(high, c.dtype))


@lowers("clamp_min", "clamp_min.Tensor")
def clamp_min(c: Call, x: Any, low: Any) -> Array:
    return clamp(c, x, low)


@lowers("clamp_max", "clamp_max.Tensor")
def clamp_max(c: Call, x: Any, high: Any) -> Array:
    return clamp(c, x, None, high)


def _of_two(call: Callable[[Any, Any], Array]) -> Callable[..., Array]:
    """Both operands are converted to the dtype of the result first."""
    return lambda c, x, y: call(*jnp.broadcast_arrays(to_dtype(x, c.dtype), to_dtype(y, c.dtype)))


for _names, _two in {
    ("atan2",): jnp.arctan2,
    ("copysign.Tensor", "copysign.Scalar"): jnp.copysign,
    ("fmax",): jnp.fmax,
    ("fmin",): jnp.fmin,
    ("gcd",): jnp.gcd,
    ("hypot",): jnp.hypot,
    ("igamma",): lax.igamma,
    ("igammac",): lax.igammac,
    ("lcm",): jnp.lcm,
    ("maximum", "max.other"): jnp.maximum,
    ("minimum", "min.other"): jnp.minimum,
    ("nextafter",): jnp.nextafter,
}.items():
    lowers(*_names)(_of_two(_two))

# -- comparisons, logic, bits --------------------------------------------------------------------


def _comparison(compare: Callable[[Any, Any], Array]) -> Callable[..., Array]:
    def rule(c: Call, x: Any, y: Any) -> Array:
        if isinstance(y, int) and not isinstance(y, bool) and not _is_float(x):
            limits = (
                (0, 1) if x.dtype == np.bool_ else (jnp.iinfo(x.dtype).min, jnp.iinfo(x.dtype).max)
            )
            if not limits[0] <= y <= limits[1]:  # compared as int64, in which all values are
                return compare(to_dtype(x, np.int64), y)
        dtype = c.common_dtype
        return compare(to_dtype(x, dtype), to_dtype(y, dtype))

    return rule


for _name, _compare in {
    "eq": jnp.equal,
    "ne": jnp.not_equal,
    "lt": jnp.less,
    "le": jnp.less_equal,
    "gt": jnp.greater,
    "ge": jnp.greater_equal,
}.items():
    lowers(f"{_name}.Tensor", f"{_name}.Scalar")(_comparison(_compare))


for _name, _call in {
    "bitwise_and": jnp.bitwise_and,
    "bitwise_or": jnp.bitwise_or,
    "bitwise_xor": jnp.bitwise_xor,
    "bitwise_left_shift": jnp.left_shift,
    "bitwise_right_shift": jnp.right_shift,
}.items():
    _names = (
        f"{_name}.Tensor",
        f"{_name}.Tensor_Scalar",
        f"{_name}.Scalar_Tensor",
        f"{_name}.Scalar",
    )
    lowers(*_names)(_of_two(_call))

lowers("__lshift__.Scalar", "__lshift__.Tensor")(_of_two(jnp.left_shift))
lowers("__rshift__.Scalar", "__rshift__.Tensor")(_of_two(jnp.right_shift))


@lowers("bitwise_not")
def bitwise_not(c: Call, x: Array) -> Array:
    return jnp.bitwise_not(x)


def _logical(call: Callable[..., Array]) -> Callable[..., Array]:
    return lambda c, *operands: call(*(to_dtype(x, np.bool_) for x in operands))


lowers("logical_and")(_logical(jnp.logical_and))
lowers("logical_or")(_logical(jnp.logical_or))
lowers("logical_xor")(_logical(jnp.logical_xor))
lowers("logical_not")(_logical(jnp.logical_not))


# -- functions of one number ---------------------------------------------------------------------


def _in_result_dtype(call: Callable[[Array], Array]) -> Callable[..., Array]:
    """Whole numbers are converted to the float dtype of the result first."""
    return lambda c, x: call(to_dtype(x, c.dtype))


def _rounded_once(call: Callable[[Array], Array]) -> Callable[..., Array]:
    """As `_in_result_dtype`; of float16 and bfloat16 in float32, in which ATen's kernels compute."""
    return lambda c, x: call(to_dtype(to_dtype(x, c.dtype), _at_least_float32(c)))


def _of_floats(call: Callable[[Array], Array]) -> Callable[..., Array]:
    """Whole numbers stay as they are."""
    return lambda c, x: call(x) if _is_float(x) else x


def _answers(on_whole: bool, call: Callable[[Array], Array]) -> Callable[..., Array]:
    """A question about floats; `on_whole` answers it for whole numbers."""
    return lambda c, x: call(x) if _is_float(x) else jnp.full(x.shape, on_whole)


for _name, _one in {
    "atan": jnp.arctan,
    "cos": jnp.cos,
    "cosh": jnp.cosh,
    "erf": lax.erf,
    "erfc": lax.erfc,
    "erfinv": lax.erf_inv,
    "exp": jnp.exp,
    "log": jnp.log,
    "log1p": jnp.log1p,
    "reciprocal": lambda x: 1 / x,
    "rsqrt": lax.rsqrt,
    "sin": jnp.sin,
    "sinh": jnp.sinh,
    "special_ndtri": jax.scipy.special.ndtri,
    "sqrt": jnp.sqrt,
    "tan": jnp.tan,
    "tanh": jnp.tanh,
}.items():
    lowers(_name)(_in_result_dtype(_one))

# XLA makes several ops of these, and rounds float16 and bfloat16 after each: up to a third of the numbers were others.
for _name, _one in {
    "acos": jnp.arccos,
    "acosh": jnp.arccosh,
    "asin": jnp.arcsin,
    "asinh": jnp.arcsinh,
    "atanh": jnp.arctanh,
    "exp2": jnp.exp2,
    "expm1": jnp.expm1,
    "i0": jax.scipy.special.i0,
    "lgamma": lax.lgamma,
    "log10": jnp.log10,
    "log2": jnp.log2,
    "sigmoid": lax.logistic,
    "special_i0e": jax.scipy.special.i0e,
    "special_i1": jax.scipy.special.i1,
    "special_i1e": jax.scipy.special.i1e,
}.items():
    lowers(_name)(_rounded_once(_one))

for _name, _one in {
    "ceil": jnp.ceil,
    "floor": jnp.floor,
    "round": jnp.round,
    "trunc": jnp.trunc,
}.items():
    lowers(_name)(_of_floats(_one))

lowers("isinf")(_answers(False, jnp.isinf))
lowers("isnan")(_answers(False, jnp.isnan))
lowers("abs")(lambda c, x: jnp.abs(x))
lowers("neg")(lambda c, x: -x)
lowers("relu")(lambda c, x: jnp.maximum(x, jnp.zeros((), x.dtype)))
lowers("conj_physical", "_conj_physical", "_conj")(lambda c, x: jnp.conj(x))
lowers("signbit")(lambda c, x: jnp.signbit(x) if _is_float(x) else x < 0)


@lowers("sign")
def sign(c: Call, x: Array) -> Array:
    if x.dtype == np.bool_:
        return x
    return (x > 0).astype(x.dtype) - (x < 0).astype(x.dtype)


@lowers("angle")
def angle(c: Call, x: Array) -> Array:
    if jnp.issubdtype(x.dtype, jnp.complexfloating):
        return jnp.angle(x)
    x = to_dtype(x, c.dtype)
    return jnp.where(jnp.isnan(x), x, jnp.angle(x))


@lowers("sgn")
def sgn(c: Call, x: Array) -> Array:
    if not jnp.issubdtype(x.dtype, jnp.complexfloating):
        return sign(c, x)
    size = jnp.abs(x)
    return jnp.where(size == 0, 0, x / jnp.where(size == 0, 1, size))


@lowers("digamma")
def digamma(c: Call, x: Array) -> Array:
    x = to_dtype(x, c.dtype)
    return jnp.where(x == 0, jnp.copysign(jnp.full_like(x, np.inf), -x), lax.digamma(x))


@lowers("round.decimals")
def round_decimals(c: Call, x: Array, *, decimals: int) -> Array:
    if not _is_float(x):
        return x
    scale = np.asarray(10.0 ** abs(decimals), x.dtype)
    return jnp.round(x * scale) / scale if decimals >= 0 else jnp.round(x / scale) * scale


@lowers("hardshrink_backward", "softshrink_backward")
def shrink_backward(c: Call, grad: Array, x: Array, limit: Any) -> Array:
    inside = (x >= -limit) & (x <= limit)
    return jnp.where(inside, jnp.zeros((), grad.dtype), grad)


@lowers("silu_backward")
def silu_backward(c: Call, grad: Array, x: Array) -> Array:
    x, grad = to_dtype(x, _at_least_float32(c)), to_dtype(grad, _at_least_float32(c))
    s = lax.logistic(x)
    return grad * s * (1 + x * (1 - s))


@lowers("mish_backward")
def mish_backward(c: Call, grad: Array, x: Array) -> Array:
    x, grad = to_dtype(x, _at_least_float32(c)), to_dtype(grad, _at_least_float32(c))
    s = lax.logistic(x)
    t = jnp.tanh(jnp.logaddexp(x, 0))
    return grad * (t + x * s * (1 - t * t))


def _at_least_float32(c: Call) -> Any:
    """The dtype in which ATen's kernels compute."""
    return c.dtype if np.dtype(c.dtype).itemsize >= 4 else np.dtype(np.float32)


@lowers("complex")
def complex_of(c: Call, real: Array, imaginary: Array) -> Array:
    return lax.complex(*jnp.broadcast_arrays(real, imaginary))
