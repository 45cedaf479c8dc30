"""Names that can be imported, but raise when they are used: the error says why, and what to use instead."""

from __future__ import annotations

from typing import Any, NoReturn

from ltc_core.errors import LtcError

__all__ = ["Absent", "NotHereError"]


class NotHereError(LtcError, NotImplementedError):
    """A script uses a name that has no counterpart here."""


class Absent:
    """Placeholder for a function, a class or a namespace.

    Args:
        name: under which it was imported.
        why: it is not here, and what to use instead.
    """

    def __init__(self, name: str, why: str) -> None:
        self._name, self._why = name, why

    def _refuse(self, *args: Any, **kwargs: Any) -> NoReturn:
        what, _, instead = self._why.partition("; ")
        raise NotHereError(f"{self._name} is not here: {what}", next=instead)

    __call__ = __enter__ = __exit__ = __iter__ = __getitem__ = __mro_entries__ = _refuse

    def __instancecheck__(self, instance: object) -> bool:
        return False  # nothing is made of it

    def __or__(self, other: Any) -> Any:
        return other  # in an annotation, or a tuple of classes to look for

    __ror__ = __or__

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return Absent(f"{self._name}.{name}", self._why)

    def __bool__(self) -> bool:
        return False

    def __repr__(self) -> str:
        return f"<{self._name}, which is not here>"
