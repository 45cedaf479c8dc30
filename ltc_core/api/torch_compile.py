"""`torch.compile` on the device: the call is recorded like every other one.

A step is one graph, and compiled as such, whatever it calls. PyTorch's compiler would trace a part of it, and it cannot
look into a lazy tensor. So `torch.compile` returns what it always returns, and each call decides: where values of the
device take part, the original function or module is called; else the compiled one is. PyTorch has no hook for that,
so `register_torch_compile` replaces the function.
"""

from __future__ import annotations

import functools
import itertools
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from types import FunctionType, ModuleType
from typing import Any

import torch
from torch.utils import _pytree as pytree

from ltc_core.api.loops import cond, scan, while_loop
from ltc_core.runtime.devices import contexts
from ltc_core.settings import settings
from ltc_core.tensor.lazy_tensor import LazyTensor

__all__ = ["AROUND", "register_torch_compile"]

_Around = Callable[[], AbstractContextManager[None]]
_compile: Callable[..., Any] = torch.compile
# Name of a backend -> the context that calls with tensors of the device are recorded in.
AROUND: dict[str, _Around] = {}
# How deep containers and objects are looked into (a trainer, its list of models, a model), and how many items of each.
_DEPTH = 3
_WIDTH = 100


def _scan(fn: Callable[..., Any], init: Any, xs: Any, additional_inputs: Any) -> tuple[Any, Any]:
    """`scan_op` of PyTorch, whose function takes the leaves of the carry and of a slice."""
    return scan(
        lambda carry, x: fn(*pytree.tree_leaves(carry), *x, *additional_inputs), list(init), xs
    )


def _map(fn: Callable[..., Any], xs: Any, args: Any) -> Any:
    """`map_impl` of PyTorch, whose function takes the leaves of a slice, then `args`."""
    return scan(lambda _, x: (None, fn(*x, *args)), None, xs)[1]


# PyTorch's control flow compiles a wrapper of its op, which has no rule for lazy tensors. Called in Python, above
# autograd, a branch or a body has gradients also for tensors that it captures. Module of the wrapper -> the name that
# the wrapper has for the op, and what is called instead.
_CONTROL_FLOW: dict[str, tuple[str, Callable[..., Any]]] = {
    "torch._higher_order_ops.cond": ("cond_op", cond),
    "torch._higher_order_ops.map": ("map_impl", _map),
    "torch._higher_order_ops.scan": ("scan_op", _scan),
    "torch._higher_order_ops.while_loop": ("while_loop_op", while_loop),
}


def register_torch_compile() -> None:
    """Replace `torch.compile`. What it returned before is not changed."""
    torch.compile = compile


@functools.wraps(_compile)
def compile(model: Any = None, **options: Any) -> Any:
    """`torch.compile`, whose calls with tensors of the device are recorded.

    Cost:
        once a device is used, each call looks at its arguments, and at the parameters of modules among them.
    """
    made = _compile(model, **options)
    backend = options.get("backend")
    around = AROUND.get(backend, nullcontext) if isinstance(backend, str) else nullcontext
    # A decorator with options, which calls this function again; or there is nothing to compile.
    if model is None or made is model:
        return made
    if isinstance(made, torch.nn.Module):
        return _of_module(made, around)

    @functools.wraps(made)
    def call(*args: Any, **kwargs: Any) -> Any:
        if not _is_recorded(model, args, kwargs):
            return made(*args, **kwargs)
        with around():
            return _recorded(model)(*args, **kwargs)

    return call


def _recorded(called: Any) -> Any:
    """The function to call where values of the device take part."""
    if called.__module__ not in _CONTROL_FLOW:
        return called
    name, op = _CONTROL_FLOW[called.__module__]
    names = {**called.__globals__, name: op}
    return FunctionType(called.__code__, names, closure=called.__closure__)


# -- modules ---------------------------------------------------------------------------------------


