"""Ops that the compiler gets wrong, as other ops: each rule gives what eager gives, at extremes too.

The rules are run by eager PyTorch; the compiler's C++ is not.
"""

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from ltc_core.executors.inductor.lowering.exact import EXACT, exact_decompositions

aten = torch.ops.aten
INF, NAN = math.inf, math.nan
NUMBERS = (0.3, -0.3, 2.0, -2.5, 3, INF, -INF, NAN, 0.0)
VALUES = (
    0.0, 1e-30, 1e-8, 1e-6, 1e-3, 0.1, 0.3, 0.5, 0.9999, 1.0, 1.5, 2.0, 2.5, 3.0, 10.0, 20.0, 87.0, 88.0, 100.0,
    711.0, 1e10, 2.0**31, 1e15, 1e20, 1e30, 3e38, INF,
)  # fmt: skip


def values(dtype: torch.dtype) -> Tensor:
    return torch.tensor([*VALUES, *(-v for v in VALUES), NAN], dtype=torch.float64).to(dtype)


def calls(op: torch._ops.OpOverload, dtype: torch.dtype) -> list[tuple[tuple[Any, ...], Any]]:
    """The arguments of an op's test, by what it takes."""
    x = values(dtype)
    named = {"rounding_mode": "floor"} if op._opname == "div" else {}
    if op is aten.pow.Tensor_Scalar:
        return [((x, -0.5), {}), ((x, -2), {})]
    if op is aten.pow.Scalar:
        return [((2, x), {})]
    if op in (*_OF_INTEGERS, *_REDUCTIONS):
        return [((x, *_DIMS[op._overloadname]), {})]
    taken = [a.name for a in op._schema.arguments if not a.kwarg_only]
    if len(taken) == 1:
        return [((x,), {})]
    if op._overloadname == "Scalar_Tensor":
        return [((number, x), named) for number in NUMBERS]
    if "Scalar" in op._overloadname:
        return [((x, number), named) for number in NUMBERS]
    return [((x.repeat_interleave(len(x)), x.repeat(len(x))), named)]


def assert_close(got: Tensor, expected: Tensor) -> None:
    """Equal but for rounding, relative to the value: also near zero. Eager's own cosh of 89 may be infinite."""
    eps = torch.finfo(expected.dtype).eps
    assert got.dtype is expected.dtype
    torch.testing.assert_close(got, expected, rtol=16 * eps, atol=1e-37, equal_nan=True)


_OF_INTEGERS = [op for op in EXACT if op._opname in ("abs", "all", "any")]
_REDUCTIONS = [
    op for op in EXACT if op._opname in ("amax", "amin", "argmax", "argmin", "max", "min", "prod")
]
_DIMS: dict[str, tuple[Any, ...]] = {"default": (), "dim": (0,), "dim_int": (0,), "dims": ([0],)}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("op", [op for op in EXACT if op is not aten.add.Tensor], ids=str)
def test_a_rule_gives_what_eager_gives(op: torch._ops.OpOverload, dtype: torch.dtype) -> None:
    for args, named in calls(op, dtype):
        got = EXACT[op](*args, **named)
        if got is NotImplemented:
            left = (*_OF_INTEGERS, *_REDUCTIONS, aten.pow.Scalar)
            assert op in left or op is aten.erf.default and dtype is not torch.float32
        else:
            assert_close(got, op(*args, **named))


def test_whole_numbers_are_left_to_the_compiler() -> None:
    x = torch.arange(1, 5)
    assert EXACT[aten.remainder.Tensor](x, x) is NotImplemented
    assert EXACT[aten.div.Tensor_mode](x, x, rounding_mode="floor") is NotImplemented
    assert EXACT[aten.div.Tensor_mode](x.float(), x, rounding_mode="trunc") is NotImplemented


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int8, torch.int16], ids=str)
@pytest.mark.parametrize("op", _OF_INTEGERS, ids=str)
def test_rules_of_narrow_integers(op: torch._ops.OpOverload, dtype: torch.dtype) -> None:
    x = torch.tensor([[0, 1, 3], [7, torch.iinfo(dtype).min, torch.iinfo(dtype).max]], dtype=dtype)
    args = _DIMS[op._overloadname]
    got, expected = EXACT[op](x, *args), op(x, *args)
    if (dtype is torch.uint8) is (op._opname == "abs"):
        assert got is NotImplemented
    else:
        assert got.dtype is expected.dtype and torch.equal(got, expected)


@pytest.mark.parametrize("dtype", [torch.bool, torch.uint8, torch.int16, torch.int64], ids=str)
def test_a_number_to_the_power_of_integers_is_an_integer(dtype: torch.dtype) -> None:
    exponents = torch.tensor([0, 1, 3, 0]).to(dtype)
    for base in (2, -3) if dtype is torch.bool else (2, -3, True):
        got, expected = EXACT[aten.pow.Scalar](base, exponents), torch.pow(base, exponents)
        assert got.dtype is expected.dtype and torch.equal(got, expected)
    assert EXACT[aten.pow.Scalar](2.5, exponents) is NotImplemented


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int8, torch.int16], ids=str)
@pytest.mark.parametrize("op", _REDUCTIONS, ids=str)
def test_reductions_of_bytes(op: torch._ops.OpOverload, dtype: torch.dtype) -> None:
    x = torch.tensor([[1, 3, 5], [7, 9, 11]], dtype=dtype)
    args = (x, *_DIMS[op._overloadname])
    named = {"dtype": dtype} if op._opname == "prod" else {}
    got, expected = EXACT[op](*args, **named), op(*args, **named)
    if dtype is torch.int16:
        assert got is NotImplemented
        return
    pairs = zip(got, expected, strict=True) if isinstance(got, tuple) else [(got, expected)]
    assert all(a.dtype is b.dtype and torch.equal(a, b) for a, b in pairs)


@pytest.mark.parametrize("alpha", [0, 1, 2, -1])
def test_scaled_sums_of_bools(alpha: int) -> None:
    x = torch.tensor([[True, False, True, False]])
    y = torch.tensor([[True], [False]])
    for a, b in ((x, y), (y, x), (x, x)):
        expected = torch.add(a, b, alpha=alpha)
        got = EXACT[aten.add.Tensor](a, b, alpha=alpha)
        assert got is NotImplemented if alpha == 1 else got.equal(expected)
    assert EXACT[aten.add.Tensor](x, y.long(), alpha=alpha) is NotImplemented


def test_gelu_keeps_the_compilers_erf() -> None:
    """It is called once for each activation, and adds the error to 1."""
    seen = []

    def gelu(x: Tensor) -> Tensor:
        seen.append(table[aten.erf.default](x))
        return x

    table = exact_decompositions({aten.gelu.default: gelu})
    table[aten.gelu.default](torch.ones(2))
    assert seen == [NotImplemented]
    assert table[aten.erf.default](torch.ones(2)) is not NotImplemented
