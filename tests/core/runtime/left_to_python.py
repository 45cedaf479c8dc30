"""Calls of a device that C++ leaves to Python, in a loop that reads."""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

from ltc_core.runtime import run_cost
from ltc_core.runtime.device_context import DeviceContext
from ltc_core.runtime.devices import context
from ltc_core.settings import settings

__all__ = ["left_to_python"]


@contextlib.contextmanager
def left_to_python(method: str, noted: Callable[..., Any], **options: Any) -> Iterator[list[Any]]:
    """A list that gets `noted(arguments)` for each call of a method of `DeviceContext`; `options` are settings."""
    found: list[Any] = []
    plain = getattr(DeviceContext, method)

    def note(self: DeviceContext, *args: Any, **kwargs: Any) -> Any:
        found.append(noted(*args))
        return plain(self, *args, **kwargs)

    with (
        mock.patch.object(DeviceContext, method, note),
        mock.patch.object(run_cost, "_AWAITED_NS", 1 << 62),  # however busy the machine is
        settings.override(replay="always", **options),
    ):
        context(0).wait()
        yield found
