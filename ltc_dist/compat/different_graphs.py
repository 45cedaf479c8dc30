"""How many graphs a compiled function may have: `torch_xla.compile(max_different_graphs=N)`.

In: the ops that a call of the function has recorded. Out: torch_xla's error where they are one graph too many; it names
the first op that differs from the graphs before.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from weakref import WeakKeyDictionary

from ltc_core.runtime.devices import contexts
from ltc_dist.compat.xla_text import op_text

__all__ = ["DifferentGraphs", "recorded_ops"]

Ops = tuple[str, ...]  # of a graph, in the order in which they were recorded

# Function -> its graphs: a script may compile one function several times.
_graphs_of: WeakKeyDictionary[Callable[..., Any], list[Ops]] = WeakKeyDictionary()
_END = "the end of the function"


class DifferentGraphs:
    """The graphs of a function. Two graphs differ if their ops or the shapes of these do.

    Args:
        function: None for a block, whose graphs are its own.
        limit: how many graphs there may be.
    """

    def __init__(self, function: Callable[..., Any] | None, limit: int) -> None:
        self._limit = limit
        self._known: list[Ops] = []
        function = getattr(function, "__func__", function)
        if function is not None:
            self._known = _graphs_of.setdefault(function, self._known)

    def add(self, ops: Ops) -> None:
        """Add the graph of a call.

        Raises:
            RuntimeError: there are more graphs than the limit; the text is torch_xla's.
        """
        if ops in self._known:
            return
        if len(self._known) >= self._limit:
            raise RuntimeError(
                f"Maximum number of different graphs allowed per function exceeded: {self._limit}\n"
                + self._difference(ops)
            )
        self._known.append(ops)

    def _difference(self, ops: Ops) -> str:
        same = max((_num_same(ops, known) for known in self._known), default=0)
        near = [known for known in self._known if known[:same] == ops[:same]]
        expected = list(dict.fromkeys(known[same] if same < len(known) else _END for known in near))
        if same < len(ops):
            got = f"Got: {ops[same]}"
        else:
            got = f"Reached {_END}{f' at: {ops[-1]}' if ops else ''}"
        if len(expected) == 1:
            return f"{got}\nExpected: {expected[0]}\n"
        return "\n".join([got, "Expected either of:", *(f"  - {op}" for op in expected), ""])


def recorded_ops() -> Ops:
    """The ops that are recorded and not cut, on all devices."""
    found = []
    for ctx in contexts():
        with ctx.trace.lock:
            found += [
                step.node for step in ctx.trace.path(ctx.trace.cursor) if step.node is not None
            ]
    return tuple(f"[] {op_text(node)}" for node in found)


def _num_same(a: Ops, b: Ops) -> int:
    return next(
        (k for k, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b))
    )
