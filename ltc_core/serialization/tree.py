"""Walk the leaves in a tree of Python containers: `map_tensors`, `collect`, `map_instances`.

A tree is dicts, lists, tuples, sets, other mappings and dataclasses, nested at will. What comes
out has the same types, the same keys and the same sharing: an object that stands at two places is
mapped once, and a part without a changed tensor is the object that went in. The walk knows nothing
of devices; `cpu_copy` is what it is usually given.
"""

import copy
import dataclasses
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeVar

import torch

_Tree = TypeVar("_Tree")
_Leaf = TypeVar("_Leaf")


def map_tensors(fn: Callable[[torch.Tensor], torch.Tensor], tree: _Tree) -> _Tree:
    """Return `tree` with each tensor replaced by `fn(tensor)`; the input is left as it was.

    `fn` is called once for each tensor object. Keys, and objects that are no containers (a
    module, an optimizer), are returned as they are. Cycles are followed.

    Raises:
        RecursionError: the tree is nested more deeply than Python's stack.
    """
    return map_instances(torch.Tensor, fn, tree)


def map_instances(kind: type[_Leaf], fn: Callable[[_Leaf], object], tree: _Tree) -> _Tree:
    """Return `tree` as `map_tensors` does, with the objects of class `kind` as its leaves."""
    mapped: _Tree = _Walk(kind, fn).map(tree)
    return mapped


def collect(tree: object) -> list[torch.Tensor]:
    """Return the tensors of `tree` in the order they stand there, each object once."""
    found: list[torch.Tensor] = []

    def note(tensor: torch.Tensor) -> torch.Tensor:
        found.append(tensor)
        return tensor

    map_tensors(note, tree)
    return found


class _Walk:
    """One walk: what each object was mapped to, by id; the objects are kept, so that ids are."""

    def __init__(self, kind: type, fn: Callable[[Any], object]) -> None:
        self._kind = kind
        self._fn = fn
        self._done: dict[int, Any] = {}
        self._kept: list[Any] = []

    def map(self, value: Any) -> Any:
        if id(value) in self._done:
            return self._done[id(value)]
        self._kept.append(value)
        if isinstance(value, self._kind):
            result: Any = self._fn(value)
        else:
            result = self._map_container(value)
        self._done[id(value)] = result
        return result

    def _map_container(self, value: Any) -> Any:
        if isinstance(value, dict):
            return self._fill(value, list(value.items()), _set_items)
        if isinstance(value, list):
            return self._fill(value, list(enumerate(value)), _set_items)
        if isinstance(value, tuple | set | frozenset):
            return self._rebuild(value)
        if _is_record(value):
            return self._fill(value, _attributes(value), _set_attributes)
        return value

    def _fill(
        self,
        value: Any,
        parts: list[tuple[Any, Any]],
        put: Callable[[Any, Iterable[tuple[Any, Any]]], None],
    ) -> Any:
        """Map the parts into a shallow copy, which stands for `value` where a cycle meets it."""
        made = copy.copy(value)
        self._done[id(value)] = made
        changed = [(key, new) for key, old in parts if (new := self.map(old)) is not old]
        if not changed:
            return value
        put(made, changed)
        return made

    def _rebuild(self, value: Any) -> Any:
        items = list(value)
        mapped = [self.map(item) for item in items]
        if id(value) in self._done:  # a cycle came back here and has made it already
            return self._done[id(value)]
        if all(new is old for new, old in zip(mapped, items, strict=True)):
            return value
        if not isinstance(value, tuple) or hasattr(value, "n_sequence_fields"):
            return type(value)(mapped)  # sets, and torch.return_types, which tuple.__new__ refuses
        # Not type(value)(...): a namedtuple, or a class with a __new__ of its own, takes fields.
        made = tuple.__new__(type(value), mapped)
        if hasattr(value, "__dict__"):
            made.__dict__.update(value.__dict__)
        return made


def _is_record(value: Any) -> bool:
    if isinstance(value, type):
        return False
    return isinstance(value, Mapping) or dataclasses.is_dataclass(value)


def _attributes(value: Any) -> list[tuple[str, Any]]:
    """What a mapping or a dataclass keeps, in its __dict__ and in the slots of its fields."""
    found = dict(getattr(value, "__dict__", {}))
    if dataclasses.is_dataclass(value):
        for field in dataclasses.fields(value):
            if hasattr(value, field.name):
                found[field.name] = getattr(value, field.name)
    return list(found.items())


def _set_items(made: Any, items: Iterable[tuple[Any, Any]]) -> None:
    for key, item in items:
        made[key] = item


def _set_attributes(made: Any, attributes: Iterable[tuple[str, Any]]) -> None:
    for name, item in attributes:
        object.__setattr__(made, name, item)  # a frozen dataclass refuses setattr
