"""Where calls of any size take one step: `find` looks for that step, `make` decides whether a new step is to be one.

A new step is dynamic after a dynamic one, or where it is the third of one line of the script that differs from two
others in sizes only. Called by `Trace.advance`. A collective or an op of the script has a step for each size: other
processes, or code that is not PyTorch's, depend on it.

A way that begins like others but goes on like none, as the backward pass of a search after `t[3]`, gains nothing: its
graph is new each time, and C++ copies no dynamic steps. After `_ASTRAY` such steps its size gets an exact way.

A size that is common is worth a graph of its own, which can be compiled. The first two sizes have one at once; where a
dynamic step comes beside them, those that ran less often than `OFTEN` lose it. A size that runs as often on the dynamic
way gets one then.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch

from ltc_core.graph.ir import Node, TensorMeta
from ltc_core.graph.op_schema import OpSchema
from ltc_core.record.dynamic_shapes import (
    Call,
    Dynamic,
    Key,
    Pattern,
    Sizes,
    are_alike,
    joined,
    may_vary,
    num_any,
    open_node,
    sizes_in,
    sizes_that_differ,
)
from ltc_core.record.step import Step

__all__ = ["OFTEN", "find", "make", "may_follow"]

OFTEN = 24

_FEWEST_OF_A_SIZE = 8
_ASTRAY = 16  # new steps in a row that are like none of another size
_ALIKE = 2  # known steps that differ in sizes, before calls of any size get a step


def may_follow(cursor: Step, step: Step | None) -> bool:
    """Whether `find` is to be asked for a call whose key leads from the cursor to `step`."""
    if step is not None:
        return step.dynamic is not None
    return cursor.patterns is not None or cursor.dynamic is not None


def find(
    cursor: Step,
    key: Key,
    step: Step | None,
    grow: Callable[[], Node],
    scalars: list[Any],
    call: Call,
    may_close: bool,
) -> tuple[Key, Step | None]:
    """The key of a call and its step, whose `outs` are then those of the call; None if a step has to be made.

    Args:
        step: the one with this key; it is dynamic.
        scalars: those of the call; sizes are added.
        may_close: whether a common size gets an exact way.
    """
    grow = _Once(grow)  # several steps may be asked
    if step is None:
        for pattern, other, sizes in _patterns_of(cursor, key):
            if _is_closed(cursor, other, (*call.metas, *sizes), may_close):
                return key, None
            if _serves(other, call.metas, sizes, grow):
                scalars += sizes
                return pattern, other
    elif _may_vary(key) and _serves(step, call.metas, (), grow):
        return key, step
    if cursor.dynamic is None or (step is None and _may_vary(key)):
        return key, None
    key = (*key, call.metas)  # of a step for operands of these sizes alone
    step = cursor.child(key)
    if step is not None:
        _serves(step, call.metas, (), grow)
    return key, step


class _Once:
    """Makes a node when it is first asked for, and returns that one again."""

    __slots__ = ("_make", "_node")

    def __init__(self, make: Callable[[], Node]) -> None:
        self._make = make
        self._node: Node | None = None

    def __call__(self) -> Node:
        if self._node is None:
            self._node = self._make()
        return self._node


def _patterns_of(cursor: Step, key: Key) -> Iterator[tuple[Pattern, Step, Sizes]]:
    """The dynamic steps after the cursor whose patterns a call fits, with its sizes."""
    for pattern, step in cursor.patterns or ():
        for full in (key, (*key, torch.get_default_dtype())):
            sizes = sizes_in(pattern, full)
            if sizes is not None:
                yield pattern, step, sizes


def _is_closed(cursor: Step, step: Step, key: Key, may_close: bool) -> bool:
    """Whether a call has an exact way where dynamic ones begin; it gets one if it has come often enough."""
    dynamic = step.dynamic
    assert dynamic is not None
    if dynamic.is_closed_to(key):
        return True
    entry = dynamic.known.get(key)
    if cursor.dynamic is not None or entry is None:
        return False
    entry.uses += 1
    if entry.uses < OFTEN:
        return False
    if not may_close:
        entry.uses = 0
        return False
    dynamic.close_to(key)
    return True


def _serves(
    step: Step, metas: tuple[TensorMeta, ...], sizes: Sizes, grow: Callable[[], Node]
) -> bool:
    """Whether a dynamic step serves a call."""
    assert step.dynamic is not None and step.node is not None
    key = (*metas, *sizes)
    if step.dynamic.find(key):
        return True
    node = grow()
    assert step.parent is not None
    is_first = step.parent.dynamic is None
    if not are_alike(node, step.node) or (is_first and node.line != step.node.line):
        return False
    step.dynamic.add(key, node.outs)
    return True


def make(
    cursor: Step, key: Key, node: Node, first_size: int, call: Call, trace: Any
) -> tuple[Key | Pattern, Node, Dynamic | None, Sizes]:
    """Key, node, what is dynamic and sizes of a new step after the cursor.

    Args:
        node: the node of the call.
        first_size: the number that the first size has among the scalars of the trace.
    """
    closed = any(
        step.dynamic is not None and step.dynamic.is_closed_to((*call.metas, *sizes))
        for _, step, sizes in _patterns_of(cursor, key)
    )
    pattern, twins = (None, ()) if closed else _pattern(cursor, key, node.line, call, trace)
    if pattern is None and cursor.dynamic is None:
        return key, node, None, ()
    sizes: Sizes = ()
    places: tuple[tuple[int, int], ...] | None = ()
    if pattern is not None:
        sizes = sizes_in(pattern, key) or ()
        schema = key[0] if isinstance(key[0], OpSchema) else None
        node, places = open_node(node, schema, pattern, call, first_size)
        key = pattern
    if cursor.dynamic is not None:
        known, infer = call.table(key, call, trace, node.outs)
    else:  # a table of its own: sizes that have an exact way must not be found here
        known, infer = {}, None
        for twin in twins:
            if _num_runs(twin) < OFTEN:
                cursor.drop(twin)
    dynamic = Dynamic(known, infer, places, len(sizes), twins)
    dynamic.add((*call.metas, *sizes), node.outs)
    if cursor.dynamic is not None and not twins:
        dynamic.num_alone = cursor.dynamic.num_alone + 1
        if dynamic.num_alone == _ASTRAY:
            _close_first(cursor, trace)
    return key, node, dynamic, sizes


def _close_first(cursor: Step, trace: Any) -> None:
    """Find the step where the dynamic way to the cursor begins; this run's call of it gets an exact way."""
    first = cursor
    while first.parent is not None and first.parent.dynamic is not None:
        first = first.parent
    dynamic, end = first.dynamic, first.num_scalars
    assert dynamic is not None
    sizes = tuple(trace.scalars[end - dynamic.num_sizes : end])
    given = {index: meta for index, _, _, meta in trace.inputs}
    metas = {given[index] for index, _ in first.inputs}
    for key in dynamic.known:
        of_metas = len(key) - dynamic.num_sizes
        if key[of_metas:] == sizes and metas.issubset(key[:of_metas]):
            dynamic.close_to(key)


