"""Calls that eager's CPU kernels refuse although ATen's kernels for the device `meta` accept them.

A wrong call must raise where the user makes it, not later in the worker thread. `shape_inference` asks `is_refused` and
`is_overlap_refused` before it infers results. A refused call runs on real values (`ops.fallback`), where eager raises
its own error.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable
from typing import Any

import torch

from ltc_core.graph.arguments import leaves, map_leaves
from ltc_core.graph.ir import TensorMeta
from ltc_core.graph.op_schema import OpSchema
from ltc_core.settings import settings
from ltc_core.tensor.handles import Cell, base_of

__all__ = ["is_overlap_refused", "is_refused"]

_REHEARSAL_ELEMENTS = 1 << 20
_TRIED_ELEMENTS = 1 << 18

aten = torch.ops.aten


def _of_one_dtype(*positions: int) -> Callable[..., bool]:
    def refused(*args: Any) -> bool:
        dtypes = {args[p].dtype for p in positions if isinstance(args[p], torch.Tensor)}
        return len(dtypes) > 1 or torch.bool in dtypes

    return refused


def _convolution(
    x: Any, w: Any, b: Any, stride: Any, padding: Any, dilation: Any, *rest: Any
) -> bool:
    odd = any(d <= 0 for d in dilation) or any(p < 0 for p in padding)
    return odd or _of_one_dtype(0, 1, 2)(x, w, b)


def _any_dtype(*dtypes: torch.dtype) -> Callable[..., bool]:
    def refused(*args: Any) -> bool:
        return any(isinstance(a, torch.Tensor) and a.dtype in dtypes for a in args)

    return refused


def _empty_whole(x: Any, *rest: Any) -> bool:
    return x.numel() == 0 and not rest


def _empty_dim(x: Any, dim: Any) -> bool:
    is_dim = type(dim) is int and -x.dim() <= dim < x.dim()
    return is_dim and x.numel() == 0 and x.shape[dim] == 0


def _index_put(x: Any, indices: Any, values: Any, *rest: Any) -> bool:
    if values.dtype != x.dtype:
        return True
    masks = [i is not None and i.dtype in (torch.bool, torch.uint8) for i in indices]
    if any(masks):  # the number of selected elements depends on the mask's values
        return _any_mask_of_other_shape(x, indices, masks)
    try:
        picked = aten.index.Tensor(_meta(x), [None if i is None else _meta(i) for i in indices])
        torch.broadcast_shapes(values.shape, picked.shape)  # type: ignore[no-untyped-call]
    except (RuntimeError, IndexError):
        return True
    return False


def _any_mask_of_other_shape(x: Any, indices: Any, masks: list[bool]) -> bool:
    dim = 0
    for index, is_mask in zip(indices, masks, strict=True):
        dims = index.dim() if is_mask else 1
        if is_mask and index.shape != x.shape[dim : dim + dims]:
            return True
        dim += dims
    return False


def _meta(t: Any) -> torch.Tensor:
    return torch.empty(t.shape, dtype=t.dtype, device="meta")


def _random_range(x: Any, low: int = 0, high: int | None = None, *rest: Any) -> bool:
    if high is None:
        return False
    if x.is_complex():
        return True
    if x.dtype is torch.bool:
        return not 0 <= low < high <= 2
    limits = torch.finfo(x.dtype) if x.dtype.is_floating_point else torch.iinfo(x.dtype)
    return not limits.min <= low < high <= limits.max + 1


_no_bool = _any_dtype(torch.bool)
_no_complex = _any_dtype(torch.complex32, torch.complex64, torch.complex128)

_REFUSED: dict[str, Callable[..., bool]] = {
    **dict.fromkeys(
        ("index_put", "index_put_", "_index_put_impl_", "_unsafe_index_put"), _index_put
    ),
    **dict.fromkeys(("mm", "bmm", "mv", "dot", "vdot"), _of_one_dtype(0, 1)),
    **dict.fromkeys(("addmm", "addmm_", "baddbmm", "baddbmm_", "addmv"), _of_one_dtype(0, 1, 2)),
    "sort": _no_complex,
    "topk": lambda *args: _no_complex(*args) or _no_bool(*args),
    **dict.fromkeys(("max", "min"), lambda *args: _no_complex(*args) or _empty_whole(*args)),
    "masked_scatter": lambda x, mask, *rest: mask.dtype is not torch.bool,
    "masked_scatter_": lambda x, mask, *rest: mask.dtype is not torch.bool,
    "convolution": _convolution,
    "random_": _random_range,
    "uniform_": lambda x, low=0.0, high=1.0, *rest: low > high,
}

# Reductions without an identity -> the dim that they reduce by default.
_NEED_ELEMENTS = {"max": None, "median": None, "min": None, "mode": -1, "nanmedian": None}

# Ops that are tried on stand-ins of the operands' shapes: floats are 1, integers (indices) 0.
_REHEARSED = frozenset(
    {
        "multinomial", "bucketize", "searchsorted", "index_add", "index_add_", "aminmax",
        "index_select", "index_copy", "index_copy_", "index_fill", "index_fill_", "index_reduce",
        "index_reduce_", "put", "put_", "native_layer_norm", "native_batch_norm",
        "native_group_norm", "nll_loss_forward", "nll_loss2d_forward", "_cdist_forward",
        "linalg_cross", "grid_sampler_2d", "grid_sampler_3d", "smooth_l1_loss", "huber_loss",
        "mse_loss", "smooth_l1_loss_backward", "huber_loss_backward", "mse_loss_backward",
        "_prelu_kernel", "argmax", "argmin", "_log_softmax", "_softmax", "_safe_softmax", "histc",
        "dist", "max_unpool2d", "max_unpool3d", "linalg_solve_triangular", "normal",
        "binary_cross_entropy_with_logits", "_trilinear", "polar", "complex", "avg_pool3d",
    }
)  # fmt: skip


def is_overlap_refused(schema: OpSchema, args: Any, kwargs: dict[str, Any]) -> bool:
    """Whether eager refuses a call because its operands share memory.

    CPU kernels compare addresses, and meta tensors have none. The rule of pointwise ops is known. Other calls are tried
    on stand-ins that share memory as the operands do.
    """
    if schema.name.startswith("_foreach"):  # one op for each item
        given = (*args, *kwargs.values())
        lists = [a for a in given if isinstance(a, list | tuple)]
        of_all = [a for a in given if isinstance(a, torch.Tensor)]
        return any(_overlap_partly((*items, *of_all)) for items in zip(*lists, strict=False))
    if torch.Tag.pointwise in schema.op.tags or schema.name == "copy_":
        return _overlap_partly((*args, *kwargs.values()))
    memory = _Memory()
    if memory.size_of(args, kwargs) > _REHEARSAL_ELEMENTS:
        return True  # too large to try: the call runs on real values
    return _fails(schema, args, kwargs, memory.tensor)


def _overlap_partly(operands: Iterable[Any]) -> bool:
    """Whether two of the tensors are different parts of one memory and have elements in common.

    Source: `at::get_overlap_status`, which ignores parts with gaps.
    """
    handles = [t._h for t in operands if isinstance(t, torch.Tensor) and hasattr(t, "_h")]
    return any(
        base_of(a) is base_of(b)
        and _span(a.meta) != _span(b.meta)
        and a.meta.dense
        and b.meta.dense
        and max(_span(a.meta)[0], _span(b.meta)[0]) < min(_span(a.meta)[1], _span(b.meta)[1])
        for a, b in itertools.combinations(handles, 2)
    )


def _span(meta: TensorMeta) -> tuple[Any, ...]:
    """First byte, end and strides of a dense tensor's memory."""
    first = meta.offset * meta.dtype.itemsize
    return first, first + meta.nbytes, meta.stride


