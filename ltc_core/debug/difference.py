"""The difference between two graphs: nodes aligned by op, values paired by the nodes that read and make them.

Value numbers shift after the first difference of two recordings, so numbers are compared only while the graphs share
`Node` objects: graphs of one recording, or of two with the same beginning. Shared nodes are not read.
`explain` explains a difference.
"""

from __future__ import annotations

import dataclasses
import itertools
import sys
from collections.abc import Sequence
from typing import Any, NamedTuple

from ltc_core.debug.nearest import Known, common_prefix, common_suffix
from ltc_core.graph.ir import Node, Ref, Scalar

__all__ = ["Change", "Difference", "Hunk", "align", "compare"]

_WINDOWS = (16, 6)  # equal ops in a row that end a hunk; 6 only if there are no 16
_MAX_HUNKS = 16
_MAX_TRIES = 32

Sides = tuple[Sequence[int], Sequence[int]]  # values of the new graph only, of the old graph only


class Hunk(NamedTuple):
    """Ops `old_from:old_to` of the old graph stand where the new graph has `new_from:new_to`."""

    old_from: int
    old_to: int
    new_from: int
    new_to: int


class Change(NamedTuple):
    """What changed at a node, the new graph's `nodes[at]`: an input, an argument, operands or results."""

    at: int
    node: Node
    old: Any
    new: Any
    key: Any = None  # the input's number in the new graph, or the argument's name


@dataclasses.dataclass
class Difference:
    """What a new graph has in common with an old one, and what differs."""

    old: Known
    new: Known
    num_aligned: int = 0  # nodes of the new graph with a partner in the old one
    first_pair: tuple[Node, Node] | None = None  # the first aligned nodes that are not shared
    hunks: list[Hunk] = dataclasses.field(default_factory=list)
    inputs: list[Change] = dataclasses.field(default_factory=list)  # of shape, stride or dtype
    arguments: list[Change] = dataclasses.field(default_factory=list)
    operands: list[Change] = dataclasses.field(default_factory=list)
    results: list[Change] = dataclasses.field(default_factory=list)
    extra_inputs: Sequence[int] = ()  # of the new graph, without a partner
    outputs: Sides = ((), ())
    donated: Sides = ((), ())

    @property
    def is_same_code(self) -> bool:
        """Whether the graphs differ at most in outputs, donated inputs and the types of scalars."""
        return not (self.hunks or self.inputs or self.arguments or self.operands or self.results)


def compare(old: Known, new: Known) -> Difference:
    """Compare two graphs. Cost: about 3 us for each node that they do not share."""
    i, j, num_values = _shared(old, new)
    blocks, hunks = align(old.ops, new.ops, i, j)
    found = Difference(old, new, j + sum(length for *_, length in blocks), hunks=hunks)
    walk = _Walk(found, num_values)
    for i, j, length in blocks:
        found.first_pair = found.first_pair or (old.graph.nodes[i], new.graph.nodes[j])
        for k in range(length):
            walk.visit(old.graph.nodes[i + k], new.graph.nodes[j + k], j + k)
    walk.finish()
    return found


def _shared(old: Known, new: Known) -> tuple[int, int, int]:
    """Find the last shared node: nodes of old and of new up to it, and values numbered up to it.

    A node before it that only one graph has is no hunk: only the outputs of that graph need it.
    """
    olds, news = old.graph.nodes, new.graph.nodes
    if old.path is new.path:
        return len(olds), len(news), sys.maxsize
    place = {id(node): k for k, node in enumerate(olds, 1)}
    for k in range(len(news), 0, -1):
        node = news[k - 1]
        if id(node) in place:
            return place[id(node)], k, node.first + len(node.outs)
    return 0, 0, 0


def align(a: str, b: str, i: int = 0, j: int = 0) -> tuple[list[tuple[int, int, int]], list[Hunk]]:
    """Align `a[i:]` with `b[j:]`: equal blocks (in a, in b, length), and the hunks between them.

    Cost: linear for each hunk; what comes after 16 hunks is one hunk.
    """
    blocks: list[tuple[int, int, int]] = []
    hunks: list[Hunk] = []
    while (rest := (a[i:], b[j:])) != ("", ""):
        if num_same := common_prefix(*rest):
            blocks.append((i, j, num_same))
            skip = num_same, num_same
        else:
            skip = _skip(*rest) if len(hunks) < _MAX_HUNKS else (len(rest[0]), len(rest[1]))
            hunks.append(Hunk(i, i + skip[0], j, j + skip[1]))
        i, j = i + skip[0], j + skip[1]
    return blocks, hunks


