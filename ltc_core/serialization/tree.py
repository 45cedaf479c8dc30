"""Walk the leaves of a tree of Python containers: `map_leaves`, `leaves`, and both for tensors.

A tree is dicts, lists, tuples, sets, other mappings and dataclasses, nested at will. The result has the same types, the
same keys and the same sharing: an object at two places is mapped once, and a container without a changed leaf is not
copied. Used by saving (`plain`), by batches of loaders and by the walkers of compat.
"""

import copy
import dataclasses
from collections.abc import Callable, Iterable, Mapping
from types import ModuleType
from typing import Any, TypeVar

import torch

__all__ = ["leaves", "map_leaves", "map_tensors", "tensors_of"]

_Tree = TypeVar("_Tree")
_Parts = list[tuple[Any, Any]]


def map_leaves(
    is_leaf: Callable[[Any], bool],
    fn: Callable[[Any], object],
    tree: _Tree,
    *,
    objects: int = 0,
    keys: bool = False,
) -> _Tree:
    """Return `tree` with each leaf replaced by `fn(leaf)`; the input is left as it was.

    `fn` is called once for each object. Cycles are followed. Python's modules, types and tensors
    are no containers.

    Args:
        is_leaf: whether an object is a leaf; asked before the object is taken for a container.
        objects: levels of other objects (with a `__dict__`) whose attributes are walked.
        keys: whether the keys of dicts are walked.

    Raises:
        RecursionError: the tree is nested more deeply than Python's stack.
    """
    mapped: _Tree = _Walk(is_leaf, fn, keys).map(tree, objects)
    return mapped


def leaves(
    is_leaf: Callable[[Any], bool], tree: object, *, objects: int = 0, keys: bool = False
) -> list[Any]:
    """The leaves of `tree` in order, each object once."""
    found: list[Any] = []

    def note(leaf: Any) -> Any:
        found.append(leaf)
        return leaf

    map_leaves(is_leaf, note, tree, objects=objects, keys=keys)
    return found


def map_tensors(fn: Callable[[torch.Tensor], torch.Tensor], tree: _Tree) -> _Tree:
    """Return `tree` with each tensor replaced by `fn(tensor)`; objects such as modules stay as they are."""
    return map_leaves(_is_tensor, fn, tree)


def tensors_of(tree: object) -> list[torch.Tensor]:
    """The tensors of `tree` in order, each object once."""
    return leaves(_is_tensor, tree)


def _is_tensor(value: Any) -> bool:
    return isinstance(value, torch.Tensor)


class _Walk:
    """One walk: results by the id of the object; the objects are referenced, so that ids stay unique."""

    def __init__(
        self, is_leaf: Callable[[Any], bool], fn: Callable[[Any], object], keys: bool
    ) -> None:
        self._is_leaf = is_leaf
        self._fn = fn
        self._keys = keys
        self._done: dict[int, Any] = {}
        self._kept: list[Any] = []

    def map(self, value: Any, objects: int) -> Any:
        if id(value) in self._done:
            return self._done[id(value)]
        self._kept.append(value)
        result = self._fn(value) if self._is_leaf(value) else self._map_container(value, objects)
        self._done[id(value)] = result
        return result

    def _map_container(self, value: Any, objects: int) -> Any:
        if isinstance(value, dict):
            if self._keys:
                return self._map_with_keys(value, objects)
            return self._fill(value, value.items(), _set_items, objects)
        if isinstance(value, list):
            return self._fill(value, enumerate(value), _set_items, objects)
        if isinstance(value, tuple | set | frozenset):
            return self._rebuild(value, objects)
        if isinstance(value, type | ModuleType | torch.Tensor):
            return value
        if isinstance(value, Mapping) and not hasattr(value, "__dict__"):
            content = dict(value)
            mapped = self.map(content, objects)
            return value if mapped is content else type(value)(mapped)  # type: ignore[call-arg]
        if isinstance(value, Mapping) or dataclasses.is_dataclass(value):
            return self._fill(value, _attributes(value), _set_attributes, objects)
        if objects > 1 and hasattr(
            value, "__dict__"
        ):  # before the walk: its attributes may contain it
            return self._fill(value, list(vars(value).items()), _set_attributes, objects - 1)
        return self._map_attributes(value) if objects and hasattr(value, "__dict__") else value

    def _map_attributes(self, value: Any) -> Any:
        """Map the containers among an object's attributes; only an object with a changed one is copied."""
        changed = [
            (k, new) for k, old in vars(value).items() if (new := self.map(old, 0)) is not old
        ]
        if not changed:
            return value
        made = copy.copy(value)
        _set_attributes(made, changed)
        return made

    def _fill(
        self,
        value: Any,
        parts: Iterable[tuple[Any, Any]],
        put: Callable[[Any, Iterable[tuple[Any, Any]]], None],
        objects: int,
    ) -> Any:
        """Map the parts into a shallow copy; a cycle gets the copy in the place of `value`."""
        made = value.copy() if type(value) in (list, dict) else copy.copy(value)
        self._done[id(value)] = made
        changed = [(key, new) for key, old in parts if (new := self.map(old, objects)) is not old]
        if not changed:
            return value
        put(made, changed)
        return made

    def _map_with_keys(self, value: dict[Any, Any], objects: int) -> Any:
        made = copy.copy(value)
        self._done[id(value)] = made
        keys = [self.map(key, objects) for key in value]
        items = [self.map(item, objects) for item in value.values()]
        old = [*value, *value.values()]
        if all(a is b for a, b in zip([*keys, *items], old, strict=True)):
            return value
        made.clear()
        made.update(zip(keys, items, strict=True))
        return made

    def _rebuild(self, value: Any, objects: int) -> Any:
        items = list(value)
        mapped = [self.map(item, objects) for item in items]
        if id(value) in self._done:  # made already where a cycle came back here
            return self._done[id(value)]
        if all(new is old for new, old in zip(mapped, items, strict=True)):
            return value
        is_of_c = isinstance(value, torch.Size) or hasattr(value, "n_sequence_fields")
        if not isinstance(value, tuple) or is_of_c:  # tuple.__new__ refuses torch.return_types
            return type(value)(mapped)
        # Not type(value)(...): a namedtuple, or a class with a __new__ of its own, takes fields.
        made = tuple.__new__(type(value), mapped)
        if hasattr(value, "__dict__"):
            made.__dict__.update(value.__dict__)
        return made


def _attributes(value: Any) -> _Parts:
    """Attributes of a mapping or a dataclass, in its __dict__ and in the slots of its fields."""
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