class _Memory:
    """Stand-ins for lazy tensors, with one storage for each cell: they share memory as the lazy tensors do."""

    def __init__(self) -> None:
        self._of_cell: dict[int, torch.UntypedStorage] = {}

    @staticmethod
    def size_of(args: Any, kwargs: dict[str, Any]) -> int:
        """Number of elements in the cells of all lazy tensors among the arguments."""
        cells: dict[int, Cell] = {}
        for item in leaves(args, *kwargs.values()):
            if isinstance(item, torch.Tensor) and hasattr(item, "_h"):
                cell = base_of(item._h)
                cells[id(cell)] = cell
        return sum(cell.meta.numel for cell in cells.values())

    def tensor(self, t: torch.Tensor) -> torch.Tensor:
        if not hasattr(t, "_h"):
            return _stand_in(t)
        handle = t._h
        cell, meta = base_of(handle), handle.meta
        storage = self._of_cell.get(id(cell))
        if storage is None:
            whole = torch.empty_strided(cell.meta.size, cell.meta.stride, dtype=cell.meta.dtype)
            storage = self._of_cell[id(cell)] = whole.fill_(
                _filling(cell.meta.dtype)
            ).untyped_storage()
        part = torch.empty(0, dtype=meta.dtype)
        return part.set_(storage, meta.offset, meta.size, meta.stride)


