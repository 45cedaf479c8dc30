"""`LazyTensor`: the tensor users hold.

A wrapper subclass: autograd, views' version counters and `nn.Parameter` see an ordinary tensor of the device;
every ATen call below autograd arrives in `__torch_dispatch__`, which looks up the op's handler in `HANDLERS`
(made by `ops.dispatch`). A lazy tensor has no storage; it holds its handle `_h` (see `handles`).
"""

from __future__ import annotations

import contextlib
import copy
import functools
import sys
from collections.abc import Callable, Iterator, Sequence
from contextvars import ContextVar
from typing import Any

import torch
import torch.optim.optimizer
from torch import _tensor_str
from torch.autograd.graph import increment_version
from torch.nn import parameter
from torch.nn.utils import parametrize
from torch.utils import _foreach_utils, _python_dispatch

from ltc_core import errors, source
from ltc_core.device import register
from ltc_core.graph.ir import TensorMeta, contiguous_stride
from ltc_core.settings import settings
from ltc_core.tensor import host_storage, pickling
from ltc_core.tensor.alive import alive
from ltc_core.tensor.handles import Cell, Handle, Value, View, base_of, lens_of
from ltc_core.tensor.storage import LazyStorage, identifier

__all__ = [
    "HANDLERS",
    "LazyTensor",
    "has_no_other_reference",
    "is_called_from",
    "keeping_copies",
    "make_empty",
    "set_handle",
    "use_handlers",
    "wrap",
    "wrap_in_cpp",
]

Handler = Callable[[Any, Any], Any]

# overload -> handler, called with (args, kwargs) of the op; made on first use.
HANDLERS: dict[torch._ops.OpOverload, Handler] = {}
_handler_of: Callable[[torch._ops.OpOverload], Handler]

_data: Any = torch._C.TensorBase.data


def use_handlers(handler_of: Callable[[torch._ops.OpOverload], Handler]) -> None:
    """Set the function that makes handlers. `setup` passes that of `ops.dispatch`, which imports this file."""
    global _handler_of
    _handler_of = handler_of
    HANDLERS.clear()


_kept_copies: ContextVar[list[torch.Tensor] | None] = ContextVar("_kept_copies", default=None)


@contextlib.contextmanager
def keeping_copies() -> Iterator[None]:
    """Keep the CPU copies of pickled tensors until the block ends: a process started in it opens their memory."""
    token = _kept_copies.set([])
    try:
        yield
    finally:
        _kept_copies.reset(token)


class _Flattening:
    """The attribute `__tensor_flatten__`, which PyTorch's tracers look for; a call of it raises.

    Others do not find it: libraries that save tensors would take a lazy tensor apart, and it has no inner tensors.
    Neither do those who would swap tensors, which fails while an autograd graph refers to one: `nn.Module._apply`
    assigns `.data` instead (see `ops.set_data`), and parametrizations call `set_`. Without the C++ side `_apply` swaps.
    """

    def __get__(self, tensor: torch.Tensor | None, owner: type) -> Callable[..., Any]:
        if tensor is not None:
            asking = _asking_module()
            swaps = asking == parametrize.__name__ or (
                register.is_native() and is_called_from("_apply", 3)
            )
            if swaps or not asking.startswith("torch."):
                raise AttributeError("__tensor_flatten__")
        return LazyTensor._refuse_flattening


def _asking_module() -> str:
    """Name of the module that looks for an attribute, itself or by `torch.utils._python_dispatch`."""
    frame: Any = sys._getframe(2)
    while frame is not None and frame.f_globals.get("__name__") == _python_dispatch.__name__:
        frame = frame.f_back
    return "" if frame is None else frame.f_globals.get("__name__", "")


def _instead_of_tracing() -> str:
    if source.is_within("torch.export"):
        return "trace it on the CPU, its arguments too: torch.export.export(copy.deepcopy(module).cpu(), args)"
    return (
        "import ltc_core before torch.compile is called, and give the compiled function the tensors as "
        "arguments, so that it is recorded; call torch.func.jvp where you would call what torch.func.linearize returns"
    )


_DISTRIBUTED = "torch.distributed."
_apply_code = torch.nn.Module._apply.__code__


def _skip_traced_frame() -> None:
    """Where PyTorch's compiler traces a function that may also run as it is, let it run: its ops are recorded."""
    convert = sys.modules.get("torch._dynamo.symbolic_convert")
    tracing = getattr(convert and convert.tls, "current_tx", None)
    if tracing is not None and not tracing.one_graph:
        _keep_recording_untraced()
        raise sys.modules["torch._dynamo.exc"].SkipFrame("it has tensors whose ops are recorded")


