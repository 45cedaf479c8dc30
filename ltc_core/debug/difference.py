"""What differs between two graphs, found by aligning their nodes.

Value numbers shift where two recordings part, so values are compared by place: nodes are paired by their ops in
order, inputs as pairs of nodes read them. Nodes of one recording are the same objects in all graphs cut from it:
what two graphs begin with in common needs no look. Comes from `nearest`, goes to `explain`.
"""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

from ltc_core.debug.nearest import Known, common_prefix, common_suffix
from ltc_core.graph.ir import Node, Ref, Scalar, TensorMeta, Write

__all__ = ["ArgumentChange", "Difference", "Hunk", "InputChange", "NodeChange", "align", "compare"]

_WINDOWS = (16, 6)  # ops that must be equal in a row to go on after a place that differs
_MAX_HUNKS = 16
_MAX_TRIES = 32


class Hunk(NamedTuple):
    """Ops `old_from:old_to` of the old graph stand where the new one has `new_from:new_to`."""

    old_from: int
    old_to: int
    new_from: int
    new_to: int


class InputChange(NamedTuple):
    """An input of another size, stride or dtype; `number` is the new graph's, `reader` its first one there."""

    number: int
    old: TensorMeta
    new: TensorMeta
    reader: Node


class ArgumentChange(NamedTuple):
    """A structural argument of the node at `at` of the new graph."""

    at: int
    node: Node
    name: str
    old: Any
    new: Any


class NodeChange(NamedTuple):
    """Two aligned nodes, the new one at `at`."""

    at: int
    old: Node
    new: Node


@dataclasses.dataclass(slots=True)
class Difference:
    """What `compare` found.

    Attributes:
        shared: nodes of the new graph up to the last that is of the same recording as the old graph's.
        aligned: nodes of the new graph that have a partner in the old one.
        hunks: where one graph has ops that the other has not, after what is shared.
        inputs: paired inputs of other metas, in the order they are read.
        arguments, operands, results: aligned nodes that have another structure, read other values, or make
            something else.
        extra_inputs: inputs of the new graph without a partner.
        kept, dropped: outputs of the new graph only, of the old graph only.
        given_up, held: inputs whose old value only the new, only the old graph's program may overwrite.
    """

    shared: int = 0
    aligned: int = 0
    hunks: list[Hunk] = dataclasses.field(default_factory=list)
    inputs: list[InputChange] = dataclasses.field(default_factory=list)
    arguments: list[ArgumentChange] = dataclasses.field(default_factory=list)
    operands: list[NodeChange] = dataclasses.field(default_factory=list)
    results: list[NodeChange] = dataclasses.field(default_factory=list)
    extra_inputs: list[int] = dataclasses.field(default_factory=list)
    kept: list[int] = dataclasses.field(default_factory=list)
    dropped: list[int] = dataclasses.field(default_factory=list)
    given_up: list[int] = dataclasses.field(default_factory=list)
    held: list[int] = dataclasses.field(default_factory=list)

    @property
    def is_same_code(self) -> bool:
        """Whether the graphs do the same, but for what is alive at the end."""
        return not (self.hunks or self.inputs or self.arguments or self.operands or self.results)


def compare(old: Known, new: Known) -> Difference:
    """Say what differs. Cost: about 3 us for each node that is not of the same recording."""
    found = Difference()
    old_from, new_from, numbers = _shared(old.graph.nodes, new.graph.nodes)
    walk = _Walk(old, new, numbers, found)
    found.shared = new_from
    found.aligned = new_from
    blocks, found.hunks = align(old.ops, new.ops, old_from, new_from)
    for i, j, n in blocks:
        found.aligned += n
        for k in range(n):
            walk.pair(old.graph.nodes[i + k], new.graph.nodes[j + k], j + k)
    walk.finish()
    return found


def _shared(old: tuple[Node, ...], new: tuple[Node, ...]) -> tuple[int, int, int]:
    """Find the end of what is of one recording: (nodes of old, nodes of new, values numbered until there).

    A node that only one of them has before that end was needed by its outputs alone.
    """
    place = {id(node): k for k, node in enumerate(old)}
    for k in range(len(new) - 1, -1, -1):
        at = place.get(id(new[k]))
        if at is not None:
            return at + 1, k + 1, new[k].first + len(new[k].outs)
    return 0, 0, 0


# -- aligning --------------------------------------------------------------------------------------


def align(a: str, b: str, i: int = 0, j: int = 0) -> tuple[list[tuple[int, int, int]], list[Hunk]]:
    """Pair what is equal of `a[i:]` and `b[j:]`: blocks (in a, in b, length), and the hunks between them.

    Cost: linear for each hunk, at most 16 of them; what comes after is one hunk.
    """
    blocks: list[tuple[int, int, int]] = []
    hunks: list[Hunk] = []
    while True:
        n = common_prefix(a[i:], b[j:])
        if n:
            blocks.append((i, j, n))
        i, j = i + n, j + n
        if i == len(a) and j == len(b):
            break
        next_i, next_j = len(a), len(b)
        if i < len(a) and j < len(b) and len(hunks) < _MAX_HUNKS:
            next_i, next_j = _resume(a, b, i, j)
        hunks.append(Hunk(i, next_i, j, next_j))
        i, j = next_i, next_j
    return blocks, hunks


