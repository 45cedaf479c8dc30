"""Errors of ops in torch_xla's words: scripts and tests match them.

In: an op and its arguments, after eager PyTorch has refused the call. Out: torch_xla's text, or None where it says what
PyTorch says. `ltc_core.ops.fallback` raises it as a RuntimeError, as all errors of torch_xla's ops are; the user's line
and the advice are notes of the error.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from ltc_core.ops.fallback import word_errors
from ltc_dist.compat.xla_text import shape_text

__all__ = ["register"]

Arguments = Mapping[str, Any]
Tensor = torch.Tensor


def register() -> None:
    """Word the errors of ops as torch_xla does."""
    word_errors(_worded)


def _worded(name: str, given: Arguments) -> str | None:
    rule = _RULES.get(name.removesuffix("_")) or _RULES.get(name)
    return _broadcast(given) if rule is None else rule(given)


def _broadcast(given: Arguments) -> str | None:
    """The text of an op on two tensors (`self` and `other`) whose sizes do not fit."""
    a, b = given.get("self"), given.get("other")
    if not isinstance(a, Tensor) or not isinstance(b, Tensor):
        return None
    for from_end in range(min(a.dim(), b.dim()), 0, -1):
        p, q = a.dim() - from_end, b.dim() - from_end
        if a.shape[p] != b.shape[q] and 1 not in (a.shape[p], b.shape[q]):
            left, right = shape_text(a), shape_text(b)
            return (
                f"Shapes are not compatible for broadcasting: {left} vs. {right}. Expected dimension {p} of shape "
                f"{left} "
                f"({a.shape[p]}) to match dimension {q} of shape {right} ({b.shape[q]}). Either that or that any of "
                "them is either 1 or unbounded. Try reshaping one of the tensors to match the other."
            )
    return None


def _cat(given: Arguments) -> str | None:
    first, *others = [t for t in given["tensors"] if t.shape != (0,)] or [torch.empty(0)]
    dim = given.get("dim", 0) % max(first.dim(), 1)
    for t in others:
        rest = [list(s.shape[:dim]) + list(s.shape[dim + 1 :]) for s in (t, first)]
        if t.dim() != first.dim() or rest[0] != rest[1]:
            return (
                f"cat(): cannot concatenate tensors of shape {shape_text(t)} with {shape_text(first)} at dimension "
                f"{dim}. Expected shapes to be equal (except at dimension "
                f"{dim}) or that either of them was a 1D empty tensor of size (0,)."
            )
    return None


def _div(given: Arguments) -> str | None:
    mode = given.get("rounding_mode")
    if mode in (None, "trunc", "floor"):
        return _broadcast(given)
    return f"div(): invalid rounding mode `{mode}`. Expected it to be either 'trunc', 'floor', or be left unspecified."


def _flip(given: Arguments) -> str | None:
    num_dims, dims = given["self"].dim(), given["dims"]
    for dim in dims:
        if not -num_dims <= dim < num_dims:
            return f"Value out of range (expected to be in range of [{-num_dims}, {num_dims - 1}], but got {dim})"
    counts = Counter(dim % num_dims for dim in dims)
    if len(counts) == len(dims):
        return None
    found = ", ".join(f"{dim} ({n} times)" for dim, n in sorted(counts.items()) if n > 1)
    return (
        f"flip(): expected each dimension to appear at most once. Found dimensions: {found}. Consider changing dims "
        f"from {list(dims)} to {sorted(counts)}."
    )


def _full(given: Arguments) -> str | None:
    size = list(given["size"])
    if all(n >= 0 for n in size):
        return None
    return (
        "full(): expected concrete sizes (i.e. non-symbolic) to be positive values. However found negative ones: "
        f"{size}."
    )


def _gather(given: Arguments) -> str | None:
    x, index = given["self"], given["index"]
    if x.dim() != index.dim():
        return f"gather(): expected rank of input ({x.dim()}) and index ({index.dim()}) tensors to be the same."
    dim = given["dim"] % max(x.dim(), 1)
    wrong = [d for d in range(x.dim()) if d != dim and index.shape[d] > x.shape[d]]
    if not wrong:
        return None
    return (
        f"gather(): expected sizes of index {list(index.shape)} to be smaller or equal those of input {list(x.shape)} "
        f"on all dimensions, except on dimension {dim}. However, that's not true on dimensions {wrong}."
    )


def _random(given: Arguments) -> str | None:
    low, high, dtype = given.get("from", 0), given.get("to"), given["self"].dtype
    if high is None:
        return None
    if low >= high:
        return f"random_(): expected `from` ({low}) to be smaller than `to` ({high})."
    limits = torch.finfo(dtype) if dtype.is_floating_point else torch.iinfo(dtype)
    for name, value in (("from", low), ("to", high - 1)):
        if not limits.min <= value <= limits.max:
            side = "lower" if value < limits.min else "upper"
            than = "smaller" if value < limits.min else "greater"
            return (
                f"random_(): expected `{name}` to be within the range [{int(limits.min)}, {int(limits.max)}]. However "
                f"got value {value}, which is {than} than the {side} bound."
            )
    return None


def _uniform(given: Arguments) -> str | None:
    low, high = given.get("from", 0.0), given.get("to", 1.0)
    return None if low <= high else f"uniform_(): expected `from` ({low:g}) <= `to` ({high:g})."


def _mm(given: Arguments) -> str | None:
    a, b = given["self"], given["mat2"]
    for which, t in (("first", a), ("second", b)):
        if t.dim() != 2:
            return f"mm(): expected the {which} input tensor {shape_text(t)} to be a matrix (i.e. a 2D tensor)."
    if a.shape[1] == b.shape[0]:
        return None
    return (
        f"mm(): cannot matrix-multiply tensors {shape_text(a)} and {shape_text(b)}. Expected the size of dimension 1 "
        f"of the first input tensor ({a.shape[1]}) to be equal the size of dimension 0 of the second input tensor "
        f"({b.shape[0]})."
    )


def _of_batches(
    op: str, names: Sequence[str], places: Sequence[str]
) -> Callable[[Arguments], str | None]:
    """The rule of an op on two batches of matrices.

    Args:
        names: of the two arguments in PyTorch's schema; torch_xla calls `self` `input`.
        places: of the two among the op's tensors, as '1st'.
    """
    shown = ["input" if name == "self" else name for name in names]

    def rule(given: Arguments) -> str | None:
        pair = [given[name] for name in names]
        a, b = pair
        for t, name, place in zip(pair, shown, places, strict=True):
            if t.dim() != 3:
                return (
                    f"{op}(): expected `{name}` {shape_text(t)} (a {t.dim()}D tensor), the {place} input tensor, to "
                    f"be a 3D tensor."
                )
        first, second = (f"`{name}` {shape_text(t)}" for t, name in zip(pair, shown, strict=True))
        if a.shape[0] != b.shape[0]:
            return (
                f"{op}(): expected the size of the batch dimension (i.e. dimension 0) of {first} (batch dimension "
                f"size: "
                f"{a.shape[0]}), the {places[0]} input tensor, to be the same as the size of the batch dimension of "
                f"{second} (batch dimension size: {b.shape[0]}), the {places[1]} input tensor."
            )
        if a.shape[2] == b.shape[1]:
            return None
        return (
            f"{op}(): cannot apply batch matrix-multiplication to {first}, the {places[0]} input tensor, and to "
            f"{second}, "
            f"the {places[1]} input tensor. Expected the size of dimension 2 of `{shown[0]}` ({a.shape[2]}) to be "
            f"equal the size of dimension 1 of `{shown[1]}` ({b.shape[1]})."
        )

    return rule


def _roll(given: Arguments) -> str | None:
    shifts, dims = list(given["shifts"]), list(given.get("dims", ()))
    if not shifts:
        return "roll(): expected `shifts` to have at least 1 element."
    if not dims and len(shifts) != 1:
        return (
            f"roll(): expected `shifts` {shifts} (size={len(shifts)}) to have exactly 1 element "
            f"when `dims` is empty."
        )
    if dims and len(dims) != len(shifts):
        return (
            f"roll(): expected `dims` {dims} (size={len(dims)}) to match the size of `shifts` {shifts} "
            f"(size={len(shifts)})."
        )
    return None


def _trace(given: Arguments) -> str | None:
    if given["self"].dim() == 2:
        return None
    return f"trace(): expected the input tensor {shape_text(given['self'])} to be a matrix (i.e. a 2D tensor)."


def _clamp(given: Arguments) -> str | None:
    if given.get("min") is not None or given.get("max") is not None:
        return None
    return "clamp(): expected at least one of `min` or `max` arguments to be specified."


def _pool(num_dims: int) -> Callable[[Arguments], str | None]:
    def rule(given: Arguments) -> str | None:
        for name in ("kernel_size", "stride", "padding"):
            value = list(given.get(name, ()))
            is_whole = len(value) in (1, num_dims) or (name == "stride" and not value)
            if name in given and not is_whole:
                return (
                    f"avg_pool{num_dims}d(): expected argument {name} {value} (size: {len(value)}) to have size of "
                    f"{num_dims}."
                )
        return None

    return rule


def _expand(given: Arguments) -> str | None:
    x, sizes = given["self"], list(given["size"])
    if x.dim() > len(sizes):
        return (
            f"expand(): expected the `input` tensor {shape_text(x)} (rank: {x.dim()}) to have a rank smaller or equal "
            f"to the given `sizes` {sizes} (rank: {len(sizes)})."
        )
    first = len(sizes) - x.dim()
    for dim, n in enumerate(x.shape):
        wanted = sizes[first + dim]
        if n != 1 and wanted not in (-1, n):
            return (
                f"expand(): expected dimension {first + dim} of the given `sizes` {sizes} ({wanted}) to be -1, or "
                f"equal to the size of the `input` tensor {shape_text(x)} at dimension {dim} ({n})."
            )
    return None


def _of_elements(op: str) -> Callable[[Arguments], str | None]:
    """PyTorch's text, where PyTorch raises an IndexError."""

    def rule(given: Arguments) -> str | None:
        x, dim = given["self"], given.get("dim")
        if type(dim) is int and x.numel() == 0 and -x.dim() <= dim < x.dim() and not x.shape[dim]:
            return f"{op}(): Expected reduction dim {dim % x.dim()} to have non-zero size."
        return _broadcast(given)

    return rule


_RULES: dict[str, Callable[[Arguments], str | None]] = {
    "avg_pool2d": _pool(2),
    "avg_pool3d": _pool(3),
    "baddbmm": _of_batches("baddbmm", ("batch1", "batch2"), ("2nd", "3rd")),
    "bmm": _of_batches("bmm", ("self", "mat2"), ("1st", "2nd")),
    "cat": _cat,
    "clamp": _clamp,
    "div": _div,
    "expand": _expand,
    "flip": _flip,
    "full": _full,
    "gather": _gather,
    "max": _of_elements("max"),
    "min": _of_elements("min"),
    "mm": _mm,
    "random": _random,
    "roll": _roll,
    "trace": _trace,
    "uniform": _uniform,
}
