"""Decompositions of ops that get a complex number: its place is taken by a tensor.

The compiler calls ATen for ops of complex tensors, and such a call takes no complex number and no empty list. `lower`
traces with these rules. A rule returns NotImplemented if its op gets no complex number; `lower` refuses an op that has
one and no rule.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from ltc_core.executors.inductor.lowering.exact import Rule

__all__ = ["COMPLEX_SCALARS"]

aten = torch.ops.aten
Tensor = torch.Tensor


def _complex_tensor(value: complex, dtype: torch.dtype, device: torch.device | None) -> Tensor:
    """0-dim tensor of a complex dtype, made of real numbers."""
    value = complex(value)
    parts = [
        torch.full((), x, dtype=dtype.to_real(), device=device) for x in (value.real, value.imag)
    ]
    return torch.complex(*parts)


def _factor(tensor: Tensor, number: Any) -> Any:
    """`number` as a factor of `tensor`: a complex one as a tensor."""
    if type(number) is not complex:
        return number
    return _complex_tensor(number, torch.result_type(tensor, number), tensor.device)


def _scaled(op: torch._ops.OpOverload) -> Rule:
    """Rule of a sum or a difference whose second operand is multiplied by `alpha`."""

    def run(a: Any, b: Any, *, alpha: Any = 1) -> Any:
        return op(a, b * _factor(b, alpha)) if type(alpha) is complex else NotImplemented

    return run


def _scaled_product(product: Callable[[Tensor, Tensor], Tensor]) -> Rule:
    """Rule of `beta * a + alpha * product(b, c)`."""

    def run(a: Tensor, b: Tensor, c: Tensor, *, beta: Any = 1, alpha: Any = 1) -> Any:
        if complex not in (type(alpha), type(beta)):
            return NotImplemented
        scaled = product(b, c) * _factor(b, alpha)
        return scaled if beta == 0 else a * _factor(a, beta) + scaled

    return run


def _plus_scaled(combine: Callable[[Tensor, Tensor], Tensor]) -> Rule:
    """Rule of `a + value * combine(b, c)`."""

    def run(a: Tensor, b: Tensor, c: Tensor, *, value: Any = 1) -> Any:
        if type(value) is not complex:
            return NotImplemented
        return a + combine(b * _factor(b, value), c)

    return run


def _of_tensors(op: torch._ops.OpOverload) -> Rule:
    """Rule of an op of a tensor and a number, in any order, by its overload for tensors."""

    def run(a: Any, b: Any) -> Any:
        if isinstance(b, complex):
            return op(a, _factor(a, b))
        return op(_factor(b, a), b) if isinstance(a, complex) else NotImplemented

    return run


def _full(size: Any, value: Any, *, dtype: Any = None, device: Any = None, **rest: Any) -> Any:
    if dtype is None:
        dtype = torch.result_type(torch.empty((), device="meta"), value)
    if not dtype.is_complex:
        return NotImplemented
    tensor = _complex_tensor(value, dtype, device)
    return tensor.expand(size).clone() if size else tensor  # it cannot pass an empty list on


def _scalar_tensor(value: Any, **options: Any) -> Any:
    return _full((), value, **options)


def _flip(x: Tensor, dims: Sequence[int]) -> Any:
    """Flip of no dim: a copy. The compiler's call of ATen gets None in place of an empty list."""
    return NotImplemented if dims else x.clone()


COMPLEX_SCALARS: Mapping[torch._ops.OpOverload, Rule] = {
    aten.add.Tensor: _scaled(aten.add.Tensor),
    aten.addcdiv.default: _plus_scaled(torch.div),
    aten.addcmul.default: _plus_scaled(torch.mul),
    aten.addmm.default: _scaled_product(torch.mm),
    aten.baddbmm.default: _scaled_product(torch.bmm),
    aten.eq.Scalar: _of_tensors(aten.eq.Tensor),
    aten.flip.default: _flip,
    aten.full.default: _full,
    aten.mul.Scalar: _of_tensors(aten.mul.Tensor),
    aten.ne.Scalar: _of_tensors(aten.ne.Tensor),
    aten.pow.Scalar: _of_tensors(aten.pow.Tensor_Tensor),
    aten.pow.Tensor_Scalar: _of_tensors(aten.pow.Tensor_Tensor),
    aten.scalar_tensor.default: _scalar_tensor,
    aten.sub.Tensor: _scaled(aten.sub.Tensor),
}
