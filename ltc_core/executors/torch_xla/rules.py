"""Rules for the ops that torch_xla lowers wrongly: what is traced instead.

A rule takes the arguments of its op. If a call cannot be expressed in other ops, the rule raises `_Wrong`, and the call
runs on the host. The comments in `RULES` say what torch_xla does wrong. Used by `lowering`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch._decomp import decomposition_table

__all__ = ["RULES"]

aten = torch.ops.aten
Tensor = torch.Tensor
_Op = torch._ops.OpOverload


class _Wrong(Exception):
    """A call that torch_xla would lower wrongly."""


def _unless(op: _Op, is_wrong: Callable[[dict[str, Any]], bool], why: str) -> Callable[..., Any]:
    """Rule that calls `op`, or raises `_Wrong` if `is_wrong` is true of its arguments."""
    names = [argument.name for argument in op._schema.arguments]

    def run(*args: Any, **kwargs: Any) -> Any:
        if is_wrong({**dict(zip(names, args, strict=False)), **kwargs}):
            raise _Wrong(why)
        return op(*args, **kwargs)

    return run


def _in_place(rule: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def run(x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        return x.copy_(rule(x, *args, **kwargs))

    return run


def _has_divisor(given: dict[str, Any]) -> bool:
    return given.get("divisor_override") is not None


def _has_other_scale(given: dict[str, Any]) -> bool:
    """Whether an image is scaled by another factor than the ratio of the sizes."""
    x = given.get("self")
    sizes = given["input_size"] if x is None else x.shape
    pairs = zip(given["output_size"], sizes[2:], strict=True)
    scales = (given.get("scales_h"), given.get("scales_w"))
    return any(s is not None and s * n != out for (out, n), s in zip(pairs, scales, strict=True))


def _upsample_nearest2d(x: Tensor, output_size: Any, *scales: Any, **named: Any) -> Any:
    op = aten.upsample_nearest2d.default
    if _has_other_scale(
        {
            "self": x,
            "output_size": output_size,
            **dict(zip(("scales_h", "scales_w"), scales, strict=False)),
            **named,
        }
    ):
        return decomposition_table[op](x, output_size, *scales, **named)
    return op(x, output_size, *scales, **named)


def _native_batch_norm_backward(
    grad: Tensor,
    x: Tensor,
    weight: Any,
    mean: Any,
    var: Any,
    save_mean: Any,
    save_rstd: Any,
    train: bool,
    eps: float,
    mask: Any,
) -> Any:
    op = aten.native_batch_norm_backward.default
    call = op if train else decomposition_table[op]
    return call(grad, x, weight, mean, var, save_mean, save_rstd, train, eps, mask)


def _divide(x: Any, y: Any, rounding_mode: str | None = None) -> Any:
    """Division, exact for integers: each round divides the rest as float32, which leaves an error of 1 in 2**23."""
    operands = [t for t in (x, y) if isinstance(t, Tensor)]
    dtype = torch.result_type(x, y)
    if rounding_mode is None or dtype.is_floating_point or dtype is torch.bool:
        return torch.div(x, y, rounding_mode=rounding_mode)
    rest = torch.remainder(x, y) if rounding_mode == "floor" else torch.fmod(x, y)
    rest = x - rest
    quotient = torch.zeros_like(rest, device=operands[0].device)
    for _ in range(-(-dtype.itemsize * 8 // 23)):
        step = torch.round(rest / y).to(dtype)
        quotient = quotient + step
        rest = rest - step * y
    return quotient


def _floor_divide(x: Any, y: Any) -> Any:
    return _divide(x, y, rounding_mode="floor")


def _power(x: Any, exponent: Any) -> Any:
    result = torch.pow(x, exponent)
    if result.is_floating_point() or result.is_complex():
        return result
    if not isinstance(exponent, Tensor):  # PyTorch refuses negative integer scalars
        return result
    is_odd = (exponent % 2) != 0
    sign = torch.where(is_odd, -1, 1)
    of_negative = torch.where(
        torch.as_tensor(x == 1, device=exponent.device),
        1,
        torch.where(torch.as_tensor(x == -1, device=exponent.device), sign, 0),
    )
    return torch.where(exponent < 0, of_negative.to(result.dtype), result)


def _strided_places(x: Tensor, size: Any, stride: Any, offset: int | None) -> Tensor:
    """Position of each element of a strided view in the packed tensor."""
    at = torch.full((), offset or 0, dtype=torch.int64, device=x.device)
    for n, step in zip(size, stride, strict=True):
        at = at.unsqueeze(-1) + torch.arange(n, device=x.device) * step
    return at


def _as_strided(x: Tensor, size: Any, stride: Any, storage_offset: int | None = None) -> Tensor:
    places = _strided_places(x, size, stride, storage_offset)
    return x.reshape(-1).index_select(0, places.reshape(-1)).reshape(places.shape)


def _as_strided_scatter(
    x: Tensor, src: Tensor, size: Any, stride: Any, storage_offset: int | None = None
) -> Tensor:
    places = _strided_places(x, size, stride, storage_offset)
    return x.reshape(-1).scatter(0, places.reshape(-1), src.reshape(-1)).reshape(x.shape)


def _diagonal_places(x: Tensor, offset: int, dim1: int, dim2: int) -> tuple[Tensor, Tensor]:
    """`x` with the matrices flattened into the last dim, and the positions of the diagonal there."""
    rows, columns = x.shape[dim1], x.shape[dim2]
    first_row, first_column = max(-offset, 0), max(offset, 0)
    count = max(min(rows - first_row, columns - first_column), 0)
    places = torch.arange(count, device=x.device) * (columns + 1)
    return x.movedim((dim1, dim2), (-2, -1)).flatten(
        -2
    ), places + first_row * columns + first_column


def _diagonal(x: Tensor, offset: int = 0, dim1: int = 0, dim2: int = 1) -> Tensor:
    flat, places = _diagonal_places(x, offset, dim1, dim2)
    return flat.index_select(-1, places)


def _diagonal_scatter(
    x: Tensor, src: Tensor, offset: int = 0, dim1: int = 0, dim2: int = 1
) -> Tensor:
    flat, places = _diagonal_places(x, offset, dim1, dim2)
    matrix = x.movedim((dim1, dim2), (-2, -1)).shape
    return flat.index_copy(-1, places, src).reshape(matrix).movedim((-2, -1), (dim1, dim2))


def _diagonal_backward(
    grad: Tensor, input_sizes: Sequence[int], offset: int, dim1: int, dim2: int
) -> Tensor:
    return _diagonal_scatter(grad.new_zeros(input_sizes), grad, offset, dim1, dim2)


def _unfold(x: Tensor, dimension: int, size: int, step: int) -> Tensor:
    if x.dim() == 0:
        return x.reshape(1)[:size]
    dim = dimension % x.dim()
    starts = torch.arange((x.shape[dim] - size) // step + 1, device=x.device) * step
    places = starts.unsqueeze(1) + torch.arange(size, device=x.device)
    windows = x.index_select(dim, places.reshape(-1))
    windows = windows.reshape(*x.shape[:dim], *places.shape, *x.shape[dim + 1 :])
    return windows.movedim(dim + 1, -1)


def _index_put(
    x: Tensor, indices: Sequence[Tensor | None], values: Tensor, accumulate: bool = False
) -> Tensor:
    """Write one value under a mask, by `where`. Several values need indices, whose number only the device knows."""
    if len(indices) == 1 and not accumulate and values.numel() == 1:
        (mask,) = indices
        if mask is not None and mask.dtype is torch.bool:
            mask = mask.reshape(*mask.shape, *[1] * (x.dim() - mask.dim()))
            return torch.where(mask, values.reshape(()), x)
    return aten.index_put.default(x, indices, values, accumulate)  # type: ignore[no-any-return]


def _nll_loss(op: _Op) -> Callable[..., Any]:
    """torch_xla's lowering of one sample without a batch dim ends the process."""
    return _unless(op, lambda given: given["self"].dim() == 1, "it has no batch")


