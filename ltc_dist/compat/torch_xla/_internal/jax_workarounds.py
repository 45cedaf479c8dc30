"""`torch_xla._internal.jax_workarounds`: imports of JAX. Nothing has to be prepared here before one."""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import logging
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import TypeVar

from ltc_dist.compat.torch_xla.experimental.custom_kernel import jax_import_guard

__all__ = [
    "jax_env_context",
    "jax_import_guard",
    "maybe_get_jax",
    "maybe_get_torchax",
    "requires_jax",
]

_Function = TypeVar("_Function", bound=Callable[..., object])


@contextlib.contextmanager
def jax_env_context() -> Iterator[None]:
    """Does nothing."""
    yield


def requires_jax(func: _Function) -> _Function:
    """The function itself."""
    return func


def maybe_get_jax(log: bool = True) -> ModuleType | None:
    """The module jax; None where it is not installed, with a warning in the log if `log`."""
    if importlib.util.find_spec("jax") is not None:
        return importlib.import_module("jax")
    if log:
        logging.getLogger(__name__).warning("jax is not installed: pip install '.[jax]'")
    return None


def maybe_get_torchax() -> ModuleType | None:
    """The module torchax; None where it is not installed."""
    found = importlib.util.find_spec("torchax")
    return None if found is None else importlib.import_module("torchax")