@functools.cache  # once
def _keep_recording_untraced() -> None:
    """The compiler would go on with what a function calls that it has left: not with our own code."""
    sys.modules["torch._dynamo.trace_rules"].add("ltc_core")


def is_called_from(name: str, depth: int) -> bool:
    """Whether a function `name` of `torch.nn.Module` is among the last `depth` callers of the caller."""
    frame: Any = sys._getframe(2)
    for _ in range(depth):
        if frame is None:
            return False
        code = frame.f_code
        if code.co_name == name and code.co_filename == _apply_code.co_filename:
            return True
        frame = frame.f_back
    return False


class LazyTensor(torch.Tensor):
    """A tensor whose values are computed when they are needed.

    `stride()` returns contiguous strides, for views too, as the peers' guides promise; `as_strided` reads them so
    (`ops.as_strided`). Autograd and ATen see the strides of eager PyTorch.
    """

    _h: Handle
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: torch._ops.OpOverload, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        handler = HANDLERS.get(func)
        if handler is None:
            handler = HANDLERS[func] = _handler_of(func)
        if len(types) > 1 and any(kind.__module__.startswith(_DISTRIBUTED) for kind in types):
            return NotImplemented  # DTensor and its pending collectives have lazy tensors within
        try:
            return handler(args, kwargs)
        except errors.LtcError as error:
            # The traceback must hold no operand: if the caller keeps the error, a module's parameters would stay
            # referenced, and `module.to(device)`, which the error may advise, would refuse to move them.
            args = kwargs = error.__context__ = None
            raise error.with_traceback(None)  # noqa: B904 - the cause was chained where it was caught

    __tensor_flatten__ = _Flattening()

    @staticmethod
    def __tensor_unflatten__(*args: Any) -> Any:
        raise LazyTensor._no_inner_tensors()

    @staticmethod
    def _refuse_flattening(*args: Any) -> Any:
        _skip_traced_frame()
        raise LazyTensor._no_inner_tensors()

    @staticmethod
    def _no_inner_tensors() -> errors.UnsupportedOpError:
        return errors.UnsupportedOpError(
            "a lazy tensor cannot be traced from outside, as torch.compile, torch.export, torch.func.linearize "
            "and fake tensors do",
            where=source.user_line(),
            next=_instead_of_tracing(),
        )

    @property
    def data(self) -> torch.Tensor:
        return _data.__get__(self)  # type: ignore[no-any-return]

    @data.setter
    def data(self, other: torch.Tensor) -> None:
        if isinstance(other, LazyTensor):
            _take_shape(self, other._h)
            self._h = other._h
            return
        if register.is_native():
            _data.__set__(self, other)  # PyTorch calls `ops.set_data` before it copies
            return
        grad, self.grad = self.grad, None
        moved = torch.nn.Parameter(other, requires_grad=self.requires_grad)
        torch.utils.swap_tensors(self, moved)  # type: ignore[no-untyped-call]
        if grad is not None:
            self.grad = grad.to(other.device)

    def as_subclass(self, cls: Any) -> Any:
        """A new uninitialized parameter or buffer, if `cls` is one (`to` calls this), or a view if `cls` is a base.

        Raises:
            UnsupportedOpError: `cls` is another class.
        """
        if issubclass(cls, (parameter.UninitializedParameter, parameter.UninitializedBuffer)):
            return cls(self.requires_grad, self.device, self.dtype)
        if not issubclass(LazyTensor, cls):
            raise errors.UnsupportedOpError(
                f"a lazy tensor cannot be a {cls.__name__}",
                got=f"{self.dtype}{list(self.shape)} on {self.device}",
                where=source.user_line(),
                next=f"move an ordinary tensor: t.as_subclass(torch.Tensor).to('{self.device.type}')",
            )
        return self.view_as(self)

    def is_contiguous(self, memory_format: torch.memory_format = torch.contiguous_format) -> bool:
        if memory_format is torch.contiguous_format:
            return True
        return super().is_contiguous(memory_format=memory_format)

    def stride(self, dim: int | None = None) -> Any:
        strides = contiguous_stride(self.shape)
        return strides if dim is None else strides[dim]

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return _represent(self)

    def __format__(self, spec: str) -> str:
        return self.item().__format__(spec) if self.dim() == 0 else object.__format__(self, spec)

    def untyped_storage(self) -> LazyStorage:  # type: ignore[override]
        return LazyStorage(self.device, base_of(self._h))

    def _typed_storage(self) -> Any:
        """The first version of FSDP asks for it, to free the memory of parameters."""
        raise errors.UnsupportedOpError(
            "a lazy tensor has no typed storage",
            got=f"{self.dtype}{list(self.shape)} on {self.device}",
            where=source.user_line(),
            next="use untyped_storage(); in place of FullyShardedDataParallel torch.distributed.fsdp.fully_shard, or "
            "ltc_dist's ZeroRedundancyOptimizer",
        )

    def data_ptr(self) -> int:
        """An identifier, no address: equal for tensors that start at the same element of the same memory."""
        return identifier(base_of(self._h)) + self._h.meta.offset * self.dtype.itemsize

    def is_shared(self) -> bool:
        return False

    def share_memory_(self) -> Any:
        raise errors.UnsupportedOpError(
            "a lazy tensor cannot be shared between processes",
            got=f"{self.dtype}{list(self.shape)} on {self.device}",
            where=source.user_line(),
            next="share a CPU copy: t.cpu().share_memory_()",
        )

    def detach_(self) -> Any:
        """Detach in place; writes through views of this tensor are detached, too.

        On its next use such a view asks autograd for a new `grad_fn`. In eager it gets one that leads nowhere. For a
        subclass PyTorch replays the view, gets no `grad_fn` and fails an internal assertion, but only the first time,
        which is here. As in eager, the view requires gradients and passes none on.
        """
        super().detach_()
        if self.is_inference():  # no view of it is tracked
            return self
        if self._version and not has_no_other_reference(self):
            for view in alive(LazyTensor):
                if view._is_view() and view._base is self:
                    try:
                        _ = view.grad_fn
                    except RuntimeError:
                        view.requires_grad_()
        return self

    def tolist(self) -> Any:
        return self.detach().cpu().tolist()

    def numpy(self, *, force: bool = False) -> Any:
        """Raise a TypeError, as other devices do; with `force`, return a copy."""
        if force:
            return self.detach().cpu().numpy()
        raise errors.op_error(
            TypeError(
                f"can't convert {self.device} device type tensor to numpy. Use Tensor.cpu() to copy the tensor to "
                "host memory first."
            ),
            what="",
            got=f"{self.dtype}{list(self.shape)} on {self.device}",
            where=source.user_line(),
            next="t.cpu().numpy(), or t.numpy(force=True)",
        )

    def __array__(self, dtype: Any = None, copy: Any = None) -> Any:
        return self.numpy()

    def __copy__(self) -> LazyTensor:
        return self.__deepcopy__({})

    def __deepcopy__(self, memo: dict[int, Any]) -> LazyTensor:
        """Copy the values too, for `copy.copy` as well as for `copy.deepcopy`.

        Tensors of one structure that share memory share it in the copy, too.
        """
        if id(self) in memo:
            return memo[id(self)]  # type: ignore[no-any-return]
        if not self.is_leaf:
            raise RuntimeError(
                "Only Tensors created explicitly by the user (graph leaves) support the deepcopy protocol at "
                "the moment.  If you were attempting to deepcopy a module, this may be because of a torch.nn."
                "utils.weight_norm usage, see https://github.com/pytorch/pytorch/pull/103001"
            )
        is_parameter = getattr(self, "_is_param", False)
        # A parameter is copied by itself, and without its gradient: see `nn.Parameter.__deepcopy__`.
        copied = wrap(_copy_of(self._h, {} if is_parameter else memo))
        if self.grad is not None and not is_parameter:
            copied.grad = copy.deepcopy(self.grad, memo)
        extra = {k: v for k, v in self.__dict__.items() if k != "_h"}
        copied.__dict__.update(copy.deepcopy(extra, memo))
        copied.requires_grad_(self.requires_grad)
        if not is_parameter and not copied.is_inference():
            increment_version(copied)  # eager's copy was written once
        memo[id(self)] = copied
        return copied

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickle as a CPU copy that goes back to its device, or where `torch.load(map_location=)` says."""
        requires_grad = self.requires_grad
        plain = self.detach()
        if getattr(self, "_is_param", False):
            return torch._utils._rebuild_parameter, (plain, requires_grad, {})
        is_older = pickling.check_pickled(self._h)
        data = plain.cpu()
        if is_older:
            return host_storage.reduced(data, self.device, requires_grad)
        kept = _kept_copies.get()
        if kept is not None:
            kept.append(data)
        return (
            torch._utils._rebuild_device_tensor_from_cpu_tensor,
            (data, self.dtype, str(self.device), requires_grad),
        )


def _copy_of(handle: Handle, memo: dict[int, Any]) -> Handle:
    """Handle of the same part in a copy of the memory; `memo` keeps the copy for tensors that share the memory."""
    base = base_of(handle)
    known = memo.get(id(base))
    if known is None:
        with base.trace.lock:  # values are immutable: two cells may have the same value
            copied = Cell(base.trace, base.value, base.meta)
        known = memo[id(base)] = (copied, base)  # `base` must live as long as its id is used
    whole: Cell = known[0]
    if type(handle) is Cell:
        return whole
    return View(whole, lens_of(handle), handle.meta, Value(-1, -1))


def _represent(t: LazyTensor) -> str:
    """Format as eager does, from one fetch: values, device, dtype where it is not implied, autograd."""
    values = t.detach().cpu()
    suffixes = [f"device='{t.device}'"]
    implied = {torch.get_default_dtype(), torch.int64, torch.bool}
    if values.numel() == 0:
        text = "[]"
        if values.dim() != 1:
            suffixes.append(f"size={tuple(values.shape)}")
        implied = {torch.get_default_dtype()}
    else:
        text = _tensor_str._tensor_str(values, len("tensor("))  # type: ignore[no-untyped-call]
    if values.dtype not in implied and not _is_default_complex(values.dtype):
        suffixes.append(f"dtype={values.dtype}")
    if t.grad_fn is not None:
        suffixes.append(f"grad_fn=<{type(t.grad_fn).__name__}>")
    elif t.requires_grad:
        suffixes.append("requires_grad=True")
    text = _tensor_str._add_suffixes(  # type: ignore[no-untyped-call]
        f"tensor({text}", suffixes, len("tensor("), False
    )
    return f"Parameter containing:\n{text}" if getattr(t, "_is_param", False) else text


def _is_default_complex(dtype: torch.dtype) -> bool:
    return dtype.is_complex and dtype.to_real() is torch.get_default_dtype()


_make = torch.Tensor._make_wrapper_subclass


def make_empty(meta: TensorMeta, device: torch.device) -> LazyTensor:
    """Make a tensor without a handle."""
    return _make(LazyTensor, *meta.wrapper_arguments(device))


_wrap_in_cpp: Callable[[Handle], LazyTensor] | None = None
_is_inference_mode = torch.is_inference_mode_enabled


def wrap_in_cpp(function: Callable[[Handle], LazyTensor]) -> None:
    """Make tensors by a C++ function: autograd detaches these without Python (`record/csrc/tensors.h`, `LazyImpl`)."""
    global _wrap_in_cpp
    _wrap_in_cpp = function


def wrap(handle: Handle) -> LazyTensor:
    """Make a tensor that holds `handle`."""
    if _wrap_in_cpp is not None and not _is_inference_mode():
        return _wrap_in_cpp(handle)
    t = make_empty(handle.meta, handle.trace.device)
    t._h = handle
    return t


def has_no_other_reference(t: LazyTensor) -> bool:
    """Whether Python counts no more references to the memory of `t` than to that of a tensor that was just made."""
    new = wrap(Cell(t._h.trace, base_of(t._h).value, t._h.meta))
    most = sys.getrefcount(new._h)
    if sys.getrefcount(t._h) > most:
        return False
    return type(t._h) is not View or sys.getrefcount(t._h.base) <= most


def set_handle(t: LazyTensor, handle: Handle) -> None:
    """Replace the memory, shape and dtype of `t` in place. For `resize_`, `set_`, `t_` and `out=`."""
    if handle.meta is not t._h.meta:
        with torch.no_grad():
            _take_shape(t, handle)
    t._h = handle


def _take_shape(t: LazyTensor, handle: Handle) -> None:
    """Set the shape and dtype of `t` to those of `handle`; the autograd state of `t` stays.

    PyTorch refuses to set the data of an ordinary tensor to an inference tensor, and the other way round.
    """
    with torch.inference_mode(t.is_inference()):
        shaped = wrap(handle)
    _data.__set__(t, shaped)


def sizes_of(args: Sequence[Any]) -> str:
    """Describe the tensors among `args` for an error's `got`."""
    found = []
    for a in args:
        if isinstance(a, torch.Tensor):
            found.append(f"{str(a.dtype).removeprefix('torch.')}{list(a.shape)} on {a.device}")
        elif isinstance(a, list | tuple) and a and isinstance(a[0], torch.Tensor):
            found.append(f"{len(a)} tensors")
    return ", ".join(found)


def name_methods() -> None:
    """Make `t.is_<device>` true if PyTorch defines it, as it does for the device name `xla`."""
    method = f"is_{settings.device_name}"
    if hasattr(torch.Tensor, method):
        setattr(LazyTensor, method, property(lambda self: True))


def join_foreach() -> None:
    """Make optimizers take their foreach path for lazy tensors: one op for a whole list of parameters."""
    optimizer = sys.modules["torch.optim.optimizer"]
    for module in (optimizer, _foreach_utils):
        supported = module._foreach_supported_types
        if LazyTensor not in supported:
            supported.append(LazyTensor)