def _pattern(
    cursor: Step, key: Key, line: str, call: Call, trace: Any
) -> tuple[Pattern | None, tuple[Step, ...]]:
    """The pattern of a new step, None if it has this key alone, and the steps at its place on other ways."""
    if not _may_vary(key):
        return None, ()
    ways = [cursor]
    fewest = _ALIKE
    if cursor.dynamic is not None:
        ways += cursor.dynamic.twins
        fewest = 1
    rows = [
        (other, step, joined(key, other, call.places))
        for way in ways
        for other, step in way.all_children()
        if other[0] is key[0] and (way is not cursor or _is_of_line(step, line))
    ]
    alike = [
        (num_any(pattern), other, step) for other, step, pattern in rows if pattern is not None
    ]
    nearest = sorted(alike, key=lambda row: row[0])[:fewest]
    if len(nearest) < fewest:
        return None, ()
    pattern: Pattern | None = key
    varying = _varying(trace, cursor)
    for _, other, _ in nearest:
        pattern = None if pattern is None else joined(pattern, other, call.places, varying)
    if pattern is None:
        return None, ()
    if num_any(pattern):
        differ = (n for _, other, _ in nearest for n in sizes_that_differ(key, other))
        _note_varying(trace, cursor, varying, differ)
        return pattern, tuple(step for _, _, step in nearest)
    return None, tuple(step for _, _, step in nearest)


def _is_of_line(step: Step, line: str) -> bool:
    """Whether a step was recorded at a line of the script: other lines do other things, which look alike by chance."""
    return step.node is not None and step.node.line == line


def _num_runs(step: Step) -> int:
    """How often a graph ran whose way leads through a step: of the one that ran most."""
    most, ways = 0, [step]
    while ways and most < OFTEN:
        way = ways.pop()
        most = max([most, *(program.runs for program in (way.programs or {}).values())])
        ways += [child for _, child in way.all_children()]
    return most


def _varying(trace: Any, cursor: Step) -> frozenset[int]:
    """Sizes of this run that are others in other runs: those of inputs, and those among the arguments.

    Small ones are left out: they are more often numbers of dims or of heads.
    """
    if cursor.dynamic is None:
        return frozenset()
    epoch, last, known = trace.varying
    if epoch != trace.epoch:
        last, known = None, frozenset()
    metas = {index: meta for index, _, _, meta in trace.inputs}
    found: set[int] = set()
    step: Step | None = cursor
    while step is not None and step is not last and step.dynamic is not None:
        for index, meta in step.inputs:
            if index in metas:
                pairs = zip(metas[index].size, meta.size, strict=False)
                found.update(n for n, other in pairs if n != other)
        end = step.num_scalars
        found.update(trace.scalars[end - step.dynamic.num_sizes : end])
        step = step.parent
    return _note_varying(trace, cursor, known, found)


def _note_varying(
    trace: Any, cursor: Step, known: frozenset[int], more: Iterable[int]
) -> frozenset[int]:
    known |= {n for n in more if n >= _FEWEST_OF_A_SIZE}
    trace.varying = trace.epoch, cursor, known
    return known


def _may_vary(key: Key) -> bool:
    """Whether a call may be one of many sizes."""
    schema = key[0]
    return not isinstance(schema, OpSchema) or may_vary(schema)
