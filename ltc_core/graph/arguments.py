"""Nested arguments and results of ops: `leaves` walks them, `map_leaves` maps them, `place_results` numbers results.

Lists and tuples are opened; a NamedTuple (`Write`, `ViewStep`) is a leaf.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, MutableMapping
from typing import Any

__all__ = ["leaves", "map_leaves", "place_results"]


def leaves(*items: Any) -> Iterator[Any]:
    """What is in the items, lists and tuples opened, from left to right."""
    for item in items:
        if _is_opened(item):
            yield from leaves(*item)
        else:
            yield item


def map_leaves(function: Callable[[Any], Any], item: Any) -> Any:
    """`item` with `function` of each leaf in its place. Lists stay lists; other sequences become tuples."""
    if not _is_opened(item):
        return function(item)
    mapped = [map_leaves(function, i) for i in item]
    return mapped if isinstance(item, list) else tuple(mapped)


def _is_opened(item: Any) -> bool:
    kind = type(item)
    if kind is tuple or kind is list:
        return True
    # torch.Size and what `torch.max(x, 0)` returns are tuples without names of fields.
    return isinstance(item, list | tuple) and not hasattr(item, "_fields")


def place_results(
    spec: Any, result: Any, values: MutableMapping[int, Any] | list[Any], first: int
) -> None:
    """Put the results of an op among the values; `spec` is `Node.result`, `first` is `Node.first`.

    A position in `spec` gives the number of a value, from `first` on; a name is an operand that was written.
    """
    if type(spec) is int:
        values[first + spec] = result
    elif type(spec) is list or type(spec) is tuple:
        for s, r in zip(spec, result, strict=True):
            place_results(s, r, values, first)
