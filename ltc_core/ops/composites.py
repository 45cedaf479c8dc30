"""Ops that are recorded as other ops: those without a CPU kernel, and draws without a generator argument.

Each rule takes the op's arguments and makes ATen calls, which are recorded. The draws follow eager's CPU kernels, so
that the same seed gives the same numbers.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch

from ltc_core.ops.packed_sequence import (
    pack_padded_sequence,
    pack_padded_sequence_backward,
    pad_packed_sequence,
)
from ltc_core.ops.synced_batch_norm import (
    batch_norm_backward_elemt,
    batch_norm_backward_reduce,
    batch_norm_elemt,
    batch_norm_gather_stats_with_counts,
    batch_norm_stats,
)
from ltc_core.tensor.handles import Cell, base_of
from ltc_core.tensor.lazy_tensor import LazyTensor

__all__ = ["RULES", "RULE_MAKERS"]

aten = torch.ops.aten
Tensor = torch.Tensor
_random_from = getattr(aten.random_, "from")


def native_dropout(x: Tensor, p: float, train: bool | None) -> tuple[Tensor, Tensor]:
    """Zero elements with probability `p`, scale the others by 1 / (1 - p); gives (output, mask)."""
    if train is False:
        return x.clone(), torch.ones_like(x, dtype=torch.bool)
    if not x.dtype.is_floating_point:  # eager's error
        aten.dropout.default(torch.ones(1, dtype=x.dtype), p, True)
    keep = 1.0 - p
    mask = aten.bernoulli_.float(aten.empty_like.default(x, dtype=torch.bool), keep)
    scale = 0.0 if keep == 0 else 1.0 / keep
    return x * mask * scale, mask


def fused_dropout(
    x: Tensor, keep: float, generator: torch.Generator | None = None
) -> tuple[Tensor, Tensor]:
    mask = aten.bernoulli_.float(
        aten.empty_like.default(x, dtype=torch.uint8), keep, generator=generator
    )
    return x * mask * (1.0 / keep), mask


def _like(x: Tensor, kwargs: dict[str, Any]) -> Tensor:
    return aten.empty_like.default(x, **{k: v for k, v in kwargs.items() if k != "generator"})  # type: ignore[no-any-return]


def rand_like(x: Tensor, **kwargs: Any) -> Tensor:
    return aten.uniform_.default(_like(x, kwargs), generator=kwargs.get("generator"))  # type: ignore[no-any-return]


def randn_like(x: Tensor, **kwargs: Any) -> Tensor:
    return aten.normal_.default(_like(x, kwargs), generator=kwargs.get("generator"))  # type: ignore[no-any-return]


def randint_like_low(x: Tensor, low: int, high: int, **kwargs: Any) -> Tensor:
    return _random_from(_like(x, kwargs), low, high, generator=kwargs.get("generator"))  # type: ignore[no-any-return]


def randint_like(x: Tensor, high: Any, **kwargs: Any) -> Tensor:
    return _random_from(_like(x, kwargs), 0, int(high), generator=kwargs.get("generator"))  # type: ignore[no-any-return]


def fused_lstm_cell(
    input_gates: Tensor,
    hidden_gates: Tensor,
    cx: Tensor,
    input_bias: Any = None,
    hidden_bias: Any = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """One LSTM step from the two products; gives (hy, cy, workspace) with the activated gates as workspace."""
    gates = input_gates + hidden_gates
    if input_bias is not None:
        gates = gates + input_bias + hidden_bias
    i, f, g, o = gates.chunk(4, 1)
    i, f, g, o = i.sigmoid(), f.sigmoid(), g.tanh(), o.sigmoid()
    cy = f * cx + i * g
    return o * cy.tanh(), cy, torch.cat([i, f, g, o], 1)


def fused_lstm_cell_backward(
    grad_hy: Any, grad_cy: Any, cx: Tensor, cy: Tensor, workspace: Tensor, has_bias: bool
) -> tuple[Any, Any, Any]:
    """Gradients of `fused_lstm_cell`: (of the gates, of cx, of the bias)."""
    i, f, g, o = workspace.chunk(4, 1)
    tanh_cy = cy.tanh()
    grad_hy = torch.zeros_like(cy) if grad_hy is None else grad_hy
    total = grad_hy * o * (1 - tanh_cy * tanh_cy)
    if grad_cy is not None:
        total = total + grad_cy
    grad_gates = torch.cat(
        [
            total * g * i * (1 - i),
            total * cx * f * (1 - f),
            total * i * (1 - g * g),
            grad_hy * tanh_cy * o * (1 - o),
        ],
        1,
    )
    return grad_gates, total * f, grad_gates.sum(0) if has_bias else None


def fused_gru_cell(
    input_gates: Tensor,
    hidden_gates: Tensor,
    hx: Tensor,
    input_bias: Any = None,
    hidden_bias: Any = None,
) -> tuple[Tensor, Tensor]:
    """One GRU step from the two products; gives (hy, workspace)."""
    if input_bias is not None:
        input_gates, hidden_gates = input_gates + input_bias, hidden_gates + hidden_bias
    ir, ii, inn = input_gates.chunk(3, 1)
    hr, hi, hn = hidden_gates.chunk(3, 1)
    r, z = (ir + hr).sigmoid(), (ii + hi).sigmoid()
    n = (inn + r * hn).tanh()
    return (hx - n) * z + n, torch.cat([r, z, n, hx, hn], 1)


def fused_gru_cell_backward(grad_hy: Tensor, workspace: Tensor, has_bias: bool) -> tuple[Any, ...]:
    """Gradients of `fused_gru_cell`: (input gates, hidden gates, hx, input bias, hidden bias)."""
    r, z, n, hx, hn = workspace.chunk(5, 1)
    grad_n = grad_hy * (1 - z) * (1 - n * n)
    grad_z = grad_hy * (hx - n) * z * (1 - z)
    grad_hn = grad_n * r
    grad_r = grad_n * hn * r * (1 - r)
    grad_input = torch.cat([grad_r, grad_z, grad_n], 1)
    grad_hidden = torch.cat([grad_r, grad_z, grad_hn], 1)
    biases = (grad_input.sum(0), grad_hidden.sum(0)) if has_bias else (None, None)
    return (grad_input, grad_hidden, grad_hy * z, *biases)


def ctc_loss(
    log_probs: Tensor,
    targets: Tensor,
    input_lengths: Tensor,
    target_lengths: Tensor,
    blank: int = 0,
    reduction: int = 1,
    zero_infinity: bool = False,
) -> Tensor:
    """Lengths as Python numbers: they may be on the CPU for every device, where reading them costs nothing."""
    lengths = (input_lengths.reshape(-1).tolist(), target_lengths.reshape(-1).tolist())
    return aten.ctc_loss.IntList(log_probs, targets, *lengths, blank, reduction, zero_infinity)  # type: ignore[no-any-return]


def has_no_nested_tensors(x: Tensor, mask: Tensor) -> bool:
    """Report that no nested tensor can be made of the mask: `nn.TransformerEncoder` then computes padded."""
    return False


def one_hot(classes: Tensor, num_classes: int = -1) -> Tensor:
    """Write ones by index. Indices are checked as on the CPU; ATen's own rule for devices does not check them."""
    if classes.dtype is not torch.int64 or not classes.numel():  # eager's answer, or its error
        host = torch.empty(classes.shape, dtype=classes.dtype)
        return torch.nn.functional.one_hot(host, num_classes).to(classes.device)
    if num_classes < 0:
        num_classes = max(int(classes.max()) + 1, 0)
    rows = torch.zeros(*classes.shape, num_classes, dtype=torch.int64, device=classes.device)
    return rows.scatter(-1, classes.unsqueeze(-1), 1)  # in place, an index out of range left zeros


