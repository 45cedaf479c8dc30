"""Forbids that recorded ops run: a script says that a block of it is one graph, and a cut within would make it two.

`close` and `open` are for all threads, as in torch_xla. `device_context` asks `admits` before a cut while the gate is
closed: the ends of steps that are found (`found_steps`) are left out, any other cut is an error at its line. A trace is
not cut for its length then.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable

from ltc_core import source
from ltc_core.errors import ExecutionForbiddenError

__all__ = ["admits", "at_close", "close", "is_closed", "open"]

# Reasons for cuts that the script does not ask for.
_OWN_REASONS = frozenset({"OptimizerStep", "Upload"})

is_closed = False
_at_close: list[weakref.WeakMethod[Callable[[], object]]] = []


def at_close(call: Callable[[], object]) -> None:
    """Have a method called when the gate closes, as long as its object lives."""
    _at_close[:] = [method for method in _at_close if method()]
    _at_close.append(weakref.WeakMethod(call))


def close() -> None:
    """Forbid cuts until `open` is called."""
    global is_closed
    is_closed = True
    for method in _at_close:
        call = method()
        if call is not None:
            call()


def open() -> None:
    global is_closed
    is_closed = False


def admits(reason: str) -> bool:
    """Return False where a cut can be left out, while the gate is closed.

    Raises:
        ExecutionForbiddenError: a line of the script needs the cut.
    """
    if reason in _OWN_REASONS:
        return False
    raise ExecutionForbiddenError(
        "Unexpected execution happens inside the compiled function, exiting",
        got=f"{reason}, while ops are recorded",
        where=source.user_line(),
        next="read values and end steps outside of the function, or compile it with full_graph=False",
    )
