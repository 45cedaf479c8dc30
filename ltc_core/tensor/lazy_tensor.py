"""`LazyTensor`: the tensor users hold.

A wrapper subclass: autograd, views' version counters and `nn.Parameter` see an ordinary tensor of the device;
every ATen call below autograd arrives in `__torch_dispatch__`, which looks up the op's handler in `HANDLERS`
(filled by `dispatch`). It has no storage; what it holds is its handle `_h` (see `handles`).
"""

from __future__ import annotations

import contextlib
import copy
import gc
import sys
from collections.abc import Callable, Iterator, Sequence
from contextvars import ContextVar
from typing import Any

import torch
import torch.optim.optimizer
from torch import _tensor_str
from torch.nn import parameter
from torch.utils import _foreach_utils

from ltc_core import errors, source
from ltc_core.device import register
from ltc_core.graph.ir import TensorMeta, contiguous_stride
from ltc_core.settings import settings
from ltc_core.tensor import pickling
from ltc_core.tensor.handles import Cell, Handle, Value, View, base_of, lens_of

__all__ = [
    "HANDLERS",
    "LazyTensor",
    "is_called_from",
    "keeping_copies",
    "make_empty",
    "set_handle",
    "use_handlers",
    "wrap",
]

Handler = Callable[[Any, Any], Any]

# One handler an overload, called with (args, kwargs) of the op; made on first use.
HANDLERS: dict[torch._ops.OpOverload, Handler] = {}
_handler_of: Callable[[torch._ops.OpOverload], Handler]

_data: Any = torch._C.TensorBase.data


def use_handlers(handler_of: Callable[[torch._ops.OpOverload], Handler]) -> None:
    """Let `handler_of` make the handlers; called by `dispatch`, which stands above this file."""
    global _handler_of
    _handler_of = handler_of
    HANDLERS.clear()


_kept_copies: ContextVar[list[torch.Tensor] | None] = ContextVar("_kept_copies", default=None)


@contextlib.contextmanager
def keeping_copies() -> Iterator[None]:
    """Keep the copies that tensors are pickled as until the block ends: a process that it starts opens their memory."""
    token = _kept_copies.set([])
    try:
        yield
    finally:
        _kept_copies.reset(token)


class LazyStorage:
    """What a lazy tensor shows of its memory: enough to tell which tensors share it, and how large it is."""

    def __init__(self, tensor: LazyTensor) -> None:
        self.device = tensor.device
        self._base = base_of(tensor._h)

    @property
    def _cdata(self) -> int:
        return id(self._base)

    def data_ptr(self) -> int:
        return id(self._base)

    def nbytes(self) -> int:
        return self._base.meta.nbytes

    def size(self) -> int:
        return self.nbytes()


class _Flattening:
    """The attribute `__tensor_flatten__`, which a tracer from outside looks for; a call of it is refused.

    `nn.Module._apply` looks for it, too, and would swap tensors, which it refuses while a graph refers to one. There it
    is missing, so that `_apply` assigns `.data` (see `set_data`). Without the C++ side it swaps them.
    """

    def __get__(self, tensor: torch.Tensor | None, owner: type) -> Callable[..., Any]:
        if tensor is not None and register.is_native() and is_called_from("_apply", 3):
            raise AttributeError("__tensor_flatten__")
        return LazyTensor._refuse_flattening