def _of_extreme_power(given: dict[str, Any]) -> bool:
    return given["p"] in (0, float("inf"))


_DIVISOR = "it ignores divisor_override"
_SCALE = "it takes the ratio of the sizes for the scale"
RULES: dict[_Op, Callable[..., Any]] = {
    # It is not lowered. Without this row, the first trace with it would learn that at the cost of one more program.
    aten.native_layer_norm_backward.default: decomposition_table[
        aten.native_layer_norm_backward.default
    ],
    # With is_result=True, it takes the result for the operand.
    aten.elu_backward.default: decomposition_table[aten.elu_backward.default],
    # In eval mode, it uses the mean and variance of the batch instead of the running ones.
    aten.native_batch_norm_backward.default: _native_batch_norm_backward,
    # Of a view, it strides over the whole tensor; with dense strides in another order it addresses other elements.
    aten.as_strided.default: _as_strided,
    aten.as_strided_scatter.default: _as_strided_scatter,
    # Wrong for the first two of more than two dims.
    aten.diagonal.default: _diagonal,
    aten.diagonal_scatter.default: _diagonal_scatter,
    aten.diagonal_backward.default: _diagonal_backward,
    # Wrong for a view of a view.
    aten.unfold.default: _unfold,
    # With a mask it runs on the host, even if it writes one value.
    aten.index_put.default: _index_put,
    aten.index_put_.default: _in_place(_index_put),
    # It divides integers as float32.
    aten.div.Tensor_mode: _divide,
    aten.div.Scalar_mode: _divide,
    aten.div_.Tensor_mode: _in_place(_divide),
    aten.div_.Scalar_mode: _in_place(_divide),
    aten.floor_divide.default: _floor_divide,
    aten.floor_divide.Scalar: _floor_divide,
    aten.floor_divide_.Tensor: _in_place(_floor_divide),
    aten.floor_divide_.Scalar: _in_place(_floor_divide),
    # It divides instead of shifting, which rounds negative numbers up.
    aten.__rshift__.Tensor: torch.bitwise_right_shift,
    aten.__rshift__.Scalar: torch.bitwise_right_shift,
    aten.__irshift__.Tensor: _in_place(torch.bitwise_right_shift),
    aten.__irshift__.Scalar: _in_place(torch.bitwise_right_shift),
    # It returns 0 for -1 to a negative integer power.
    aten.pow.Tensor_Tensor: _power,
    aten.pow.Scalar: _power,
    aten.pow_.Tensor: _in_place(_power),
    aten.upsample_nearest2d.default: _upsample_nearest2d,
    aten.upsample_nearest2d_backward.default: _unless(
        aten.upsample_nearest2d_backward.default, _has_other_scale, _SCALE
    ),
    aten.nll_loss_forward.default: _nll_loss(aten.nll_loss_forward.default),
    aten.nll_loss_backward.default: _nll_loss(aten.nll_loss_backward.default),
    aten.roll.default: _unless(
        aten.roll.default,
        lambda given: given["self"].numel() == 0,
        "a division by zero ends the process",
    ),
    aten._chunk_cat.default: _unless(
        aten._chunk_cat.default,
        lambda given: True,
        "it gives zeros, or what was in the memory before",
    ),
    aten._pdist_forward.default: _unless(
        aten._pdist_forward.default, _of_extreme_power, "it does not know these norms"
    ),
    **{
        op: _unless(op, _has_divisor, _DIVISOR)
        for op in (
            aten.avg_pool2d.default,
            aten.avg_pool2d_backward.default,
            aten.avg_pool3d.default,
            aten.avg_pool3d_backward.default,
        )
    },
}