def _of_module(made: torch.nn.Module, around: _Around = nullcontext) -> torch.nn.Module:
    """Let an `OptimizedModule` decide at each call."""
    compiled = made.__dict__.pop("forward")
    object.__setattr__(made, "_ltc_around", around)
    object.__setattr__(made, "__class__", _module_class())
    made.forward = compiled
    return made


def _rebuilt(original: torch.nn.Module, context: Any) -> torch.nn.Module:
    """A copy, or one that is read from a file."""
    made: torch.nn.Module = _module_class()(original, context)
    return made


@functools.cache
def _module_class() -> Any:
    """Subclass of PyTorch's `OptimizedModule`, whose import takes a second."""
    from torch._dynamo.eval_frame import OptimizedModule

    class Compiled(OptimizedModule):
        @property
        def forward(self) -> Callable[..., Any]:
            original, compiled = self._orig_mod, self.__dict__["forward"]

            def call(*args: Any, **kwargs: Any) -> Any:
                if not _is_recorded(original, args, kwargs):
                    return compiled(*args, **kwargs)
                with self.__dict__.get("_ltc_around", nullcontext)():
                    return original(*args, **kwargs)

            return call

        @forward.setter
        def forward(self, compiled: Callable[..., Any]) -> None:
            self.__dict__["forward"] = compiled

        def __reduce__(self) -> tuple[Any, ...]:
            return _rebuilt, (self._orig_mod, self.dynamo_ctx)

    Compiled.__name__ = Compiled.__qualname__ = OptimizedModule.__name__
    return Compiled


# -- what takes part -------------------------------------------------------------------------------


def _is_recorded(called: Any, args: Iterable[Any], kwargs: dict[str, Any]) -> bool:
    """Whether a call works on tensors of the device: its arguments, its object, or names that its code uses."""
    if not contexts():
        return False
    owner = getattr(called, "__self__", called)
    values = itertools.chain(args, kwargs.values(), (owner,), _named_in(called))
    is_recorded = any(_is_on_device(value, _DEPTH) for value in values)
    # PyTorch itself compiles the calls of its loops (`while_loop`); nobody asked for that.
    if is_recorded and not str(getattr(called, "__module__", "")).startswith(
        "torch._higher_order_ops."
    ):
        _tell()
    return is_recorded


def _named_in(called: Any) -> Iterator[Any]:
    """Values of the variables outside of a function that its code names."""
    function = getattr(called, "__func__", called)
    if not isinstance(function, FunctionType):
        return
    for name in function.__code__.co_names:
        if name in function.__globals__:
            yield function.__globals__[name]
    for cell in function.__closure__ or ():
        try:
            yield cell.cell_contents
        except ValueError:  # nothing is assigned yet
            continue


def _is_on_device(value: Any, depth: int) -> bool:
    kind = type(value)
    if isinstance(value, torch.Tensor):
        return isinstance(value, LazyTensor)
    if isinstance(value, torch.nn.Module):
        held: Iterable[Any] = itertools.chain(value.parameters(), value.buffers())
        return any(isinstance(tensor, LazyTensor) for tensor in held)
    if not depth or kind.__module__ == "builtins" and kind not in (dict, list, tuple, set):
        return False
    if isinstance(value, torch.optim.Optimizer):
        held = (p for group in value.param_groups for p in group["params"])
    elif isinstance(value, dict):
        held = value.values()
    elif isinstance(value, (list, tuple, set)):
        held = value
    elif isinstance(value, (type, FunctionType, ModuleType)):
        return False
    else:
        held = getattr(value, "__dict__", {}).values()
    return any(_is_on_device(item, depth - 1) for item in itertools.islice(list(held), _WIDTH))


@functools.cache  # once
def _tell() -> None:
    warnings.warn(
        f"torch.compile does nothing on {settings.device_name}: a step is recorded and compiled as a whole anyway",
        stacklevel=4,
    )
