"""Metadata of an op's results, from ATen's kernels for the device `meta`; strides from `kernel_strides`.

`record.make_node` calls `infer` for a new step of the trace. `infer` raises `Unknown` if the metadata depend on values
(`nonzero`), if the op has no meta kernel, or if `eager_checks` finds that eager refuses the call. `ops.dispatch` then
decomposes the op or runs it on real values.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from ltc_core.graph.arguments import map_leaves
from ltc_core.graph.ir import TensorMeta
from ltc_core.graph.op_schema import Arg, OpSchema
from ltc_core.settings import settings
from ltc_core.shapes import eager_checks, size_rules, view_rules
from ltc_core.shapes.kernel_strides import with_kernel_strides
from ltc_core.tensor.handles import base_of
from ltc_core.tensor.lazy_tensor import LazyTensor
from ltc_core.thread_state import in_own_state

__all__ = ["WITHOUT_KERNEL", "Unknown", "infer", "typed"]


class Unknown(Exception):
    """The metadata of an op's results cannot be inferred without running it."""


def _to_meta(item: Any) -> Any:
    if isinstance(item, LazyTensor):
        return item._h.meta.meta_tensor()
    if isinstance(item, TensorMeta):
        return item.meta_tensor()
    return item


_CACHE_SIZE = 20_000
_cache: dict[Any, Any] = {}
_ABSENT = object()  # `None` is what an op returns that only writes, such as `_foreach_add_`


def infer(schema: OpSchema, args: Any, kwargs: dict[str, Any]) -> Any:
    """An op's results with a `TensorMeta` for each tensor.

    Raises:
        Unknown: the results cannot be inferred; an exception that ATen raised is chained.

    Cost: about 0.1 to 3 ms; 5 us if an equal call is cached (the layers of a model repeat themselves), 15 us if one
    with other sizes is known (`size_rules`).
    """
    key = (
        schema,
        torch.get_default_dtype(),
        *[_signature(a, code) for a, code in zip(args, schema.args, strict=False)],
        *[(k, _signature(v, schema.named[k])) for k, v in kwargs.items() if k != "generator"],
    )
    shared = _memory_shared(args, kwargs) if schema.writes else ()
    if shared:
        key += (shared,)
    found = _cache.get(key, _ABSENT)
    if found is _ABSENT:
        try:
            if shared and eager_checks.is_overlap_refused(schema, args, kwargs):
                raise Unknown("operands that overlap as eager does not allow")
            found = _infer_of_any_size(schema, args, kwargs, key)
        except (
            Unknown
        ) as unknown:  # `nonzero` is called again and again, and to find that out takes 0.3 ms
            if schema.op.namespace != "aten":  # a script may register a kernel for `meta` later
                raise
            cause = unknown.__cause__
            found = _Failed(str(unknown), cause and cause.with_traceback(None))
        if len(_cache) >= _CACHE_SIZE:
            _cache.clear()
        _cache[key] = found
    if type(found) is _Failed:
        raise Unknown(found.why) from found.cause
    return found


class _Failed(NamedTuple):
    """A call that cannot be inferred, as it is kept in the cache."""

    why: str
    cause: BaseException | None


_known = size_rules.Known()


def _infer_of_any_size(schema: OpSchema, args: Any, kwargs: dict[str, Any], key: Any) -> Any:
    """The results of a call that is not in the cache, from one of the same form with other sizes if there was one."""
    view = view_rules.view_of(schema.op, args, kwargs) if schema.view else None
    if view is not None:
        return view
    is_plain = not kwargs and _writes_alike_lists(schema, key[2 : 2 + len(args)])
    if is_plain and not eager_checks.is_refused(schema, args, kwargs):
        return None
    if not size_rules.is_of_any_size(schema):
        return _run_on_meta(schema, args, kwargs)
    form, sizes = _known.form(schema, key, len(args))
    found = None if form is None else _known.find(schema, form, sizes)
    if found is None:
        found = _run_on_meta(schema, args, kwargs)
        if form is not None:
            _known.learn(schema, form, sizes, found)
    return found


def _writes_alike_lists(schema: OpSchema, parts: tuple[Any, ...]) -> bool:
    """Whether an op on lists only writes the first one, and eager takes what is given for it: no kernel need be asked.

    Each list is of floats of the same sizes and dtypes as the first one, each number is real. An optimizer's lists have
    hundreds of tensors.
    """
    if not schema.name.startswith("_foreach_") or schema.returns or schema.writes != ("self",):
        return False
    first = parts[0]
    if not first or not all(meta.dtype.is_floating_point for meta in first):
        return False
    return all(_goes_with(part, first) for part in parts[1:])


