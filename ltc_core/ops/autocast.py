"""`torch.autocast` on the device: which ops run in bfloat16 or float16, and which in float32.

In a region PyTorch sends each op first to the dispatch key AutocastPrivateUse1, above autograd, so
that casts have gradients and saved tensors are small. The kernels registered here cast the
arguments by the op's row and call the op again; every other op falls through. Outside a region
nothing here is reached. The results are ordinary ATen calls, which are recorded.
Source: the lists of ATen/autocast_mode.h, which CUDA and XPU use, and from AutocastCPU's lists
what has no kernel in lower precision (FFT, linear algebra) or needs equal dtypes (`index_copy`).
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

from ltc_core.graph.arguments import leaves
from ltc_core.settings import settings
from ltc_core.tensor.handles import Cell
from ltc_core.tensor.lazy_tensor import LazyTensor

__all__ = ["FLOAT32", "FLOAT32_RESULT", "LOWER_PRECISION", "PROMOTE", "register_autocast"]

Kernel = Callable[..., Any]
Op = torch._ops.OpOverload

# Arguments are cast to the region's dtype: products and convolutions.
LOWER_PRECISION: Sequence[str] = """
    _convolution.deprecated _convolution convolution conv1d conv1d.padding conv2d conv2d.padding
    conv3d conv3d.padding conv_tbc conv_transpose1d conv_transpose2d.input
    conv_transpose3d.input prelu addmm _addmm_activation addmv addr matmul einsum mm mv
    linalg_vecdot linear addbmm baddbmm bmm chain_matmul linalg_multi_dot _thnn_fused_lstm_cell
    _thnn_fused_gru_cell lstm_cell gru_cell rnn_tanh_cell rnn_relu_cell
    _scaled_dot_product_flash_attention scaled_dot_product_attention
    _native_multi_head_attention
""".split()

# Arguments are cast to float32: what overflows, cancels or sums up; then, as on the CPU, what has
# no lower precision. CUDA refuses `binary_cross_entropy`, and promotes `grid_sampler`; the CPU
# casts both, which always works.
FLOAT32: Sequence[str] = """
    acos asin cosh erfinv exp expm1 log log10 log2 log1p reciprocal rsqrt sinh tan
    pow.Tensor_Scalar pow.Tensor_Tensor pow.Scalar softplus layer_norm native_layer_norm
    rms_norm group_norm frobenius_norm.dim nuclear_norm nuclear_norm.dim cosine_similarity
    poisson_nll_loss cosine_embedding_loss nll_loss nll_loss2d hinge_embedding_loss kl_div
    l1_loss smooth_l1_loss huber_loss mse_loss margin_ranking_loss multilabel_margin_loss
    soft_margin_loss triplet_margin_loss multi_margin_loss binary_cross_entropy_with_logits dist
    pdist cdist renorm logsumexp upsample_nearest1d _upsample_nearest_exact1d upsample_nearest2d
    _upsample_nearest_exact2d upsample_nearest3d _upsample_nearest_exact3d upsample_linear1d
    upsample_bilinear2d _upsample_bilinear2d_aa upsample_trilinear3d upsample_bicubic2d
    _upsample_bicubic2d_aa
    avg_pool3d binary_cross_entropy cross_entropy_loss ctc_loss.IntList ctc_loss.Tensor
    grid_sampler polar quantile quantile.scalar nanquantile nanquantile.scalar stft stft.center
    trace view_as_complex cholesky cholesky_inverse cholesky_solve inverse lu_solve orgqr ormqr
    pinverse geqrf _lu_with_info qr svd triangular_solve fft_fft fft_ifft fft_fft2 fft_ifft2
    fft_fftn fft_ifftn fft_rfft fft_irfft fft_rfft2 fft_irfft2 fft_rfftn fft_irfftn fft_hfft
    fft_ihfft linalg_cond linalg_cond.p_str linalg_matrix_rank linalg_matrix_rank.tol_tensor
    linalg_matrix_rank.atol_rtol_tensor linalg_matrix_rank.atol_rtol_float linalg_solve
    linalg_cholesky linalg_cholesky_ex linalg_svd linalg_svdvals linalg_eig linalg_eigh
    linalg_eigvals linalg_eigvalsh linalg_inv linalg_inv_ex linalg_householder_product
    linalg_tensorinv linalg_tensorsolve linalg_qr linalg_lstsq
