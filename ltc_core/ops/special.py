"""Special handlers: ops that are free, ops that move data, ops that change the shape or the memory of a tensor.

Free ops share the operand's memory or its value (values are immutable, so `clone` copies nothing until one of
the two is written). Moves go to and from the CPU and between devices. Shape changers (`resize_`, `set_`)
give a tensor another handle. Each row takes (args, kwargs) of the op.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.nn.parameter import is_lazy

from ltc_core import errors, metrics, source
from ltc_core.executors.reference import replay
from ltc_core.graph.ir import TensorMeta, ViewStep, contiguous_stride
from ltc_core.graph.lens import Lens, steps_to_memory
from ltc_core.graph.op_schema import OpSchema
from ltc_core.ops.backward import note_crossing
from ltc_core.ops.distribution_checks import is_all_true
from ltc_core.ops.in_place_view import IN_PLACE_VIEWS
from ltc_core.ops.masks import index
from ltc_core.ops.set_data import set_data
from ltc_core.ops.uninitialized import check_possible
from ltc_core.record.recorder import recorder
from ltc_core.record.signature import NotRecordable
from ltc_core.record.view_recorder import make_operand, record_view_step
from ltc_core.runtime.devices import DeviceContext, checked, context, fetch, real, upload
from ltc_core.settings import settings
from ltc_core.shapes.shape_inference import infer
from ltc_core.tensor.handles import Cell, Value, View, base_of, lens_of
from ltc_core.tensor.host_storage import HostStorage
from ltc_core.tensor.lazy_tensor import LazyTensor, set_handle, wrap
from ltc_core.tensor.sharing import is_alone
from ltc_core.thread_state import in_own_state
from ltc_core.uninterrupted import uninterrupted

__all__ = ["SPECIAL", "on_other_device", "share"]

aten = torch.ops.aten
Handler = Callable[[Any, Any], Any]


# -- free ----------------------------------------------------------------------------------------


def share(args: Any, kwargs: Any) -> Any:
    handle = args[0]._h
    is_inference = args[0].is_inference()
    if is_inference != torch.is_inference_mode_enabled():
        with torch.inference_mode(is_inference):  # as every view
            return wrap(handle)
    return wrap(handle)


_record_clone = recorder(OpSchema.of(aten.clone.default))
_packing = (None, torch.preserve_format, torch.contiguous_format)


def _clone(args: Any, kwargs: Any) -> Any:
    handle = args[0]._h
    memory_format = kwargs.get("memory_format") if kwargs else None
    if type(handle) is Cell and handle.meta.contiguous and memory_format in _packing:
        with handle.trace.lock:
            return wrap(Cell(handle.trace, handle.value, handle.meta))
    return _record_clone(args, kwargs)


def _uninitialised(op: torch._ops.OpOverload) -> Handler:
    """Return the handler of `empty_like` and its kin: no op is recorded for memory nobody has written."""
    schema = OpSchema.of(op)

    def handle(args: Any, kwargs: Any) -> Any:
        kwargs = dict(kwargs or {})
        device = kwargs.pop("device", None)
        handle = args[0]._h
        trace = handle.trace
        if device is not None:
            wanted = torch.device(device)
            if wanted.type != trace.device.type:
                return op(_stand_in(args[0]), *args[1:], device=device, **kwargs)
            if wanted.index not in (None, trace.device.index):
                trace = context(checked(wanted.index)).trace
        like = infer(schema, args, kwargs)
        return wrap(trace.empty(TensorMeta.of(like.size, like.stride, 0, like.dtype)))

    return handle


def _stand_in(t: torch.Tensor) -> torch.Tensor:
    """Make a tensor on the device `meta` like `t`, for calls that ask only for its size and dtype."""
    meta = TensorMeta.like(t) if type(t) is not LazyTensor else t._h.meta
    return meta.meta_tensor()


def on_other_device(schema: OpSchema, args: Any, kwargs: dict[str, Any]) -> Any:
    """Make a call whose result is to be on another device, such as `zeros_like(t, device='cpu')`."""
    device = torch.device(kwargs["device"])
    if device.type == settings.device_name:
        like = [
            wrap(context(checked(device.index or 0)).trace.empty(a._h.meta))
            if type(a) is LazyTensor
            else a
            for a in args
        ]
        return schema.op(*like, **{k: v for k, v in kwargs.items() if k != "device"})
    like = [_stand_in(a) if type(a) is LazyTensor else a for a in args]
    return schema.op(*like, **kwargs)


# -- moving data ---------------------------------------------------------------------------------

_record_to_copy = recorder(OpSchema.of(aten._to_copy.default))
_record_copy = recorder(OpSchema.of(aten.copy_.default))


def _to_copy(args: Any, kwargs: Any) -> Any:
    (t,) = args
    kwargs = dict(kwargs or {})
    device = kwargs.pop("device", None)
    kwargs.pop("non_blocking", None)
    wanted = t.device if device is None else torch.device(device)
    if wanted.type == t.device.type:
        if wanted.index in (None, t.device.index):
            return _record_to_copy(args, kwargs)
        return aten._to_copy.default(_across(t, wanted.index), **kwargs)
    if t.requires_grad:
        note_crossing()
    if wanted.type == "meta":
        return aten._to_copy.default(_stand_in(t), **kwargs)
    plain = kwargs.get("dtype") in (None, t.dtype) and kwargs.get("memory_format") in _packing
    if wanted.type == "cpu" and plain:
        return fetch(t._h, "ToCpu")
    return aten._to_copy.default(real(t._h, "ToCpu"), device=wanted, **kwargs)


def _across(t: LazyTensor, index: int) -> LazyTensor:
    """Copy a tensor to another device of this process. Cost: syncs the source."""
    metrics.count("CrossDeviceCopy")
    return upload(real(t._h, "CrossDeviceCopy"), checked(index), t._h.meta)


def _copy(args: Any, kwargs: Any) -> Any:
    destination, origin = args[0], args[1]
    if type(destination) is not LazyTensor:
        if origin.requires_grad:
            note_crossing()
        return destination.copy_(fetch(origin._h, "ToCpu"))
    handle = destination._h
    if type(origin) is not LazyTensor:
        return _copy_in(destination, origin)
    if origin._h.trace is not handle.trace:
        return _copy_in(destination, real(origin._h, "CrossDeviceCopy"))
    return _record_copy(args[:2], None)


def _may_be_divided(ctx: DeviceContext, cell: Cell) -> bool:
    """Whether nobody knows yet how memory lies on a mesh, because its value is only recorded or being computed."""
    if not ctx.executor.has_mesh:
        return False
    buffer = cell.value.buffer
    return buffer.is_pending if buffer is not None else cell.value.epoch == cell.trace.epoch


def _copy_in(destination: LazyTensor, host: torch.Tensor) -> LazyTensor:
    """Copy values from the CPU; where they fill whole memory, no op is recorded for it."""
    if is_lazy(host):  # a parameter without a shape: there are no values
        check_possible()
        return destination
    handle = destination._h
    ctx = context(handle.trace.device.index)
    meta = handle.meta
    if host.dim() > 0:
        ctx.steps.before_upload()
    is_whole = host.shape == meta.size and not meta.overlaps
    if type(handle) is Cell and is_whole and not _may_be_divided(ctx, handle):
        value = ctx.upload(host, meta)
        before = handle.value.buffer
        if ctx.executor.has_mesh and before is not None and value.buffer is not None:
            value.buffer.data = ctx.executor.place_like(value.buffer.data, before.data)
        with handle.trace.lock:
            handle.rebind(value)
        return destination
    _record_copy((destination, upload(host, handle.trace.device.index)), None)
    return destination


_number_in_python = in_own_state(torch.Tensor.item)


def _number(tensor: torch.Tensor) -> Any:
    native = replay.extension.loaded
    number = None if native is None else native.number(tensor)
    return _number_in_python(tensor) if number is None else number


def _item(args: Any, kwargs: Any) -> Any:
    metrics.count("aten::_local_scalar_dense")
    shared = real(args[0]._h, "Item")
    with metrics.timer("TransferFromDeviceTime"):
        number = _number(shared)
    metrics.observe("InboundData", shared.itemsize)
    return number


# -- histograms ------------------------------------------------------------------------------------

_record_histc = recorder(OpSchema.of(aten.histc.default))


def _histc(args: Any, kwargs: Any) -> Any:
    """Histogram of integers, too, in integer arithmetic as on CUDA; eager has no CPU kernel for them."""
    named = kwargs or {}
    given: list[Any] = [*args, *(100, 0, 0)[len(args) - 1 :]]
    x, bins, low, high = given
    bins, low, high = named.get("bins", bins), named.get("min", low), named.get("max", high)
    dtype = x.dtype
    if (
        dtype.is_floating_point
        or dtype.is_complex
        or dtype is torch.bool
        or bins <= 0
        or low > high
    ):
        return _record_histc(args, kwargs)
    x = x.reshape(-1).to(torch.int64)
    first: Any = int(low)
    last: Any = int(high)
    if first == last and x.numel():
        first, last = x.min(), x.max()
    are_equal = torch.as_tensor(first == last, device=x.device).to(torch.int64)
    first, last = first - are_equal, last + are_equal
    is_counted = (x >= first) & (x <= last)
    at = ((x - first) * bins // (last - first)).clamp(0, bins - 1)
    counts = torch.zeros(bins, dtype=torch.int64, device=x.device)
    return counts.scatter_add_(0, at, is_counted.to(torch.int64)).to(dtype)


# -- losses of two dtypes ------------------------------------------------------------------------

_record_huber_loss = recorder(OpSchema.of(aten.huber_loss.default))


def _huber_loss(args: Any, kwargs: Any) -> Any:
    """The loss in the dtype of the input, as eager's; ATen's kernel for the device `meta` promotes it."""
    named = kwargs or {}
    given: list[Any] = [*args, *(None, None, 1, 1.0)[len(args) :]]
    x, target = named.get("self", given[0]), named.get("target", given[1])
    reduction, delta = named.get("reduction", given[2]), named.get("delta", given[3])
    if x.dtype is target.dtype:
        return _record_huber_loss(args, kwargs)
    wide = torch.promote_types(x.dtype, target.dtype)
    loss = aten.huber_loss.default(x.to(wide), target.to(wide), 0, delta).to(x.dtype)
    return loss.mean() if reduction == 1 else loss.sum() if reduction == 2 else loss


# -- changing what a tensor is -------------------------------------------------------------------


@uninterrupted
def _strided_view(t: LazyTensor, size: Any, stride: Any, offset: int | None) -> View:
    """View the memory of `t` with other strides: relative to the whole memory, in stored order.

    The memory of a conjugate, and of a view for which eager makes a copy, is that copy.
    """
    handle = t._h
    trace, base = handle.trace, base_of(handle)
    whole = lens_of(handle)
    before = steps_to_memory(base.meta.meta_tensor(), whole) if whole else ()
    with trace.lock:
        try:
            make_operand(base)
            lens, value, meta = before, *_record_lens(base, before)
            if before and not meta.dense:
                # A conjugate of a part with gaps; `t` itself may be a packed part of it.
                lens, value, meta = whole, *_record_lens(base, whole)
            where = handle.meta.offset if offset is None else offset
            if lens:
                where -= _first_element(handle, lens, meta)
                _check_inside(handle, meta, size, stride, where)
            else:
                _check_memory(handle, meta, size, stride, where)
            steps = (*_flattening(meta, handle.meta.dtype), _as_strided_step(size, stride, where))
            for step in steps:
                value, meta = record_view_step(trace, value, meta, step)
            return View(base, lens + steps, meta, value)
        except BaseException:
            trace.rewind()
            raise


def _record_lens(base: Cell, lens: Lens) -> tuple[Value, TensorMeta]:
    value, meta = base.value, base.meta
    for step in lens:
        value, meta = record_view_step(base.trace, value, meta, step)
    return value, meta


def _as_strided_step(size: Any, stride: Any, where: int) -> ViewStep:
    return ViewStep(aten.as_strided.default, (tuple(size), tuple(stride), where))


def _flattening(meta: TensorMeta, dtype: torch.dtype) -> tuple[ViewStep, ...]:
    """Steps from dense memory to its elements in stored order, as elements of `dtype`."""
    order = sorted(range(len(meta.size)), key=lambda d: (-meta.stride[d], -meta.size[d]))
    steps: tuple[ViewStep, ...] = ()
    if order != list(range(len(order))):
        steps += (ViewStep(aten.permute.default, (tuple(order),)),)
    if len(order) != 1:
        steps += (ViewStep(aten.view.default, ((-1,),)),)
    if dtype is not meta.dtype:
        steps += (ViewStep(aten.view.dtype, (dtype,)),)
    return steps


def _first_element(handle: Cell | View, lens: Lens, meta: TensorMeta) -> int:
    """Offset that a tensor says of the first element of its memory `lens`: `as_strided` counts from 0."""
    if any(step.op is aten.as_strided.default for step in lens_of(handle)[len(lens) :]):
        return 0
    return meta.offset * meta.dtype.itemsize // handle.meta.dtype.itemsize


def _check_inside(
    handle: Cell | View, meta: TensorMeta, size: Any, stride: Any, where: int
) -> None:
    """Check that a geometry stays in memory that is a copy: there is nothing beside it."""
    steps = [(n - 1) * s for n, s in zip(size, stride, strict=False)]
    held = meta.nbytes // handle.meta.dtype.itemsize
    if meta.dense and (0 in size or 0 <= where < held - sum(steps)):
        return
    raise errors.UnsupportedOpError(
        "as_strided leaves the elements of a conjugate, or of a view that is a copy in eager",
        got=f"{meta}; size {list(size)}, stride {list(stride)}, {where} elements from its first one on",
        where=source.user_line(),
        next="call it on a copy: x.clone(memory_format=torch.contiguous_format)",
    )


def _check_memory(
    handle: Cell | View, meta: TensorMeta, size: Any, stride: Any, where: int
) -> None:
    """Raise eager's error of a geometry that leaves the memory: the op itself would raise it at a later read.

    Source: `checkInBoundsForStorage`, in ATen/native/Resize.h.
    """
    if not meta.dense or 0 in size or len(size) != len(stride) or where < 0:
        return  # ATen answers
    itemsize = handle.meta.dtype.itemsize
    last = where + sum((n - 1) * s for n, s in zip(size, stride, strict=True))
    needed = (last + 1) * itemsize
    if needed <= meta.nbytes or min(stride, default=0) < 0:
        return
    raise errors.op_error(
        RuntimeError(
            f"setStorage: sizes {list(size)}, strides {list(stride)}, storage offset {where}, and itemsize "
            f"{itemsize} requiring a storage size of {needed} are out of bounds for storage of size {meta.nbytes}"
        ),
        what="",
        got=str(handle.meta),
        where=source.user_line(),
        next="name elements of the memory that the tensor is a view of",
    )


def _as_strided(args: Any, kwargs: Any) -> Any:
    t, size, stride, *rest = args
    offset = rest[0] if rest else (kwargs or {}).get("storage_offset")
    with torch.inference_mode(t.is_inference()):
        return wrap(_strided_view(t, size, stride, offset))


def _as_strided_in_place(args: Any, kwargs: Any) -> Any:
    t, size, stride, *rest = args
    offset = rest[0] if rest else (kwargs or {}).get("storage_offset")
    set_handle(t, _strided_view(t, size, stride, offset))
    return t


def _resize(args: Any, kwargs: Any) -> Any:
    t, size = args[0], tuple(args[1])
    if (kwargs or {}).get("memory_format") not in (
        None,
        torch.contiguous_format,
        torch.preserve_format,
    ):
        raise NotRecordable
    handle = t._h
    if size == tuple(handle.meta.size):
        return t
    wanted = TensorMeta.packed(size, handle.meta.dtype)
    held = base_of(handle).meta.numel - handle.meta.offset
    if wanted.numel <= held:
        set_handle(t, _strided_view(t, size, contiguous_stride(size), handle.meta.offset))
        return t
    has_elements = base_of(handle).meta.numel > 0
    del handle  # `is_alone` counts references
    if has_elements and not is_alone(t):
        raise errors.UnsupportedOpError(
            "resize_ would grow memory that other tensors share",
            got=f"{list(t._h.meta.size)} -> {list(size)}; {held} elements from its first one on",
            where=source.user_line(),
            next="give the result memory of its own: without out=, or resize_ a clone()",
        )
    grown = wrap(t._h.trace.empty(wanted))
    if t._h.meta.numel > 0:
        flat = _strided_view(t, (held,), (1,), t._h.meta.offset)
        aten.copy_.default(
            aten.slice.Tensor(aten.view.default(grown, [-1]), 0, 0, held), wrap(flat)
        )
    set_handle(t, grown._h)
    return t


def _set_tensor(args: Any, kwargs: Any) -> Any:
    t, origin = args
    set_handle(t, origin._h)
    return t


def _set_strided(args: Any, kwargs: Any) -> Any:
    t, origin, offset, size, *stride = args
    strides = stride[0] if stride and stride[0] else contiguous_stride(size)
    set_handle(t, _strided_view(origin, size, strides, origin._h.meta.offset + offset))
    return t


def _set_empty(args: Any, kwargs: Any) -> Any:
    t = args[0]
    set_handle(t, t._h.trace.empty(TensorMeta.packed((0,), t._h.meta.dtype)))
    return t


def _set_storage(args: Any, kwargs: Any) -> Any:
    """Set a tensor on a storage that `torch.load` brings; there are no other storages of the device."""
    t, storage, *geometry = args
    if not isinstance(storage, HostStorage):
        raise errors.UnsupportedOpError(
            "set_ from a storage: lazy tensors have no storage",
            where=source.user_line(),
            next="save a module of the CPU: torch.jit.save(module.cpu(), file)"
            if source.is_within("torch.jit._serialization")
            else "set_ from a tensor, or assign `t.data = other`",
        )
    dtype = t._h.meta.dtype
    count = storage.nbytes() // dtype.itemsize
    offset, size, stride = (
        (*geometry, ()) if len(geometry) == 2 else geometry or (0, (count,), (1,))
    )
    meta = TensorMeta.of(size, stride, 0, dtype)
    whole = storage.whole.get(dtype)
    if whole is None:
        fills = offset == 0 and meta.dense and meta.numel == count
        shape = meta if fills else TensorMeta.packed((count,), dtype)
        host = storage.bytes_of(dtype, shape.size, shape.stride)
        ctx = context(storage.device.index)
        whole = storage.whole[dtype] = wrap(Cell(ctx.trace, ctx.upload(host, shape), shape))
    if offset == 0 and whole._h.meta is meta:
        set_handle(t, whole._h)
    else:
        set_handle(t, _strided_view(whole, size, stride, offset))
    return t


def _nothing(args: Any, kwargs: Any) -> None:
    """Do nothing: there is one stream."""


def _false(args: Any, kwargs: Any) -> bool:
    return False


SPECIAL: dict[torch._ops.OpOverload, Handler] = {
    **IN_PLACE_VIEWS,
    aten.detach.default: share,
    aten.alias.default: share,
    aten.lift_fresh.default: share,
    aten.lift.default: share,
    aten.clone.default: _clone,
    aten.empty_like.default: _uninitialised(aten.empty_like.default),
    aten.new_empty.default: _uninitialised(aten.new_empty.default),
    aten.new_empty_strided.default: _uninitialised(aten.new_empty_strided.default),
    aten._to_copy.default: _to_copy,
    aten.copy_.default: _copy,
    aten._local_scalar_dense.default: _item,
    aten.index.Tensor: index,
    aten._is_all_true.default: is_all_true,
    aten.histc.default: _histc,
    aten.huber_loss.default: _huber_loss,
    aten.as_strided.default: _as_strided,
    aten.as_strided_.default: _as_strided_in_place,
    aten.resize_.default: _resize,
    aten.set_.source_Tensor: _set_tensor,
    aten.set_.source_Tensor_storage_offset: _set_strided,
    aten.set_.default: _set_empty,
    aten.set_.source_Storage: _set_storage,
    aten.set_.source_Storage_storage_offset: _set_storage,
    aten._has_compatible_shallow_copy_type.default: lambda args, kwargs: set_data(*args),
    aten.record_stream.default: _nothing,
    aten.is_pinned.default: _false,
}