def is_refused(schema: OpSchema, args: Any, kwargs: dict[str, Any]) -> bool:
    """Whether eager refuses this call although its meta kernel accepts it."""
    if schema.name in _NEED_ELEMENTS:
        dim = args[1] if len(args) > 1 else _NEED_ELEMENTS[schema.name]
        if _empty_dim(args[0], dim):
            return True
    refused = _REFUSED.get(schema.name)
    if refused is not None:
        return refused(*args)
    if torch.Tag.pointwise in schema.op.tags or schema.name.startswith("_foreach"):
        return _fails(schema, args, kwargs, _one_element)
    if schema.name in _REHEARSED:
        return _fails(schema, args, kwargs, _stand_in)
    return _has_no_kernel(schema, args, kwargs)


# (schema, dtypes of the operands) for which the CPU has a kernel.
_with_kernel: set[tuple[Any, ...]] = set()


def _has_no_kernel(schema: OpSchema, args: Any, kwargs: dict[str, Any]) -> bool:
    """Whether the CPU has no kernel for the dtypes of a call. All float32 or all float64 is taken to have one.

    Cost: a run on stand-ins for each op and its dtypes, until one run has succeeded.
    """
    tensors = _tensors(args, kwargs)
    dtypes = tuple(t.dtype for t in tensors)
    if len(set(dtypes)) <= 1 and set(dtypes) <= {torch.float32, torch.float64}:
        return False
    key = (schema, dtypes)
    # Backward ops are not tried: tensors that a forward op saves for them have other dtypes than its meta kernel says.
    # The forward op was tried.
    is_own = schema.op.namespace == "aten" and not schema.name.endswith("_backward")
    if (
        not is_own
        or settings.device != "cpu"
        or key in _with_kernel
        or sum(t.numel() for t in tensors) > _TRIED_ELEMENTS
    ):
        return False
    # An `out` without elements is resized without a warning.
    outs = {
        k: torch.empty(0, dtype=kwargs[k].dtype)
        for k in schema.writes
        if isinstance(kwargs.get(k), torch.Tensor)
    }
    error = _failure(schema, args, {**kwargs, **outs}, _stand_in)
    if isinstance(error, NotImplementedError):
        return True
    if error is None:
        _with_kernel.add(key)
    return False


def _tensors(args: Any, kwargs: dict[str, Any]) -> list[torch.Tensor]:
    """The tensors among the arguments, also those in lists."""
    return [t for t in leaves(args, *kwargs.values()) if isinstance(t, torch.Tensor)]


def _one_element(t: torch.Tensor) -> torch.Tensor:
    """A stand-in with one element, or none if `t` has none: a pointwise kernel does not depend on the count."""
    return torch.ones((1,) * t.dim() if t.numel() else t.shape, dtype=t.dtype)


def _stand_in(t: torch.Tensor) -> torch.Tensor:
    return torch.full(t.shape, _filling(t.dtype), dtype=t.dtype)


def _filling(dtype: torch.dtype) -> int:
    is_index = not (dtype.is_floating_point or dtype.is_complex)
    return 0 if is_index else 1


def _fails(
    schema: OpSchema, args: Any, kwargs: dict[str, Any], stand_in: Callable[..., torch.Tensor]
) -> bool:
    tensors = [a for a in (*args, *kwargs.values()) if isinstance(a, torch.Tensor)]
    if stand_in is _stand_in and sum(t.numel() for t in tensors) > _REHEARSAL_ELEMENTS:
        return False
    return _failure(schema, args, kwargs, stand_in) is not None


def _failure(
    schema: OpSchema, args: Any, kwargs: dict[str, Any], stand_in: Callable[..., torch.Tensor]
) -> Exception | None:
    """The exception that the call raises on stand-ins, or None.

    The user never sees it: a refused call runs on real values, where eager raises its own.
    """

    def tensor(item: Any) -> Any:
        return stand_in(item) if isinstance(item, torch.Tensor) else item

    named = {
        k: map_leaves(tensor, v) for k, v in kwargs.items() if k not in ("generator", "device")
    }
    if schema.draws:
        named["generator"] = torch.Generator()  # the process's own generator must not advance
    positional = map_leaves(tensor, list(args))
    _fill_pivots(schema, positional, named)
    try:
        # Its warnings reach the user: catch_warnings changes the filters of all threads and may leave them changed.
        schema.op(*positional, **named)
    except Exception as error:
        return error
    return None


def _fill_pivots(schema: OpSchema, args: list[Any], kwargs: dict[str, Any]) -> None:
    """Fill pivots among stand-ins with legal numbers.

    LAPACK counts rows from 1, and checks nothing before it swaps them: with 0 it writes outside of the matrix.
    """
    for position, argument in enumerate(schema.op._schema.arguments):
        if argument.name.endswith("pivots"):
            given = args[position] if position < len(args) else kwargs.get(argument.name)
            if isinstance(given, torch.Tensor):
                given.fill_(1)
