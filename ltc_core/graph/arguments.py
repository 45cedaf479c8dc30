"""Nested arguments and results of ops: `leaves` iterates over them, `map_leaves` maps them.

`place_results` stores an op's results under their value numbers. Lists and tuples are opened; a NamedTuple (`Write`,
`ViewStep`) is a leaf. Used by `ir`, `check`, and all that records, compiles or runs nodes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, MutableMapping
from typing import Any

__all__ = ["leaves", "map_leaves", "place_results"]


def leaves(*items: Any) -> Iterator[Any]:
    """Leaves of the items, from left to right."""
    for item in items:
        if _is_opened(item):
            yield from leaves(*item)
        else:
            yield item


def map_leaves(function: Callable[[Any], Any], item: Any) -> Any:
    """`item` with each leaf replaced by `function(leaf)`. Lists stay lists; other sequences become tuples."""
    if not _is_opened(item):
        return function(item)
    mapped = [map_leaves(function, i) for i in item]
    return mapped if isinstance(item, list) else tuple(mapped)


def _is_opened(item: Any) -> bool:
    kind = type(item)
    if kind is tuple or kind is list:
        return True
    # torch.Size and the result of `torch.max(x, 0)` are tuple subclasses without `_fields`.
    return isinstance(item, list | tuple) and not hasattr(item, "_fields")


def place_results(
    spec: Any, result: Any, values: MutableMapping[int, Any] | list[Any], first: int
) -> None:
    """Store the results of an op in `values`; `spec` is `Node.result`, `first` is `Node.first`.

    A position p in `spec` stands for value `first + p`. A name stands for an operand that the op wrote: nothing is
    stored for it.
    """
    if type(spec) is int:
        values[first + spec] = result
    elif type(spec) is list or type(spec) is tuple:
        for s, r in zip(spec, result, strict=True):
            place_results(s, r, values, first)