def _resume(a: str, b: str, i: int, j: int) -> tuple[int, int]:
    """Find where `a` and `b` are equal again after (i, j), with as little as possible between."""
    tail = common_suffix(a[i:], b[j:])
    for window in _WINDOWS:
        best: tuple[int, int] | None = None
        for skipped in range(_MAX_TRIES):
            if best is not None and skipped >= sum(best):
                break
            for found in (
                _find(a, b, i, j + skipped, window, i, j),
                _find(b, a, j, i + skipped, window, j, i, swapped=True),
            ):
                if found is not None and (best is None or sum(found) < sum(best)):
                    best = found
        if best is not None:
            return i + best[0], j + best[1]
    return len(a) - tail, len(b) - tail


def _find(
    text: str, other: str, start: int, at: int, window: int, i: int, j: int, swapped: bool = False
) -> tuple[int, int] | None:
    """Look for `other[at:at + window]` in `text` from `start`; gives the skipped (of a, of b)."""
    if at + window > len(other):
        return None
    found = text.find(other[at : at + window], start)
    if found < 0:
        return None
    skipped = (found - i, at - j)
    return (skipped[1], skipped[0]) if swapped else skipped


# -- comparing aligned nodes -----------------------------------------------------------------------


class _Walk:
    """Compares pairs of nodes in order, and learns which values are the same ones by that."""

    def __init__(self, old: Known, new: Known, shared_numbers: int, found: Difference) -> None:
        self._old = old.graph
        self._new = new.graph
        self._shared = shared_numbers
        self._found = found
        self._of: dict[int, int] = {}  # number in old -> number in new
        self._paired: set[int] = set()  # inputs of new
        self._at = 0
        self._pair: tuple[Node, Node] | None = None

    def pair(self, old: Node, new: Node, at: int) -> None:
        """Compare two nodes of the same op; `at` is the new one's place."""
        self._at = at
        self._pair = (old, new)
        for k in range(max(len(old.args), len(new.args))):
            x = old.args[k] if k < len(old.args) else None
            y = new.args[k] if k < len(new.args) else None
            if not self._same(x, y):
                self._argument(k, x, y)
        for name in {**old.kwargs, **new.kwargs}:
            if not self._same(old.kwargs.get(name), new.kwargs.get(name)):
                self._argument(name, old.kwargs.get(name), new.kwargs.get(name))
        for x, y in zip(old.writes, new.writes, strict=False):
            self._value(x, y)
        same = len(old.outs) == len(new.outs)
        for k, (x_meta, y_meta) in enumerate(zip(old.outs, new.outs, strict=False)):
            self._of[old.first + k] = new.first + k
            same = same and x_meta is y_meta
        if not same:
            self._found.results.append(NodeChange(at, old, new))

    def _argument(self, where: int | str, old: Any, new: Any) -> None:
        assert self._pair is not None
        node = self._pair[1]
        arguments = node.op._schema.arguments
        known = isinstance(where, int) and where < len(arguments)
        name = arguments[where].name if known else str(where)  # type: ignore[index]
        self._found.arguments.append(ArgumentChange(self._at, node, name, old, new))

    def _same(self, x: Any, y: Any) -> bool:
        """Whether two arguments have the same structure; what they refer to is compared by the way."""
        kind = type(x)
        if kind is not type(y):
            return False
        if kind is Ref:
            self._value(x, y)
            return True
        if kind is Scalar:
            return True
        if kind is Write:
            return bool(x.base == y.base and x.lens == y.lens)
        if kind is list or kind is tuple:
            if len(x) != len(y):
                return False
            same = [self._same(i, k) for i, k in zip(x, y, strict=True)]  # all of them: no all(...)
            return False not in same
        return x is y or bool(x == y)

    def _number(self, old: int) -> int | None:
        return old if old < self._shared else self._of.get(old)

    def _value(self, x: int, y: int) -> None:
        known = self._number(x)
        if known == y:
            return
        assert self._pair is not None
        before, now = self._old.inputs.get(x), self._new.inputs.get(y)
        if known is None and before is not None and now is not None and self._is_free(y):
            self._paired.add(y)
            if before is not now:
                self._found.inputs.append(InputChange(int(y), before, now, self._pair[1]))
        else:
            operands = self._found.operands
            if not operands or operands[-1].at != self._at:
                operands.append(NodeChange(self._at, *self._pair))
        if x >= self._shared:
            self._of[x] = int(y)

    def _is_free(self, y: int) -> bool:
        return y >= self._shared and y not in self._paired

    def finish(self) -> None:
        """Compare what is left: inputs without a partner, outputs, inputs given up."""
        found, old, new = self._found, self._old, self._new
        found.extra_inputs = [n for n in new.inputs if self._is_free(n)]
        found.kept, found.dropped = self._sides(old.outputs, new.outputs)
        old_donated, new_donated = sorted(old.donated), sorted(new.donated)
        found.given_up, found.held = self._sides(old_donated, new_donated)

    def _sides(self, old: Any, new: Any) -> tuple[list[int], list[int]]:
        """Return the values that only the new side has, and those that only the old one has."""
        number = {n: self._number(n) for n in old}
        theirs, ours = set(number.values()), set(new)
        return [n for n in new if n not in theirs], [n for n in old if number[n] not in ours]
