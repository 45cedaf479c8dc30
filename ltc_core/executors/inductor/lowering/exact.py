"""Decompositions of ops whose compiled results differ from ATen's by more than rounding.

PyTorch's compiler emits `exp(x) - 1` for `expm1(x)`, `a - floor(a / b) * b` for `remainder(a, b)`, `floor(a / b)` for a
floor division; its hyperbolic functions overflow early, zeros that are not there enter its reductions of bytes, its
scaled sums of bools are integers, and the position of its smallest bool is another one.
`lower` traces with `EXACT` added to the compiler's decompositions, so it also applies inside of other decompositions. A
rule returns NotImplemented where the compiler is exact. Integer division by a possible zero runs op by op, where it
raises (`partition`).
Source: the kernels of the ops on the CPU, aten/src/ATen/native/cpu.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

__all__ = ["EXACT", "Rule", "exact_decompositions", "with_rules"]

aten = torch.ops.aten
Tensor = torch.Tensor
Rule = Callable[..., Any]

_NARROW = (torch.float16, torch.bfloat16)
_LARGE = 1e8  # above it, x * x + 1 == x * x in float64 too
_LOG_2 = math.log(2)
_ERF_TERMS = (1.0, -1 / 3, 1 / 10, -1 / 42, 1 / 216, -1 / 1320)


def _wide(dtype: torch.dtype) -> torch.dtype:
    """Dtype in which ATen's kernels compute."""
    return torch.float32 if dtype in _NARROW else dtype


def _elementwise(rule: Callable[[Tensor], Tensor]) -> Rule:
    """Rule of an op with one real operand; `rule` gets it in the dtype ATen computes in."""

    def run(x: Tensor) -> Any:
        if x.is_complex():
            return NotImplemented
        dtype = x.dtype if x.dtype.is_floating_point else torch.get_default_dtype()
        return rule(x.to(_wide(dtype))).to(dtype)

    return run


def _expm1(x: Tensor) -> Tensor:
    t = torch.tanh(x / 2)
    return torch.where(x.abs() < 1, 2 * t / (1 - t), torch.exp(x) - 1)


def _cosh(x: Tensor) -> Tensor:
    half = torch.exp(x.abs() / 2)  # exp(x) may overflow where 0.5 * exp(x) does not
    return 0.5 * half * half + 0.5 * torch.exp(-x.abs())


def _sinh(x: Tensor) -> Tensor:
    a = x.abs()
    small = _expm1(a.clamp(max=1))
    half = torch.exp(a / 2)
    large = 0.5 * half * half - 0.5 * torch.exp(-a)
    return torch.where(a < 1, 0.5 * (small + small / (small + 1)), large).copysign(x)


def _asinh(x: Tensor) -> Tensor:
    a = x.abs()
    b = a.clamp(max=_LARGE)
    small = torch.log1p(b + b * b / (1 + (b * b + 1).sqrt()))
    return torch.where(a > _LARGE, torch.log(a) + _LOG_2, small).copysign(x)


def _acosh(x: Tensor) -> Tensor:
    t = x.clamp(max=_LARGE) - 1
    small = torch.log1p(t + (2 * t + t * t).sqrt())
    result = torch.where(x > _LARGE, torch.log(x) + _LOG_2, small)
    return torch.where(x < 1, math.nan, result)


def _atanh(x: Tensor) -> Tensor:
    return 0.5 * (torch.log1p(x) - torch.log1p(-x))


def _abs(x: Tensor) -> Any:
    """Absolute value of narrow integers; the compiler's is wider, so that of the smallest one does not wrap."""
    return torch.where(x < 0, -x, x) if x.dtype in (torch.int8, torch.int16) else NotImplemented


def _of_bytes(op: torch._ops.OpOverload) -> Rule:
    """Rule of `any` or `all`, whose result is uint8 for uint8; the compiler's is bool."""

    def run(x: Tensor, *args: Any, **kwargs: Any) -> Any:
        if x.dtype is not torch.uint8:
            return NotImplemented
        return op(x.bool(), *args, **kwargs).to(torch.uint8)

    return run