def _skip(a: str, b: str) -> tuple[int, int]:
    """How much of `a` and of `b` to skip until they are equal again: the least that is found."""
    for window in _WINDOWS:
        best = nothing = len(a), len(b)
        for k in range(_MAX_TRIES):
            if k >= sum(best):
                break
            in_a, in_b = _find(a, b[k : k + window], window), _find(b, a[k : k + window], window)
            found = [skip for skip in ((in_a, k), (k, in_b)) if min(skip) >= 0]
            best = min([best, *found], key=sum)
        if best != nothing:
            return best
    tail = common_suffix(a, b)
    return len(a) - tail, len(b) - tail


def _find(text: str, part: str, length: int) -> int:
    return text.find(part) if len(part) == length else -1


class _Walk:
    """Compares aligned nodes in order; a value is paired at the first node that reads or makes it."""

    def __init__(self, found: Difference, num_shared: int) -> None:
        self._found = found
        self._num_shared = num_shared  # values below it have the same number in both graphs
        self._new_of: dict[int, int] = {}  # number in the old graph -> in the new one
        self._paired: set[int] = set()  # inputs of the new graph

    def visit(self, old: Node, new: Node, at: int) -> None:
        """Compare two nodes of the same op; `at` is the new one's place."""
        found = self._found
        values: list[tuple[int, int]] = []
        for k, (was, now) in enumerate(itertools.zip_longest(old.args, new.args)):
            if not _is_same(was, now, values):
                names = [argument.name for argument in new.op._schema.arguments]
                name = names[k] if k < len(names) else str(k)
                found.arguments.append(Change(at, new, was, now, name))
        for name in {**old.kwargs, **new.kwargs}:
            was, now = old.kwargs.get(name), new.kwargs.get(name)
            if not _is_same(was, now, values):
                found.arguments.append(Change(at, new, was, now, name))
        values += zip(old.writes, new.writes, strict=False)
        if False in [self._pair(was, now, new, at) for was, now in values]:
            found.operands.append(Change(at, new, old, new))
        for k in range(min(len(old.outs), len(new.outs))):
            self._new_of[old.first + k] = new.first + k
        if old.outs != new.outs:
            found.results.append(Change(at, new, old.outs, new.outs))

    def _pair(self, was: int, now: int, reader: Node, at: int) -> bool:
        """Whether two values are the same one; two inputs are, if neither was paired before."""
        known = self._number(was)
        if known == now:
            return True
        olds, news = self._found.old.graph.inputs, self._found.new.graph.inputs
        are_inputs = known is None and was in olds and now in news and self._is_free(now)
        if are_inputs:
            self._paired.add(now)
            if olds[was] is not news[now]:
                self._found.inputs.append(Change(at, reader, olds[was], news[now], now))
        if was >= self._num_shared:
            self._new_of[was] = now
        return are_inputs

    def _number(self, old: int) -> int | None:
        return old if old < self._num_shared else self._new_of.get(old)

    def _is_free(self, new: int) -> bool:
        return new >= self._num_shared and new not in self._paired

    def finish(self) -> None:
        """Compare outputs and donated inputs, and list the inputs without a partner."""
        found, old, new = self._found, self._found.old.graph, self._found.new.graph
        found.extra_inputs = [n for n in new.inputs if self._is_free(n)]
        found.outputs = self._sides(old.outputs, new.outputs)
        found.donated = self._sides(sorted(old.donated), sorted(new.donated))

    def _sides(self, old: Sequence[int], new: Sequence[int]) -> Sides:
        number = {n: self._number(n) for n in old}
        olds, news = {*number.values()}, {*new}
        return [n for n in new if n not in olds], [n for n in old if number[n] not in news]


def _is_same(was: Any, now: Any, values: list[tuple[int, int]]) -> bool:
    """Whether two arguments have the same structure; pairs of values in them are added to `values`."""
    kind = type(was)
    if kind is not type(now):
        return False
    if kind is Ref:
        values.append((was, now))
        return True
    if kind is list or kind is tuple:
        if len(was) != len(now):
            return False
        return False not in [_is_same(*pair, values) for pair in zip(was, now, strict=True)]
    return kind is Scalar or was is now or bool(was == now)