def max_pool1d(x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """As ATen computes it on other devices, with the dtypes that the CPU accepts."""
    if not x.dtype.is_floating_point:  # eager's answer, or its error
        aten.max_pool1d.default(torch.zeros(x.shape, dtype=x.dtype), *args, **kwargs)
    return aten.max_pool1d.default.decompose(x, *args, **kwargs)  # type: ignore[no-any-return]


def svdvals(x: Tensor, *, driver: str | None = None) -> Tensor:
    """Singular values without vectors, as eager.

    ATen takes the vectors too where the tensor is a subclass: other kernels of LAPACK, which round otherwise.
    """
    return aten._linalg_svd.default(x, False, _has_derivative(x), driver=driver)[1]  # type: ignore[no-any-return]


def eigvalsh(x: Tensor, UPLO: str = "L") -> Tensor:
    """Eigenvalues without vectors, as eager; see `svdvals`."""
    return aten._linalg_eigh.default(x, UPLO, _has_derivative(x))[0]  # type: ignore[no-any-return]


def _has_derivative(x: Tensor) -> bool:
    is_forward = torch.autograd.forward_ad._current_level >= 0
    return is_forward or (torch.is_grad_enabled() and x.requires_grad)


def checked(x: Tensor, condition: Tensor, message: str) -> Tensor:
    """Return `x`; reading it raises RuntimeError(message) if the condition is false. No sync."""
    if x.requires_grad:  # the check has no derivative
        return x + checked(torch.zeros_like(x.detach()), condition, message)
    return aten._functional_assert_async.msg(condition, message, x)  # type: ignore[no-any-return]


def _quantile(op: torch._ops.OpOverload) -> Callable[..., Tensor]:
    """Rule of an op that checks only on the CPU whether `q` is in range."""

    def run(x: Tensor, q: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        if q.numel():
            in_range = ((q >= 0) & (q <= 1)).all()
            q = checked(q, in_range, "quantile() q values must be in the range [0, 1]")
        return op.decompose(x, q, *args, **kwargs)  # type: ignore[no-any-return]

    return run


def _of_numbers(op: torch._ops.OpOverload, plain: torch._ops.OpOverload) -> Callable[..., Tensor]:
    """Rule of an op whose ends may be tensors of one element, which ATen reads. Cost: a sync."""

    def run(*args: Any, **kwargs: Any) -> Tensor:
        device = next(a.device for a in args if isinstance(a, Tensor))
        numbers = [a.item() if isinstance(a, Tensor) and a.dim() == 0 else a for a in args]
        if any(isinstance(a, Tensor) for a in numbers):  # eager's error
            here = [torch.empty(a.shape) if isinstance(a, Tensor) else a for a in numbers]
            return op(*here, **{**kwargs, "device": "cpu"})  # type: ignore[no-any-return]
        return plain(*numbers, **{"device": device, **kwargs})  # type: ignore[no-any-return]

    return run


def unsafe_split(x: Tensor, size: int, dim: int = 0) -> list[Tensor]:
    """Parts of a tensor; they share its memory as in eager, although the schema does not say so."""
    return list(aten.split.Tensor(x, size, dim))


def unsafe_split_with_sizes(x: Tensor, sizes: list[int], dim: int = 0) -> list[Tensor]:
    return list(aten.split_with_sizes.default(x, sizes, dim))


def as_strided_copy(x: Tensor, size: Any, stride: Any, storage_offset: int | None = None) -> Tensor:
    """A copy of the view, whose memory is known: that of an operand in compiled code may lie otherwise."""
    view = aten.as_strided.default(x, size, stride, storage_offset)
    return aten.clone.default(view, memory_format=torch.contiguous_format)  # type: ignore[no-any-return]


def as_strided_scatter(
    x: Tensor, src: Tensor, size: Any, stride: Any, storage_offset: int | None = None
) -> Tensor:
    """Write through the view, in a copy of the whole memory."""
    if src.shape != tuple(size):  # eager's error
        like = torch.empty(x.shape, device="meta"), torch.empty(src.shape, device="meta")
        return aten.as_strided_scatter.default(*like, size, (0,) * len(size), 0)  # type: ignore[no-any-return]
    written = copy.copy(x.detach())
    aten.as_strided.default(written, size, stride, storage_offset).copy_(src)
    return written if type(written._h) is Cell else aten.clone.default(written)  # type: ignore[attr-defined]


def as_strided_copy_out(x: Tensor, *geometry: Any, out: Tensor, **named: Any) -> Tensor:
    made = as_strided_copy(x, *geometry, **named)
    if out.shape != made.shape:
        aten.resize_.default(out, made.shape)
    return out.copy_(made)


def allclose(
    input: Tensor, other: Tensor, rtol: float = 1e-5, atol: float = 1e-8, equal_nan: bool = False
) -> bool:
    """The comparison runs on the device; one truth value is waited for."""
    return bool(aten.isclose.default(input, other, rtol, atol, equal_nan).all())


def is_same_size(x: Tensor, other: Tensor) -> bool:
    """Whether two tensors have one shape."""
    return x.shape == other.shape


def has_same_storage_numel(x: Tensor, other: Tensor) -> bool:
    """Whether the memory of two tensors holds as many elements."""
    first, second = (t.untyped_storage().nbytes() // t.itemsize for t in (x, other))
    return first == second


def new_zeros_with_same_feature_meta(
    x: Tensor, other: Tensor, *, self_num_batch_dims: int = 0
) -> Tensor:
    """Zeros that lie in their memory as `other` in its own: forward-mode autograd compares the views of both."""
    meta = other._h.meta  # type: ignore[attr-defined]
    batch = tuple(x.shape[:self_num_batch_dims])
    held = other.untyped_storage().nbytes() // other.itemsize
    if held == meta.numel and meta.contiguous:
        return x.new_zeros((*batch, *meta.size))
    zeros = x.new_zeros((*batch, held))
    strides = (*zeros.stride()[:-1], *meta.stride)
    return aten.as_strided.default(zeros, (*batch, *meta.size), strides, meta.offset)  # type: ignore[no-any-return]


def is_set_to(x: Tensor, other: Tensor) -> bool:
    """Whether two tensors see the same part of the same memory in the same way."""
    if not type(x) is type(other) is LazyTensor:
        return False
    first, second = x._h, other._h
    return base_of(first) is base_of(second) and first.meta is second.meta


RULES: dict[torch._ops.OpOverload, Callable[..., Any]] = {
    aten.max_pool1d.default: max_pool1d,
    aten.linalg_svdvals.default: svdvals,
    aten.linalg_eigvalsh.default: eigvalsh,
    aten.quantile.default: _quantile(aten.quantile.default),
    aten.nanquantile.default: _quantile(aten.nanquantile.default),
    **{
        getattr(packet, overload): _of_numbers(getattr(packet, overload), packet.default)
        for packet in (aten.linspace, aten.logspace)
        for overload in ("Tensor_Tensor", "Tensor_Scalar", "Scalar_Tensor")
    },
    aten.native_dropout.default: native_dropout,
    aten._fused_dropout.default: fused_dropout,
    aten.rand_like.default: rand_like,
    aten.randn_like.default: randn_like,
    aten.randint_like.default: randint_like,
    aten.randint_like.low_dtype: randint_like_low,
    aten.ctc_loss.Tensor: ctc_loss,
    aten.one_hot.default: one_hot,
    aten.unsafe_split.Tensor: unsafe_split,
    aten.unsafe_split_with_sizes.default: unsafe_split_with_sizes,
    aten.as_strided_copy.default: as_strided_copy,
    aten.as_strided_copy.out: as_strided_copy_out,
    aten.as_strided_scatter.default: as_strided_scatter,
    aten.allclose.default: allclose,
    aten.is_same_size.default: is_same_size,
    aten._has_same_storage_numel.default: has_same_storage_numel,
    aten._new_zeros_with_same_feature_meta.default: new_zeros_with_same_feature_meta,
    aten.is_set_to.default: is_set_to,
    aten._nested_tensor_from_mask_left_aligned.default: has_no_nested_tensors,
    aten._pack_padded_sequence.default: pack_padded_sequence,
    aten._pack_padded_sequence_backward.default: pack_padded_sequence_backward,
    aten._pad_packed_sequence.default: pad_packed_sequence,
    aten.batch_norm_stats.default: batch_norm_stats,
    aten.batch_norm_gather_stats_with_counts.default: batch_norm_gather_stats_with_counts,
    aten.batch_norm_elemt.default: batch_norm_elemt,
    aten.batch_norm_backward_reduce.default: batch_norm_backward_reduce,
    aten.batch_norm_backward_elemt.default: batch_norm_backward_elemt,
    aten._thnn_fused_lstm_cell.default: fused_lstm_cell,
    aten._thnn_fused_lstm_cell_backward_impl.default: fused_lstm_cell_backward,
    aten._thnn_fused_gru_cell.default: fused_gru_cell,
    aten._thnn_fused_gru_cell_backward.default: fused_gru_cell_backward,
}
# Overloads that not every torch has.
_LIKE: tuple[tuple[str, str, Callable[..., Any]], ...] = (
    ("rand_like", "generator", rand_like),
    ("randn_like", "generator", randn_like),
    ("randint_like", "generator", randint_like),
    ("randint_like", "Tensor", randint_like),
    ("randint_like", "Tensor_generator", randint_like),
    ("randint_like", "low_generator_dtype", randint_like_low),
)
for _name, _overload, _rule in _LIKE:
    _op = getattr(getattr(aten, _name), _overload, None)
    if _op is not None:
        RULES[_op] = _rule

# Namespace -> what makes the rule of an op of it.
RULE_MAKERS: dict[str, Callable[[torch._ops.OpOverload], Callable[..., Any]]] = {}