_apply_code = torch.nn.Module._apply.__code__


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

    It shows contiguous strides whatever view it is, as the guides of its peers promise; autograd and ATen see
    the strides eager PyTorch would give.
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
        try:
            return handler(args, kwargs)
        except errors.LtcError as error:
            # Leave no operand behind in the traceback: whoever keeps the error would keep a module's parameters
            # in use, and `module.to(device)`, which the error may advise, would refuse to move them.
            args = kwargs = error.__context__ = None
            raise error.with_traceback(None)  # noqa: B904 - the cause was chained where it was caught

    __tensor_flatten__ = _Flattening()

    @staticmethod
    def __tensor_unflatten__(*args: Any) -> Any:
        raise LazyTensor._no_inner_tensors()

    @staticmethod
    def _refuse_flattening(*args: Any) -> Any:
        raise LazyTensor._no_inner_tensors()

    @staticmethod
    def _no_inner_tensors() -> errors.UnsupportedOpError:
        return errors.UnsupportedOpError(
            "a lazy tensor cannot be traced from outside, as torch.compile, torch.func.linearize and fake tensors do",
            where=source.user_line(),
            next="leave torch.compile away on this device: it runs whole steps as one graph itself; call "
            "torch.func.jvp where you would call what torch.func.linearize returns",
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
            _data.__set__(self, other)  # which asks `set_data` for the rest
            return
        grad, self.grad = self.grad, None
        moved = torch.nn.Parameter(other, requires_grad=self.requires_grad)
        torch.utils.swap_tensors(self, moved)  # type: ignore[no-untyped-call]
        if grad is not None:
            self.grad = grad.to(other.device)

    def as_subclass(self, cls: Any) -> Any:
        """A new tensor without a shape, if the class is one of those: `to` asks for it. Other classes are refused."""
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

    def storage_offset(self) -> int:
        return 0

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return _represent(self)

    def __format__(self, spec: str) -> str:
        return self.item().__format__(spec) if self.dim() == 0 else object.__format__(self, spec)

    def untyped_storage(self) -> LazyStorage:  # type: ignore[override]
        return LazyStorage(self)

    def data_ptr(self) -> int:
        """Identify the memory: equal for tensors that share it. It is no address."""
        return id(base_of(self._h)) + self._h.meta.offset * self.dtype.itemsize

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
        """Detach it in place; what was written through a view of it is detached, too.

        The next use of such a view asks autograd for its gradient function anew. A view of ordinary memory gets one
        that leads nowhere. For a subclass PyTorch replays the view, gets none and fails an internal assertion, once:
        here. The view requires gradients as in eager, and passes none on.
        """
        super().detach_()
        if self._version and self._use_count() > 1:  # type: ignore[attr-defined]
            for view in gc.get_objects():
                if type(view) is LazyTensor and view._is_view() and view._base is self:
                    try:
                        _ = view.grad_fn
                    except RuntimeError:
                        view.requires_grad_()
        return self

    def tolist(self) -> Any:
        return self.detach().cpu().tolist()

    def numpy(self, *, force: bool = False) -> Any:
        """Refuse, as other devices do, unless `force` asks for a copy."""
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

        Tensors that share memory share it again in the copy of a structure that holds them all.
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
        memo[id(self)] = copied
        return copied

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickle as a CPU copy that goes back to its device, or where `torch.load(map_location=)` says."""
        requires_grad = self.requires_grad
        plain = self.detach()
        if getattr(self, "_is_param", False):
            return torch._utils._rebuild_parameter, (plain, requires_grad, {})
        pickling.check_pickled(self._h)
        data = plain.cpu()
        kept = _kept_copies.get()
        if kept is not None:
            kept.append(data)
        return (
            torch._utils._rebuild_device_tensor_from_cpu_tensor,
            (data, self.dtype, str(self.device), requires_grad),
        )


def _copy_of(handle: Handle, memo: dict[int, Any]) -> Handle:
    """The same part of a copy of its memory; `memo` keeps the copy for others that share that memory."""
    base = base_of(handle)
    known = memo.get(id(base))
    if known is None:
        with base.trace.lock:  # values are immutable: two cells may have one
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
    """Make a tensor that holds nothing yet."""
    return _make(LazyTensor, *meta.wrapper_arguments(device))


def wrap(handle: Handle) -> LazyTensor:
    """Make a tensor that holds `handle`."""
    t = make_empty(handle.meta, handle.trace.device)
    t._h = handle
    return t


def set_handle(t: LazyTensor, handle: Handle) -> None:
    """Make `t` another tensor in place: its shape, its memory. For `resize_`, `set_`, `t_` and `out=`."""
    if handle.meta is not t._h.meta:
        with torch.no_grad():
            _take_shape(t, handle)
    t._h = handle


def _take_shape(t: LazyTensor, handle: Handle) -> None:
    """Give `t` the shape and dtype of `handle`; what autograd knows of `t` stays.

    PyTorch takes no tensor of inference mode as the data of one that is not, nor the other way round.
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
    """Make `t.is_xla` and its like true where the device has a name PyTorch knows already."""
    method = f"is_{settings.device_name}"
    if hasattr(torch.Tensor, method):
        setattr(LazyTensor, method, property(lambda self: True))


def join_foreach() -> None:
    """Let optimizers take their foreach path for lazy tensors: one op for a whole list of parameters."""
    optimizer = sys.modules["torch.optim.optimizer"]
    for module in (optimizer, _foreach_utils):
        supported = module._foreach_supported_types
        if LazyTensor not in supported:
            supported.append(LazyTensor)
