"""`torch_xla.experimental.deprecation`: old names of functions, which warn once."""

from __future__ import annotations

import functools
import logging
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

__all__ = ["deprecated", "mark_deprecated", "register_deprecated"]

Function = Callable[..., Any]


def deprecated(
    module: ModuleType, new: Function, old_name: str | None = None, extra_msg: str | None = None
) -> Function:
    """Return `new` as it is called by its old name in `module`; the first call logs a warning."""
    name = old_name or new.__name__

    @functools.cache
    def warn() -> None:
        more = f" {extra_msg}" if extra_msg else ""
        logging.warning(
            f"{module.__name__}.{name} is deprecated. Use {new.__module__}.{new.__name__} instead.{more}"
        )

    @functools.wraps(new)
    def call(*args: Any, **kwargs: Any) -> Any:
        warn()
        return new(*args, **kwargs)

    return call


def mark_deprecated(new: Function, extra_msg: str | None = None) -> Callable[[Function], Function]:
    """Decorator of an old function: calls go to `new`."""

    def decorate(function: Function) -> Function:
        module = sys.modules[function.__module__]
        return deprecated(module, new, function.__name__, extra_msg)

    return decorate


def register_deprecated(module: ModuleType, new: Function) -> None:
    """Add `new` to a module; the first call of it there logs a warning."""
    setattr(module, new.__name__, deprecated(module, new))