def _wide_of_bytes(op: torch._ops.OpOverload) -> Rule:
    """Rule of a reduction of bytes, which computes in int32.

    The compiler fills a quarter of a vector of bytes and reduces all of it: the rest is zeros, so that the smallest of
    positive numbers, the largest of negative ones and each product is zero. The position of its smallest bool is that
    of the largest.
    """
    narrow = (torch.int8, torch.uint8, *((torch.bool,) if op in _WITH_POSITIONS else ()))

    def run(x: Tensor, *args: Any, **kwargs: Any) -> Any:
        dtype = kwargs.get("dtype") or (torch.int64 if op in _PRODUCTS else x.dtype)
        if dtype not in narrow:
            return NotImplemented
        named = {**kwargs, "dtype": torch.int32} if "dtype" in kwargs else kwargs
        wide = op(x.to(dtype).int(), *args, **named)
        if op in _POSITIONS:
            return wide
        return (wide[0].to(dtype), *wide[1:]) if isinstance(wide, tuple) else wide.to(dtype)

    return run


_inside_gelu = False


def _erf(x: Tensor) -> Any:
    """A series near zero, where the compiler's erf has an absolute error of 1e-7. Inside of GELU that is enough."""
    if _inside_gelu or x.dtype is not torch.float32:
        return NotImplemented
    near = x.clamp(-0.5, 0.5)
    square, total = near * near, torch.zeros_like(near)
    for factor in reversed(_ERF_TERMS):
        total = total * square + factor
    series = near * total * (2 / math.sqrt(math.pi))
    with _raw_erf():
        return torch.where(x.abs() < 0.5, series, torch.erf(x))


@contextlib.contextmanager
def _raw_erf() -> Iterator[None]:
    global _inside_gelu
    before, _inside_gelu = _inside_gelu, True
    try:
        yield
    finally:
        _inside_gelu = before


def _with_raw_erf(rule: Rule) -> Rule:
    def run(*args: Any, **kwargs: Any) -> Any:
        with _raw_erf():
            return rule(*args, **kwargs)

    return run


def _operands(a: Any, b: Any) -> tuple[torch.dtype, list[Tensor]] | None:
    """Dtype of the result, and both operands in the dtype ATen computes in; None for integers and complex numbers."""
    dtype = torch.result_type(a, b)
    if not dtype.is_floating_point:
        return None
    device = a.device if isinstance(a, Tensor) else b.device
    tensors = [
        t if isinstance(t, Tensor) else torch.full((), t, device=device, dtype=torch.float64)
        for t in (a, b)
    ]
    return dtype, [t.to(_wide(dtype)) for t in tensors]


def _remainder(a: Any, b: Any) -> Any:
    found = _operands(a, b)
    if found is None:
        return NotImplemented
    dtype, (x, y) = found
    x, y = x.to(dtype).to(x.dtype), y.to(dtype).to(y.dtype)  # ATen rounds a scalar first
    rest = torch.fmod(x, y)
    return torch.where((rest != 0) & ((y < 0) != (rest < 0)), rest + y, rest).to(dtype)


def _floor_divide(a: Any, b: Any) -> Any:
    found = _operands(a, b)
    if found is None:
        return NotImplemented
    dtype, (x, y) = found
    x = x.to(dtype).to(x.dtype)
    rest = torch.fmod(x, y)
    exact = (x - rest) / y
    exact = torch.where((rest != 0) & ((y < 0) != (rest < 0)), exact - 1, exact)
    whole = torch.floor(exact)
    whole = torch.where(exact - whole > 0.5, whole + 1, whole)
    plain = x / y
    whole = torch.where(exact != 0, whole, torch.zeros_like(plain).copysign(plain))
    overflows = plain.isinf() & x.isfinite()  # or a division by zero
    return torch.where(overflows | (y == 0), plain, whole).to(dtype)


