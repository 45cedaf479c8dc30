"""Functions that are made anew for other arguments: `FlattenedInputFunc`, `CompiledCallableWithCache`, `call_jax`.

In: a function of structures, and the arguments of a call. Out: its results; what was made for arguments like these is
called again. Used by `torch_xla.core.xla_builder`.
"""

from __future__ import annotations

import abc
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.utils import _pytree as pytree

from ltc_core.executors.jax import library
from ltc_core.graph.jax_call import CALL

__all__ = [
    "JAX_CALLABLES",
    "CompiledCallableWithCache",
    "FlattenedInputFunc",
    "JaxCallable",
    "call_jax",
    "count_jax_traces",
]


class FlattenedInputFunc:
    """A function of structures as one of a tuple of tensors, in three calls: `preprocess`, `flat_call`, `postprocess`.

    Leaves that are no tensors are kept by `preprocess`, for the calls of `flat_call` until the next `preprocess`.
    """

    def __init__(self, orig_func: Callable[..., Any]) -> None:
        self.orig_func = orig_func
        self.non_tensors: tuple[Any, ...] = ()
        self.in_spec: Any = None
        self.out_spec: Any = None
        self._is_tensor: tuple[bool, ...] = ()

    def preprocess(
        self, args: Sequence[Any], kwargs: dict[str, Any] | None = None
    ) -> tuple[torch.Tensor, ...]:
        """The tensors of the arguments, in order."""
        found, self.in_spec = self.flatten((tuple(args), kwargs or {}))
        self._is_tensor = tuple(isinstance(leaf, torch.Tensor) for leaf in found)
        pairs = list(zip(found, self._is_tensor, strict=True))
        self.non_tensors = tuple(None if is_tensor else leaf for leaf, is_tensor in pairs)
        return tuple(leaf for leaf, is_tensor in pairs if is_tensor)

    def flat_call(self, flat_input: Sequence[Any]) -> list[Any]:
        """The leaves of what the function returns, given values in place of the tensors."""
        assert self.in_spec is not None, "flat_call: preprocess must be called first"
        given = iter(flat_input)
        pairs = zip(self.non_tensors, self._is_tensor, strict=True)
        leaves = [next(given) if is_tensor else leaf for leaf, is_tensor in pairs]
        args, kwargs = self.unflatten(leaves, self.in_spec)
        found, self.out_spec = self.flatten(self.orig_func(*args, **kwargs))
        return found

    def postprocess(self, res_flattened: Sequence[Any]) -> Any:
        """The structure that the function returned, of these leaves."""
        assert self.out_spec is not None, "postprocess: flat_call must be called first"
        return self.unflatten(list(res_flattened), self.out_spec)

    def flatten(self, inputs: Any) -> tuple[list[Any], Any]:
        return pytree.tree_flatten(inputs)

    def unflatten(self, flattened: list[Any], spec: Any) -> Any:
        return pytree.tree_unflatten(flattened, spec)


class CompiledCallableWithCache(abc.ABC):
    """A function that `specialize` makes anew for arguments of other shapes, dtypes, structure or numbers."""

    def __init__(self, flat_input_func: FlattenedInputFunc) -> None:
        self._flat_input_func = flat_input_func
        self._cache: dict[Any, tuple[Callable[..., Any], Any]] = {}

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        function = self._flat_input_func
        tensors = function.preprocess(args, kwargs)
        shapes = tuple((t.shape, t.dtype) for t in tensors)
        key = shapes, function.non_tensors, function.in_spec
        if key not in self._cache:
            made = self.specialize(tensors)
            self._cache[key] = made, function.out_spec
        call, function.out_spec = self._cache[key]
        return function.postprocess(call(tensors))

    @abc.abstractmethod
    def specialize(self, sample_flat_args: Sequence[torch.Tensor]) -> Callable[..., Any]:
        """A function of a tuple of tensors like these; it has called `flat_call`."""


class JaxCallable(CompiledCallableWithCache):
    """Calls a function of arrays of JAX, and structures of them, with tensors. No gradient flows through it."""

    def __init__(self, jax_func: Callable[..., Any]) -> None:
        super().__init__(FlattenedInputFunc(jax_func))

    def specialize(self, sample_flat_args: Sequence[torch.Tensor]) -> Callable[..., Any]:
        name = _functions().add_function(
            lambda *arrays: self._flat_input_func.flat_call(arrays), sample_flat_args
        )

        def call(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
            with torch.no_grad():
                found: list[torch.Tensor] = CALL(list(tensors), name)
            return found

        return call


# (function, or what stands for it, and JAX's configuration) -> its callable, which keeps the function alive.
JAX_CALLABLES: dict[tuple[Any, object], JaxCallable] = {}


def call_jax(
    jax_func: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any] | None = None,
    name: str | None = None,
    override_hash: Any = None,
) -> Any:
    """Call a function of JAX with tensors in place of arrays; returns tensors. It is recorded as one op.

    With LTC_EXECUTOR=jax the function becomes a part of the step's program; elsewhere JAX runs it on the host.

    Args:
        jax_func: a pure function that `jax.jit` can trace. It is traced once for arguments of the same shapes,
            dtypes, structure and other values.
        name: accepted; the function has a name of its own.
        override_hash: stands for the function in the cache, for functions that are made anew for each call.

    Raises:
        DeviceError: JAX is not installed.

    Source: `torch_xla.core.xla_builder.call_jax`.
    """
    key = override_hash or id(jax_func), _functions().configuration()
    if key not in JAX_CALLABLES:
        JAX_CALLABLES[key] = JaxCallable(jax_func)
    return JAX_CALLABLES[key](*args, **(kwargs or {}))


def count_jax_traces() -> int:
    """Number of traces that `call_jax` has made and keeps."""
    return sum(len(made._cache) for made in JAX_CALLABLES.values())


def _functions() -> Any:
    library.require("torch_xla.core.xla_builder.call_jax")
    from ltc_core.executors.jax import functions

    return functions
