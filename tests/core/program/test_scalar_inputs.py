"""Rules for ops whose numbers are inputs: the arithmetic of ATen, with tensors in the numbers' places."""

import math
from typing import Any

import pytest
import torch

from ltc_core.graph.ir import TensorMeta
from ltc_core.program.lowering.retrace import apply_rule
from ltc_core.program.scalar_inputs import rule_for, same_scalar, takes_scalar

aten = torch.ops.aten
DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16]


def tensors(count: int, dtype: torch.dtype, size: tuple[int, ...] = (4, 5)) -> list[torch.Tensor]:
    g = torch.Generator().manual_seed(0)
    return [torch.randn(size, generator=g).to(dtype) for _ in range(count)]


def as_tensor(number: Any) -> torch.Tensor:
    return torch.tensor(number, dtype=torch.float64 if type(number) is float else torch.int64)


CALLS: list[tuple[torch._ops.OpOverload, int, list[Any], dict[str, Any]]] = [
    (aten.add.Tensor, 2, [], {"alpha": 0.3}),
    (aten.add.Scalar, 1, [0.7], {}),
    (aten.sub.Tensor, 2, [], {"alpha": 0.3}),
    (aten.rsub.Scalar, 1, [1.5], {}),
    (aten.rsub.Tensor, 2, [], {"alpha": 2.5}),
    (aten.mul.Scalar, 1, [0.1], {}),
    (aten.mul.Tensor, 1, [0.1], {}),
    (aten.div.Scalar, 1, [3.0], {}),
    (aten.addcmul.default, 3, [], {"value": -0.01}),
    (aten.addcdiv.default, 3, [], {"value": -0.01}),
    (aten.lerp.Scalar, 2, [0.1], {}),
    (aten.lerp.Scalar, 2, [0.9], {}),
    (aten.fill.Scalar, 1, [2.5], {}),
    (aten.clamp.default, 1, [-0.5, 0.5], {}),
    (aten.clamp_min.default, 1, [0.1], {}),
    (aten.clamp_max.default, 1, [0.1], {}),
    (aten.leaky_relu.default, 1, [0.2], {}),
    (aten.leaky_relu_backward.default, 2, [0.2, False], {}),
]


def check(op: Any, args: list[Any], kwargs: dict[str, Any], dynamic: bool, **close: float) -> None:
    expected = op(*args, **kwargs)
    given = [as_tensor(a) if dynamic and type(a) in (int, float) else a for a in args]
    named = {k: as_tensor(a) if dynamic else a for k, a in kwargs.items()}
    got = apply_rule(op, given, named, TensorMeta.like(expected))
    torch.testing.assert_close(got, expected, **close)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("dynamic", [True, False])
@pytest.mark.parametrize("op, count, numbers, named", CALLS, ids=lambda v: str(v))
def test_rules_compute_as_aten_does(
    op: Any,
    count: int,
    numbers: list[Any],
    named: dict[str, Any],
    dynamic: bool,
    dtype: torch.dtype,
) -> None:
    eps = torch.finfo(dtype).eps
    check(op, tensors(count, dtype) + numbers, named, dynamic, rtol=2 * eps, atol=eps)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(
    "op, count, numbers, named",
    [
        c for c in CALLS if c[0] not in (aten.lerp.Scalar, aten.addcmul.default)
    ],  # ATen has fused multiply-add
    ids=lambda v: str(v),
)
def test_rules_round_16_bits_as_aten_does(
    op: Any,
    count: int,
    numbers: list[Any],
    named: dict[str, Any],
    dtype: torch.dtype,
) -> None:
    whole_vectors = (64, 128)  # after the last one, ATen rounds alpha * y too
    check(op, tensors(count, dtype, whole_vectors) + numbers, named, dynamic=True, rtol=0, atol=0)


def test_a_float_makes_floats_of_whole_numbers() -> None:
    x = torch.arange(6).view(2, 3)
    for op in (aten.mul.Scalar, aten.add.Scalar, aten.div.Scalar):
        check(op, [x, 2.5], {}, dynamic=True)
        check(op, [x, 2], {}, dynamic=True)


def test_numbers_in_a_masks_place() -> None:
    (x,) = tensors(1, torch.float32)
    check(aten.masked_fill.Scalar, [x, x > 0, -7.0], {}, dynamic=True)


def test_learning_rates_are_inputs_and_structure_is_not() -> None:
    assert takes_scalar(aten.add.Tensor, 0.1, varied=False)
    assert takes_scalar(aten._foreach_addcdiv_.ScalarList, 0.1, varied=False)
    assert not takes_scalar(aten.mul.Tensor, 2, varied=False)
    assert takes_scalar(aten.mul.Tensor, 2, varied=True)
    assert not takes_scalar(aten.pow.Tensor_Scalar, 2.0, varied=True)
    assert not takes_scalar(aten.masked_fill.Scalar, float("-inf"), varied=False)
    assert not takes_scalar(aten.mul.Tensor, 1j, varied=True)
    assert takes_scalar(aten._fused_sgd_.default, 0.1, varied=False)
    assert rule_for(aten.div.Tensor_mode) is None


@pytest.mark.parametrize(
    ("a", "b", "same"),
    [(1, 1, True), (1, 1.0, False), (1, True, False), (0.0, -0.0, False), (-0.0, -0.0, True),
     (math.nan, math.nan, True), (0, 0, True), (2.0, 3.0, False), (0j, complex(0.0, -0.0), False)],
)  # fmt: skip
def test_same_scalar(a: Any, b: Any, same: bool) -> None:
    assert same_scalar(a, b) is same