""".split()

# The op is told to give float32, unless the caller named a dtype: that saves the copy in float32.
FLOAT32_RESULT: Sequence[str] = """
    prod prod.dim_int softmax.int log_softmax.int cumprod cumsum linalg_vector_norm
    linalg_matrix_norm linalg_matrix_norm.str_ord sum sum.dim_IntList
""".split()

# The same for ops that take a dtype in another overload: op -> that overload.
FLOAT32_OVERLOAD = {
    "norm.Scalar": "norm.ScalarOpt_dtype",
    "norm.ScalarOpt_dim": "norm.ScalarOpt_dim_dtype",
}

# Arguments are cast to the widest dtype among them.
PROMOTE: Sequence[str] = """
    addcdiv addcmul atan2 bilinear cross dot vdot index_put tensordot scatter_add stack cat
    index_copy
""".split()

_CASTABLE = frozenset(
    d
    for d in vars(torch).values()
    if isinstance(d, torch.dtype) and d.is_floating_point and d is not torch.float64
)
_KEY = "AutocastPrivateUse1"
_AUTOCAST = torch._C.DispatchKeySet(getattr(torch._C.DispatchKey, _KEY))
_excluded = torch._C._ExcludeDispatchKeyGuard
_libraries: list[torch.library.Library] = []


# -- casting -------------------------------------------------------------------------------------


def _is_castable(item: Any) -> bool:
    if type(item) is LazyTensor:
        return item.dtype in _CASTABLE
    # A stand-in on the device, such as a FakeTensor.
    return (
        isinstance(item, torch.Tensor)
        and item.dtype in _CASTABLE
        and item.device.type == settings.device_name
    )


def _cast(item: Any, dtype: torch.dtype) -> Any:
    if isinstance(item, torch.Tensor):
        if item.dtype is dtype or not _is_castable(item):
            return item
        return _cast_weight(item, dtype) if item.is_leaf and item.requires_grad else item.to(dtype)
    if type(item) in (list, tuple):
        return [_cast(i, dtype) for i in item]
    return item


class _WeightCast:
    """A weight's copy in lower precision, as long as autograd keeps it for backward.

    Eager PyTorch keeps such copies to the end of the outermost region, which nobody is told of, and
    uses them even after the weight was changed there. Here a copy stands for one version of the
    weight and nothing but the graph holds it: no copy outlives its step, and one that is not saved
    for backward is made again.
    """

    __slots__ = ("copy", "value", "weight")

    def __init__(self, weight: LazyTensor, copy: torch.Tensor) -> None:
        key = id(weight)
        self.weight = weakref.ref(weight, lambda _: _weight_casts.pop(key, None))
        self.copy = weakref.ref(copy)
        self.value = weakref.ref(weight._h.value)

    def get(self, weight: LazyTensor, dtype: torch.dtype) -> torch.Tensor | None:
        if self.weight() is not weight or self.value() is not weight._h.value:
            return None
        copy = self.copy()
        if copy is None or copy.dtype is not dtype:
            return None
        copy._fix_weakref()  # type: ignore[attr-defined]  # see torch.utils.weak.TensorWeakRef
        return copy


_weight_casts: dict[int, _WeightCast] = {}


def _cast_weight(weight: Any, dtype: torch.dtype) -> torch.Tensor:
    """Cast a leaf; a weight used many times (a recurrent one) is cast and differentiated once."""
    if (
        weight.dtype is not torch.float32
        or type(weight) is not LazyTensor
        or type(weight._h) is not Cell
        or not torch.is_autocast_cache_enabled()
        or not torch.is_grad_enabled()
    ):
        return weight.to(dtype)  # type: ignore[no-any-return]
    known = _weight_casts.get(id(weight))
    if known is not None:
        copy = known.get(weight, dtype)
        if copy is not None:
            return copy
    copy = weight.to(dtype)
    _weight_casts[id(weight)] = _WeightCast(weight, copy)
    return copy


# -- kernels -------------------------------------------------------------------------------------


def _call(op: Op, args: Any, kwargs: dict[str, Any], dtype: torch.dtype) -> Any:
    cast = [_cast(a, dtype) for a in args]
    if not kwargs:
        return op(*cast)
    return op(*cast, **{k: _cast(v, dtype) for k, v in kwargs.items()})


def _lower_precision(op: Op) -> Kernel:
    def kernel(*args: Any, **kwargs: Any) -> Any:
        with _excluded(_AUTOCAST):
            dtype = torch.get_autocast_dtype(settings.device_name)
            return _call(op, args, kwargs, dtype)

    return kernel


def _float32(op: Op) -> Kernel:
    def kernel(*args: Any, **kwargs: Any) -> Any:
        with _excluded(_AUTOCAST):
            return _call(op, args, kwargs, torch.float32)

    return kernel


def _float32_result(op: Op) -> Kernel:
    position = [a.name for a in op._schema.arguments].index("dtype")

    def kernel(*args: Any, **kwargs: Any) -> Any:
        with _excluded(_AUTOCAST):
            named = kwargs.get("dtype") if len(args) <= position else args[position]
            if named is not None or not _is_castable(args[0]):
                return op(*args, **kwargs)
            return op(*args[:position], **{**kwargs, "dtype": torch.float32})

    return kernel


def _float32_overload(op: Op) -> Kernel:
    target = _overload(FLOAT32_OVERLOAD[f"{op._opname}.{op._overloadname}"])
    wanted = [a.name for a in target._schema.arguments]
    defaults = {a.name: a.default_value for a in op._schema.arguments if a.has_default_value()}

    def kernel(*args: Any, **kwargs: Any) -> Any:
        with _excluded(_AUTOCAST):
            named = {**defaults, **dict(zip(wanted, args, strict=False)), **kwargs}
            x = named.pop("self")
            return target(x, **named, dtype=torch.float32 if _is_castable(x) else x.dtype)

    return kernel


def _promote(op: Op) -> Kernel:
    def kernel(*args: Any, **kwargs: Any) -> Any:
        with _excluded(_AUTOCAST):
            dtype = torch.get_autocast_dtype(settings.device_name)
            for found in _dtypes((*args, *kwargs.values())):
                dtype = torch.promote_types(dtype, found)
            return _call(op, args, kwargs, dtype)

    return kernel


def _dtypes(items: Iterable[Any]) -> Iterable[torch.dtype]:
    return (item.dtype for item in leaves(*items) if _is_castable(item))


# -- registration --------------------------------------------------------------------------------

_RULES: tuple[tuple[Iterable[str], Callable[[Op], Kernel]], ...] = (
    (LOWER_PRECISION, _lower_precision),
    (FLOAT32, _float32),
    (FLOAT32_RESULT, _float32_result),
    (FLOAT32_OVERLOAD, _float32_overload),
    (PROMOTE, _promote),
)


def _overload(name: str) -> Op:
    packet, _, overload = name.partition(".")
    return getattr(getattr(torch.ops.aten, packet), overload or "default")  # type: ignore[no-any-return]


def register_autocast() -> None:
    """Register the rules, once, after the device; an op that this torch lacks is left out."""
    others = torch.library.Library("_", "IMPL")  # type: ignore[no-untyped-call]
    others.fallback(torch.library.fallthrough_kernel, _KEY)  # type: ignore[no-untyped-call]
    library = torch.library.Library("aten", "IMPL")  # type: ignore[no-untyped-call]
    for names, rule in _RULES:
        for name in names:
            if torch._C._dispatch_has_kernel(f"aten::{name}"):
                library.impl(name, rule(_overload(name)), _KEY)  # type: ignore[no-untyped-call]
    _libraries.extend((library, others))