def _goes_with(part: Any, first: tuple[TensorMeta, ...]) -> bool:
    if type(part) is not tuple:
        return part in _REAL
    if len(part) != len(first):
        return False
    if part[0] in _REAL:
        return all(item in _REAL for item in part)
    return all(
        type(meta) is TensorMeta and meta.size == own.size and meta.dtype is own.dtype
        for meta, own in zip(part, first, strict=True)
    )


_REAL = (float, int, bool)


def _memory_shared(args: Any, kwargs: dict[str, Any]) -> tuple[int, ...]:
    """For each lazy tensor the position of the first one with the same cell; empty if no two share a cell."""
    first: dict[int, int] = {}
    found: list[int] = []
    for item in (*args, *kwargs.values()):
        for t in item if isinstance(item, list | tuple) else (item,):
            if isinstance(t, LazyTensor):
                found.append(first.setdefault(id(base_of(t._h)), len(found)))
    return tuple(found) if len(first) < len(found) else ()


def _signature(item: Any, code: Arg) -> Any:
    """The part of an argument that the results' metadata may depend on."""
    kind = type(item)
    if kind is LazyTensor:
        return item._h.meta
    if kind is TensorMeta or item is None:
        return item
    if isinstance(item, list | tuple):
        return tuple([_signature(i, code) for i in item])
    if isinstance(item, LazyTensor):
        return item._h.meta
    if code == Arg.STATIC_SCALAR:
        return typed(item)
    if code != Arg.STATIC and isinstance(item, bool | int | float | complex):
        return type(item)
    return item


def typed(item: Any) -> Any:
    """An argument with the types of its scalars, so that 6 and 6.0 differ."""
    if isinstance(item, list | tuple):
        return tuple(map(typed, item))
    return (type(item), item)


@in_own_state
def _run_on_meta(schema: OpSchema, args: Any, kwargs: dict[str, Any]) -> Any:
    """Run the op on the device `meta`."""
    if eager_checks.is_refused(schema, args, kwargs):
        raise Unknown("a call that eager refuses")
    meta_kwargs = {
        k: map_leaves(_to_meta, v)
        for k, v in kwargs.items()
        if k not in ("device", "pin_memory", "generator", "non_blocking")
    }
    if "generator" in kwargs:
        meta_kwargs["generator"] = None
    if "device" in schema.names and schema.position("device") >= len(args):
        # A factory has no operand that names `meta`: it would run, and draw, on the CPU.
        meta_kwargs["device"] = "meta"
    try:
        result = schema.op(*map_leaves(_to_meta, list(args)), **meta_kwargs)
    except Exception as error:
        own = _OWN_RULES.get(schema.name)
        if own is None or settings.device != "cpu":
            raise Unknown(str(error)) from error
        return own(*args, **kwargs)
    return with_kernel_strides(
        schema, args, kwargs, _as_processor_gives(schema, args, kwargs, _metas(result))
    )


def _as_processor_gives(schema: OpSchema, args: Any, kwargs: dict[str, Any], metas: Any) -> Any:
    """`metas`, corrected for the few ops whose meta kernels differ from their CPU kernels."""
    if schema.name == "_native_multi_head_attention" and not _wants_weights(*args, **kwargs):
        return (metas[0], None)  # `meta` returns an empty tensor
    if schema.name in ("pow", "_foreach_pow") and not schema.writes and type(args[1]) is bool:
        of = [args[0]._h.meta] if isinstance(metas, TensorMeta) else [t._h.meta for t in args[0]]
        found = metas if isinstance(metas, list) else [metas]
        found = [
            TensorMeta.of(m.size, m.stride, m.offset, o.dtype)
            for m, o in zip(found, of, strict=True)
        ]  # `meta` returns integers for a boolean base
        return found if isinstance(metas, list) else found[0]
    if (
        schema.name in ("_embedding_bag", "_embedding_bag_forward_only")
        and settings.device == "cpu"
    ):
        return _of_embedding_bag(schema, metas, *args, **kwargs)
    if schema.name in _PARAMETERS_OF_NORMS and settings.device == "cpu":
        given = (args[k] for k in _PARAMETERS_OF_NORMS[schema.name] if k < len(args))
        parameters = [t._h.meta.dtype for t in given if isinstance(t, LazyTensor)]
        return _of_norm(metas, args[0]._h.meta.dtype, parameters, _trains(schema, args, kwargs))
    return metas


def _of_grouped_mm(
    a: Any, b: Any, offs: Any = None, bias: Any = None, out_dtype: torch.dtype | None = None
) -> TensorMeta:
    """Products of groups of rows: the groups' ends are numbers that decide no size."""
    first, second = a._h.meta, b._h.meta
    size = first.size[:-1] + second.size[-1:]
    if len(first.size) == 2 == len(second.size):
        size = offs._h.meta.size + size
    elif len(first.size) == 3 and len(second.size) == 2:
        size = size[1:]
    return TensorMeta.packed(size, out_dtype or first.dtype)


