"""Open scopes of `xp.Trace`, by thread. torch_xla names nodes after them, so no step ends inside of one."""

from __future__ import annotations

import threading

from ltc_core import source
from ltc_core.errors import ProfilerError

__all__ = ["check_none_is_open", "close_scope", "open_scope"]


class _Scopes(threading.local):
    def __init__(self) -> None:
        self.names: list[str] = []
        self.numbers = [1]  # of the next scope, at each depth


_scopes = _Scopes()


def open_scope(name: str) -> None:
    """Enter a scope; it has its number among its siblings in its name."""
    _scopes.names.append(f"{name}.{_scopes.numbers[-1]}")
    _scopes.numbers[-1] += 1
    _scopes.numbers.append(1)


def close_scope() -> None:
    """Leave the scope that was entered last."""
    _scopes.names.pop()
    _scopes.numbers.pop()


def check_none_is_open() -> None:
    """Called where a step has ended.

    Raises:
        ProfilerError: a scope is open.
    """
    names = "/".join(_scopes.names)
    if names:
        raise ProfilerError(
            f"Expecting scope to be empty but it is {names}",
            got="the end of a step inside of an open xp.Trace",
            where=source.user_line(),
            next="call torch_xla.sync() after the with block, or torch_xla.sync(reset_scope=False) in it",
        )
    _scopes.numbers[0] = 1
