"""Dynamic shapes: steps of the trace that serve calls of any size.

Batches of other lengths take another way through the trie: the metas of inputs and the sizes among the arguments are in
the keys. Where a third way differs from two known ones in sizes only, `Trace` makes it a dynamic one. The key of a
dynamic step is a pattern: `ANY` stands for a size, `AnyMeta` for the meta of an input. The sizes are scalars of the
graph, so one program serves all of them. What a call returns is inferred for each combination of operands' metas and
sizes, and kept with the step (`Dynamic.known`).

A dynamic step follows another one, or branches off known steps. Its `twins` are the steps of other ways at the same
place: where the next call differs from theirs in sizes, these sizes are dynamic, too.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence, Set
from typing import Any, NamedTuple

from ltc_core.graph.arguments import map_leaves
from ltc_core.graph.ir import Node, Scalar, TensorMeta, Write
from ltc_core.graph.lens import ViewStep
from ltc_core.graph.op_schema import Arg, OpSchema

__all__ = [
    "ANY", "AnyMeta", "Call", "Dynamic", "Entry", "Key", "Pattern", "SharedRead", "Sizes", "are_alike",
    "are_outs_alike", "joined", "keep", "may_vary", "num_any", "open_node", "sizes_in", "sizes_that_differ",
]  # fmt: skip

Key = tuple[Any, ...]
Pattern = tuple[Any, ...]
Sizes = tuple[int, ...]

_KNOWN_LIMIT = 4096  # of calls that a step keeps the results of


def may_vary(schema: OpSchema) -> bool:
    """Whether an op may have a step for any size. A collective may not, nor may an op of the script."""
    return schema.op.namespace in ("aten", "ltc_recurrent")


class _Any:
    __slots__ = ()

    def __repr__(self) -> str:
        return "*"


ANY = _Any()
_OTHER = object()  # two keys differ in more than sizes


class AnyMeta(NamedTuple):
    """Stands in a pattern for the meta of an input that is read for the first time."""

    dtype: Any
    rank: int


class Call(NamedTuple):
    """What decides the metas of a call's results.

    Attributes:
        places: for each part of the key, (position among the op's arguments, `Arg`); (-1, None) for other parts.
        metas: of its tensors, in the order of the op's arguments.
        table: makes `Dynamic.known` and `Dynamic.infer` (`record.dynamic_results`).
    """

    places: tuple[tuple[int, Any], ...]
    metas: tuple[TensorMeta, ...]
    table: Callable[..., Any]


class SharedRead(NamedTuple):
    """A tensor that an op reads from memory that it writes: the part under `lens` of the written cell at index `cell`.

    `name` is the argument, `item` the position in the list if the argument is one, else 0.
    """

    name: str
    item: int
    cell: int
    lens: Any  # `Lens`; in a pattern `ANY`


class Entry:
    """Results of a call of known sizes: their metas, and for a view their lenses. Read by `csrc/next_step.h`.

    `uses` counts the calls where a dynamic way begins.
    """

    __slots__ = ("lenses", "outs", "uses")

    def __init__(self, outs: tuple[TensorMeta | None, ...]) -> None:
        self.outs = outs
        self.lenses: tuple[Any, ...] | None = None
        self.uses = 0


class Dynamic:
    """What a dynamic step has beside a node.

    Attributes:
        known: metas of the operands and sizes of a call, one tuple -> its results. Steps that differ in the numbers of
            their operands only share it: what the first layer infers, the others find. Read by `csrc/next_step.h`.
        infer: finds the results of a call that is not known; None if that takes more than its metas and sizes.
        places: where the sizes stand: (position among the op's arguments, position in the list there or -1), in the
            order of the scalars. None: C++ cannot find them.
        num_sizes: how many sizes there are.
        twins: steps of other ways at the same place.
        closed: calls that come so often that they have an exact way; None: no call. Read by `csrc/next_step.h`.
        now: results of the last call that Python recorded.
        num_alone: how many steps up to this one, without a gap, have no twins.
    """

    __slots__ = ("closed", "infer", "known", "now", "num_alone", "num_sizes", "places", "twins")

    def __init__(
        self,
        known: dict[Key, Entry],
        infer: Callable[[Key], Entry | None] | None,
        places: tuple[tuple[int, int], ...] | None,
        num_sizes: int,
        twins: tuple[Any, ...],
    ) -> None:
        self.known = known
        self.infer = infer
        self.places = places
        self.num_sizes = num_sizes
        self.twins = twins
        self.closed: set[Key] | None = None
        self.now = Entry(())
        self.num_alone = 0

    def is_closed_to(self, key: Key) -> bool:
        """Whether a call has an exact way."""
        return self.closed is not None and key in self.closed

    def close_to(self, key: Key) -> None:
        self.closed = {*(self.closed or ()), key}

    def find(self, key: Key) -> bool:
        """Look for the results of a call; with them as `now`, True."""
        entry = self.known.get(key)
        if entry is None and self.infer is not None:
            entry = self.infer(key)
        if entry is None:
            return False
        self.now = entry
        return True

    def add(self, key: Key, outs: tuple[TensorMeta | None, ...]) -> None:
        """Keep the results of a call; they are those of the call that is recorded now."""
        self.now = keep(self.known, key, Entry(outs))


def keep(known: dict[Key, Entry], key: Key, entry: Entry) -> Entry:
    if len(known) >= _KNOWN_LIMIT:
        known.clear()
    known[key] = entry
    return entry


# -- patterns ------------------------------------------------------------------------------------------


def joined(
    key: Key,
    other: Key | Pattern,
    places: Sequence[tuple[int, Any]],
    varying: Set[int] = frozenset(),
) -> Pattern | None:
    """The pattern of two keys at one place; None if more than sizes differ.

    Args:
        varying: sizes that are left open also where both keys have them: they may be equal by chance.
    """
    if len(key) != len(other):
        return None
    parts = []
    for k, (part, was) in enumerate(zip(key, other, strict=True)):
        both = _joined(part, was, places[k][1] if k < len(places) else None, varying)
        if both is _OTHER:
            return None
        parts.append(both)
    return tuple(parts)


def _joined(part: Any, was: Any, code: Any, varying: Set[int]) -> Any:
    if part is was and not varying:
        return part
    if part is ANY:
        return ANY if was is ANY or type(was) is int else _OTHER
    if type(part) is AnyMeta:
        return part if was == part or _has_form(was, part) else _OTHER
    if code is None:
        if type(part) is SharedRead and type(was) is SharedRead:
            part, was = part._replace(lens=ANY), was._replace(lens=ANY)
        return part if part == was else _OTHER
    if type(part) is TensorMeta:
        if part is was and varying.isdisjoint(part.size):
            return part
        form = AnyMeta(part.dtype, len(part.size))
        return form if was == form or _has_form(was, form) else _OTHER
    if type(part) is int and (was is ANY or type(was) is int):
        if code not in (Arg.STATIC, Arg.STATIC_SCALAR):
            return part if part == was else _OTHER
        return part if part == was and part not in varying else ANY
    if type(part) is tuple and type(was) is tuple and len(part) == len(was):
        parts = tuple([_joined(*pair, code, varying) for pair in zip(part, was, strict=True)])
        return _OTHER if _OTHER in parts else parts
    if type(part) is ViewStep and type(was) is ViewStep and part.op is was.op:
        args = _joined(part.args, was.args, Arg.STATIC, varying)
        return _OTHER if args is _OTHER or part.which != was.which else part._replace(args=args)
    return part if type(part) is type(was) and part == was else _OTHER


def sizes_that_differ(key: Any, other: Any) -> Iterator[int]:
    """Sizes of the metas of a key that are others in another key of the same form."""
    if type(key) is TensorMeta and type(other) is TensorMeta:
        for n, was in zip(key.size, other.size, strict=False):
            if n != was:
                yield n
    elif type(key) is tuple and type(other) is tuple:
        for pair in zip(key, other, strict=False):
            yield from sizes_that_differ(*pair)


def _has_form(part: Any, form: AnyMeta) -> bool:
    return type(part) is TensorMeta and AnyMeta(part.dtype, len(part.size)) == form


def sizes_in(pattern: Pattern, key: Key) -> Sizes | None:
    """The sizes of a call where the pattern has `ANY`; None if the pattern does not fit."""
    sizes: list[int] = []
    fits = len(pattern) == len(key) and all(
        _fits(want, part, sizes) for want, part in zip(pattern, key, strict=True)
    )
    return tuple(sizes) if fits else None


def _fits(want: Any, part: Any, sizes: list[int]) -> bool:
    if want is ANY:
        sizes.append(part)
        return type(part) is int
    if type(want) is AnyMeta:
        return _has_form(part, want)
    if type(want) is tuple:
        return (
            type(part) is tuple
            and len(part) == len(want)
            and all(_fits(*pair, sizes) for pair in zip(want, part, strict=True))
        )
    if type(want) is ViewStep:
        is_alike = type(part) is ViewStep and part.op is want.op and part.which == want.which
        return is_alike and _fits(want.args, part.args, sizes)
    if type(want) is SharedRead and want.lens is ANY and type(part) is SharedRead:
        part = part._replace(lens=ANY)
    return want is part or (type(want) is type(part) and want == part)


def num_any(pattern: Any) -> int:
    """How many sizes and metas a pattern leaves open."""
    if pattern is ANY or type(pattern) is AnyMeta:
        return 1
    if type(pattern) is ViewStep:
        return num_any(pattern.args)
    if type(pattern) is SharedRead:
        return num_any(pattern.lens)
    return sum(map(num_any, pattern)) if type(pattern) is tuple else 0


# -- nodes ---------------------------------------------------------------------------------------------


def open_node(
    node: Node, schema: OpSchema | None, pattern: Pattern, call: Call, first: int
) -> tuple[Node, tuple[tuple[int, int], ...] | None]:
    """`node` with a `Scalar` for each `ANY` of the pattern, from number `first` on; and where these are."""
    args, kwargs = list(node.args), dict(node.kwargs)
    found: list[tuple[int, int]] = []
    parts: dict[Write, Write] = {}
    for part, (position, code) in zip(pattern, call.places, strict=False):
        if position < 0 or not num_any(part):
            continue
        opened = _Opened(first + len(found), code, parts)
        if position < len(args):
            args[position] = opened.of(part, args[position])
        else:
            assert schema is not None
            name = schema.names[position]
            kwargs[name] = opened.of(part, kwargs[name])
        found += [(position, item) for item in opened.items]
    if parts:  # a tensor that is written may be read by the same call, as a `Write` again
        args = [map_leaves(lambda leaf: _opened_part(leaf, parts), item) for item in args]
        kwargs = {k: map_leaves(lambda i: _opened_part(i, parts), v) for k, v in kwargs.items()}
    is_in_order = found == sorted(found) and all(item >= -1 for _, item in found)
    node = dataclasses.replace(node, args=tuple(args), kwargs=kwargs or node.kwargs)
    return node, tuple(found) if is_in_order else None


def _opened_part(leaf: Any, parts: dict[Write, Write]) -> Any:
    return parts.get(leaf, leaf) if type(leaf) is Write else leaf


class _Opened:
    """Replaces the sizes of one argument; `parts` are the written parts that it replaces."""

    def __init__(self, first: int, code: Any, parts: dict[Write, Write]) -> None:
        self._next = first
        self._parts = parts
        self._is_typed = code == Arg.STATIC_SCALAR  # the key has (type, value) for each number
        self.items: list[
            int
        ] = []  # position in the list of each; -1: the argument itself, -2: deeper

    def of(self, part: Any, argument: Any, item: int = -1) -> Any:
        if self._is_typed and type(part) is tuple and len(part) == 2 and type(part[0]) is type:
            part = part[1]
        if part is ANY:
            self.items.append(item)
            self._next += 1
            return Scalar(self._next - 1)
        if type(argument) is Write and type(part) is tuple:
            opened = argument._replace(lens=self.of(part[1], argument.lens, -2))
            self._parts[argument] = opened
            return opened
        if type(part) is ViewStep:
            return part._replace(args=self.of(part.args, argument.args, -2))
        if type(part) is tuple and num_any(part) and isinstance(argument, tuple | list):
            inner = [
                self.of(p, a, k if item == -1 else -2)
                for k, (p, a) in enumerate(zip(part, argument, strict=True))
            ]
            return inner if isinstance(argument, list) else tuple(inner)
        return argument


def are_alike(node: Node, other: Node) -> bool:
    """Whether two nodes of one key differ in the sizes of their results only."""
    return (
        node.result == other.result
        and node.writes == other.writes
        and node.uses_default_dtype == other.uses_default_dtype
        and are_outs_alike(node.outs, other.outs)
    )


def are_outs_alike(outs: Sequence[TensorMeta | None], others: Sequence[TensorMeta | None]) -> bool:
    return len(outs) == len(others) and all(
        a is b or (a is not None and b is not None and a.dtype is b.dtype)
        for a, b in zip(outs, others, strict=True)
    )