def _like(position: int) -> Callable[..., TensorMeta]:
    """The result has the sizes and the dtype of one operand, and is packed."""

    def rule(*args: Any, **_: Any) -> TensorMeta:
        meta = args[position]._h.meta
        return TensorMeta.packed(meta.size, meta.dtype)

    return rule


def _of_binomial(count: Any, prob: Any, generator: Any = None) -> TensorMeta:
    if count._h.meta.size != prob._h.meta.size or count.dtype is not prob.dtype:
        raise Unknown("a call that eager may refuse")
    return _like(0)(count)


# Ops without a kernel for `meta`; of `_grouped_mm`, it refuses other dtypes than bfloat16, which the CPU computes.
_WITHOUT_KERNEL: dict[str, Callable[..., TensorMeta]] = {
    "_ctc_loss_backward": _like(1),
    "_dirichlet_grad": _like(0),
    "_sample_dirichlet": _like(0),
    "_standard_gamma_grad": _like(0),
    "binomial": _of_binomial,
    "fractional_max_pool3d_backward": _like(1),
    "multi_margin_loss_backward": _like(1),
    "multilabel_margin_loss_backward": _like(1),
}
WITHOUT_KERNEL = frozenset(_WITHOUT_KERNEL)
_OWN_RULES = {"_grouped_mm": _of_grouped_mm, **_WITHOUT_KERNEL}

# Norms, and where their arguments have weight, bias and running statistics.
_PARAMETERS_OF_NORMS = {
    "native_layer_norm": (2, 3),
    "native_group_norm": (1, 2),
    "native_batch_norm": (1, 2, 3, 4),
    "_native_batch_norm_legit": (1, 2, 3, 4),
    "_native_batch_norm_legit_no_training": (1, 2, 3, 4),
    "_batch_norm_with_update": (1, 2, 3, 4),
    "_batch_norm_no_update": (1, 2, 3, 4),
}


# Norms without an argument that says so.
_EVALUATE = {"_native_batch_norm_legit_no_training", "_batch_norm_no_update"}


def _trains(schema: OpSchema, args: Any, kwargs: dict[str, Any]) -> bool:
    """Whether a norm normalizes with the statistics of its input, and saves them."""
    if "training" not in schema.names:
        return schema.name not in _EVALUATE
    return bool(schema.given("training", args, kwargs))


def _of_norm(metas: Any, dtype: torch.dtype, parameters: list[torch.dtype], trains: bool) -> Any:
    """`metas` with the dtype and size of the mean and the deviation that the CPU kernel saves for backward."""
    is_mixed = dtype in (torch.bfloat16, torch.half) and torch.float32 in parameters
    saved = torch.float32 if is_mixed else dtype
    if not trains:  # it saves empty ones
        return (metas[0], *[TensorMeta.packed((0,), saved)] * 2, *metas[3:])
    return (
        metas[0],
        *(TensorMeta.of(m.size, m.stride, m.offset, saved) for m in metas[1:3]),
        *metas[3:],
    )


def _of_embedding_bag(
    schema: OpSchema, metas: Any, weight: Any, *rest: Any, padding_idx: int = -1, **kwargs: Any
) -> Any:
    """`metas` with the sizes of what the CPU kernel saves for backward. It runs on zeros, with one row of weights."""

    def zeros(meta: TensorMeta) -> torch.Tensor:
        return torch.empty_strided(meta.size, meta.stride, dtype=meta.dtype).zero_()

    row = weight._h.meta
    one = TensorMeta.of((1, *row.size[1:]), row.stride, 0, row.dtype)
    given: list[Any] = [zeros(a._h.meta) if isinstance(a, LazyTensor) else a for a in rest]
    if len(given) > 7:  # padding_idx by position
        padding_idx = given.pop()
    named = {k: zeros(v._h.meta) if isinstance(v, LazyTensor) else v for k, v in kwargs.items()}
    results = schema.op(zeros(one), *given, **named, padding_idx=min(padding_idx, 0))
    return (metas[0], *(TensorMeta.like(result) for result in results[1:]))


def _wants_weights(*args: Any, need_weights: bool = True, **kwargs: Any) -> bool:
    """Whether a call of `_native_multi_head_attention` asks for the weights."""
    return args[10] if len(args) > 10 else need_weights


def _metas(result: Any) -> Any:
    if isinstance(result, torch.Tensor):
        if result.layout is not torch.strided or result.is_quantized:
            raise Unknown("a result the device cannot hold")
        return TensorMeta.like(result)
    if isinstance(result, list):
        return [_metas(r) for r in result]
    if isinstance(result, tuple):
        return tuple(_metas(r) for r in result)
    return result