def _divide(a: Any, b: Any, *, rounding_mode: str | None = None) -> Any:
    return _floor_divide(a, b) if rounding_mode == "floor" else NotImplemented


def _power(x: Tensor, exponent: Any) -> Any:
    """Power with an exponent for which ATen has a special kernel and the compiler has none."""
    if x.dtype.is_floating_point and exponent in (-0.5, -2):
        wide = x.to(_wide(x.dtype))
        result = wide.rsqrt() if exponent == -0.5 else (wide * wide).reciprocal()
        return result.to(x.dtype)
    return NotImplemented


def _power_of_number(base: Any, exponent: Tensor) -> Any:
    """Power of a number to integers: the compiler passes the number on as a float64, and gets floats."""
    dtype = torch.result_type(base, exponent)
    if dtype.is_floating_point or dtype.is_complex:
        return NotImplemented
    return torch.full((), base, dtype=dtype, device=exponent.device).pow(exponent.to(dtype))


def _add(a: Tensor, b: Tensor, *, alpha: Any = 1) -> Any:
    """A scaled sum of bools: the compiler's has integers, which it writes over the end of the result."""
    if alpha == 1 or torch.result_type(a, b) != torch.bool:
        return NotImplemented
    return a | b if alpha else a | torch.zeros_like(b)


_OF_BYTES = (
    aten.all.default, aten.all.dim, aten.all.dims, aten.any.default, aten.any.dim, aten.any.dims,
)  # fmt: skip

_POSITIONS = (aten.argmax.default, aten.argmin.default)
_WITH_POSITIONS = (aten.max.dim, aten.min.dim)
_PRODUCTS = (aten.prod.default, aten.prod.dim_int)
_EXTREMES = (
    aten.amax.default, aten.amin.default, aten.max.default, aten.min.default, *_WITH_POSITIONS,
)  # fmt: skip

EXACT: Mapping[torch._ops.OpOverload, Rule] = {
    **{op: _of_bytes(op) for op in _OF_BYTES},
    **{op: _wide_of_bytes(op) for op in (*_EXTREMES, *_POSITIONS, *_PRODUCTS)},
    aten.abs.default: _abs,
    aten.acosh.default: _elementwise(_acosh),
    aten.add.Tensor: _add,
    aten.asinh.default: _elementwise(_asinh),
    aten.atanh.default: _elementwise(_atanh),
    aten.cosh.default: _elementwise(_cosh),
    aten.div.Scalar_mode: _divide,
    aten.div.Tensor_mode: _divide,
    aten.erf.default: _erf,
    aten.expm1.default: _elementwise(_expm1),
    aten.floor_divide.default: _floor_divide,
    aten.floor_divide.Scalar: _floor_divide,
    aten.pow.Scalar: _power_of_number,
    aten.pow.Tensor_Scalar: _power,
    aten.remainder.Scalar: _remainder,
    aten.remainder.Scalar_Tensor: _remainder,
    aten.remainder.Tensor: _remainder,
    aten.sinh.default: _elementwise(_sinh),
}
_GELU = (aten.gelu.default, aten.gelu_backward.default)


def exact_decompositions(table: Mapping[Any, Rule]) -> dict[Any, Rule]:
    """The compiler's decompositions, with the rules of `EXACT` tried first."""
    whole = with_rules(EXACT, table)
    return whole | {op: _with_raw_erf(table[op]) for op in _GELU if op in table}


def with_rules(
    rules: Mapping[torch._ops.OpOverload, Rule], table: Mapping[Any, Rule]
) -> dict[Any, Rule]:
    """A table of decompositions, with some rules tried first; a rule may return NotImplemented."""
    return {**table, **{op: _or_else(rule, table.get(op)) for op, rule in rules.items()}}


def _or_else(rule: Rule, other: Rule | None) -> Rule:
    def run(*args: Any, **kwargs: Any) -> Any:
        result = rule(*args, **kwargs)
        return result if result is not NotImplemented or other is None else other(*args, **kwargs)

    return run
