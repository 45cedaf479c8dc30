"""The kinds of causes: a table of rules that look at a new graph beside the nearest known one.

Each rule gives what it has to say of the pair, or None. The first that speaks names the cause, the next may add to
it; where a difference is the consequence of another, only the other speaks. Comes from `difference`, in the words
of `wording`, goes to `explain`.
"""

from __future__ import annotations

import dataclasses
import functools
from collections import Counter
from collections.abc import Callable, Sequence

import torch

from ltc_core.debug import wording
from ltc_core.debug.difference import Difference
from ltc_core.debug.nearest import Known, KnownGraphs
from ltc_core.graph.ir import Graph, Node, TensorMeta, references
from ltc_core.settings import settings

__all__ = ["PAIR_KINDS", "Pair"]

_MOST = 0.9  # of the longer graph's ops are in both: they are one step, with differences
_SOME = 0.3  # less than this is in both: they are not the same step
_FEW = 4  # as many ops in both are no accident


@dataclasses.dataclass
class Pair:
    """A new graph beside the nearest of the known ones."""

    old: Known
    new: Known
    known: KnownGraphs
    found: Difference

    def judge(self) -> tuple[str, str]:
        """Return the kind and the sentence."""
        reasons: list[tuple[str, str]] = []
        for kind, rule in _RULES:
            if self.is_sibling and kind not in _OF_SIBLINGS:
                continue
            if len(reasons) == 2 or (reasons and kind in (reasons[0][0], *_ALONE)):
                continue
            text = rule(self)
            if text is not None:
                reasons.append((kind, text))
                if kind in _ALONE:
                    break
        sentence = "; also ".join(f"{kind}: {text}" for kind, text in reasons)
        return reasons[0][0], sentence

    @property
    def is_sibling(self) -> bool:
        """Whether both were cut from one recording."""
        return self.old.path is self.new.path

    @property
    def likeness(self) -> float:
        return self.found.aligned / max(len(self.old.ops), len(self.new.ops), 1)

    @property
    def is_alike(self) -> bool:
        """Whether it is worth while to say what differs."""
        aligned = self.found.aligned
        is_part = aligned >= _FEW and aligned >= len(self.new.ops) / 2
        return self.likeness >= _SOME or is_part

    @functools.cached_property
    def written(self) -> set[int]:
        """Values of the new graph that it writes over."""
        return {n for node in self.new.graph.nodes for n in node.writes}

    @functools.cached_property
    def state(self) -> list[int]:
        """Inputs of the new graph that it writes, and that the old one seems to have made."""
        extra = self.found.extra_inputs
        if not extra or not self.found.hunks or not self.written.issuperset(extra):
            return []
        made = Counter(_metas_made(self.old.graph))
        wanted = Counter(self.new.graph.inputs[n] for n in extra)
        if not wanted <= made:
            return []
        once, reader = self.found.hunks[0], self._first_reader(extra)
        is_new = once.old_from < once.old_to or _is_gradient(reader)
        return extra if is_new or not set(extra).isdisjoint(reader.writes) else []

    @functools.cached_property
    def state_reader(self) -> Node:
        """The first op that reads what is new among the inputs."""
        return self._first_reader(self.state)

    def _first_reader(self, numbers: Sequence[int]) -> Node:
        wanted = set(numbers)
        return next(n for n in self.new.graph.nodes if not wanted.isdisjoint(references(n)))

    @property
    def has_state_first(self) -> bool:
        """Whether the op that reads new state first also writes it, as optimizers do."""
        return bool(self.state) and not set(self.state).isdisjoint(self.state_reader.writes)


def _metas_made(graph: Graph) -> list[TensorMeta]:
    """List the metas of the outputs that are no new value of an input."""
    old_of = {n.first_write + k: old for n in graph.nodes for k, old in enumerate(n.writes)}
    metas = graph.metas()
    made = []
    for number in graph.outputs:
        root = number
        while root in old_of:
            root = old_of[root]
        if root not in graph.inputs:
            made.append(metas[number])
    return made


# -- the rules: each gives what it has to say of a pair, or None ------------------------------------


def _alive(pair: Pair) -> str | None:
    found = pair.found
    differs = bool(found.kept or found.dropped) and (pair.is_sibling or found.is_same_code)
    return wording.alive(pair.old, pair.new, found) if differs else None


def _given_up(pair: Pair) -> str | None:
    found = pair.found
    differs = bool(found.given_up or found.held) and (pair.is_sibling or found.is_same_code)
    return wording.given_up(pair.old, pair.new, found) if differs else None


def _evicted(pair: Pair) -> str | None:
    size = settings.compilation_cache_size
    if not pair.is_sibling or pair.old.num_other_outputs(pair.new) or pair.known.num_built < size:
        return None
    return (
        f"compile {pair.old.number} built this graph and it was dropped for others; "
        f"LTC_COMPILATION_CACHE_SIZE={size} allows no more"
    )


def _type_of_number(pair: Pair) -> str | None:
    """The first ops of their own are the same and so are the numbers of values: only a scalar is left."""
    at = pair.found.shared
    if not pair.found.is_same_code or pair.is_sibling or at == len(pair.new.graph.nodes):
        return None
    old, new = pair.old.graph.nodes[at], pair.new.graph.nodes[at]
    return wording.number(pair.old, new) if old.first == new.first else None


def _unused_ops(pair: Pair) -> str | None:
    if not pair.found.is_same_code:
        return None
    return (
        f"it does what compile {pair.old.number} did; what differs is used by nothing"
        f"{wording.cut(pair.new)}"
    )


def _new_state(pair: Pair) -> str | None:
    if not pair.has_state_first or _is_gradient(pair.state_reader):
        return None
    text = wording.state(pair.old, pair.state, pair.state_reader)
    return f"{text}, as after any first step"


def _gradients(pair: Pair) -> str | None:
    if not pair.state or not _is_gradient(pair.state_reader):
        return None
    return wording.state(pair.old, pair.state, pair.state_reader)


def _is_gradient(reader: Node) -> bool:
    in_backward = reader.line.endswith("in backward")
    return in_backward or reader.op._opname in ("zero_", "_foreach_zero_")


def _initialisation(pair: Pair) -> str | None:
    if not pair.state or pair.has_state_first:
        return None
    return wording.initialisation(pair.old, pair.state, pair.found.hunks[0])


def _changed_inputs(
    pair: Pair, is_changed: Callable[[TensorMeta, TensorMeta], bool], at_least: float
) -> str | None:
    changed = [c for c in pair.found.inputs if is_changed(c.old, c.new)]
    return wording.inputs(pair.new, changed) if changed and pair.likeness >= at_least else None


def _dtypes(pair: Pair, at_least: float = _MOST) -> str | None:
    return _changed_inputs(pair, lambda old, new: old.dtype != new.dtype, at_least)


def _is_resized(old: TensorMeta, new: TensorMeta) -> bool:
    return old.size != new.size and old.dtype == new.dtype


def _shapes_of_model(pair: Pair, at_least: float = _MOST) -> str | None:
    """A batch is what a step only reads, and the smaller part of what it reads."""
    changed = [c.number for c in pair.found.inputs if _is_resized(c.old, c.new)]
    many = len(changed) > 2 and len(changed) > len(pair.new.graph.inputs) / 2
    if not many and pair.written.isdisjoint(changed):
        return None
    return _changed_inputs(pair, _is_resized, at_least)


def _shapes_of_batch(pair: Pair, at_least: float = _MOST) -> str | None:
    if _shapes_of_model(pair, 0.0) is not None:
        return None
    return _changed_inputs(pair, _is_resized, at_least)


def _memory_format(pair: Pair, at_least: float = _MOST) -> str | None:
    return _changed_inputs(
        pair, lambda old, new: old.size == new.size and old.dtype == new.dtype, at_least
    )


def _cut_elsewhere(pair: Pair) -> str | None:
    hunks, last = pair.found.hunks, pair.known.last
    if not hunks or not pair.is_alike or pair.state:
        return None
    hunk = hunks[0]
    if last is not None and last.short_of == pair.old.number and hunk.new_from == 0:
        return wording.rest(pair.old, pair.new, last, pair.found.aligned)
    if len(hunks) > 1:
        return None
    if hunk.new_from == hunk.new_to and hunk.old_to == len(pair.old.ops):
        return wording.ends_early(pair.old, pair.new, hunk)
    is_longer = hunk.old_from == hunk.old_to == len(pair.old.ops)
    same_cut = (pair.old.reason, pair.old.line) == (pair.new.reason, pair.new.line)
    if not is_longer or same_cut:
        return None
    return wording.goes_on(pair.old, hunk, pair.new.graph.nodes[hunk.new_from])


def _new_code(pair: Pair) -> str | None:
    return None if pair.is_alike else wording.new_code(pair.new)


def _other_ops(pair: Pair) -> str | None:
    """What stands first differs first; where arguments do, they are told first."""
    hunks = pair.found.hunks
    if not hunks or pair.state or _cut_elsewhere(pair) is not None:
        return None
    arguments = pair.found.arguments
    if not pair.found.inputs and arguments and arguments[0].at < hunks[0].new_from:
        return None
    return wording.hunks(pair.old, pair.new, hunks)


def _arguments(pair: Pair, are_dtypes: bool) -> str | None:
    found = pair.found
    if not found.arguments or found.inputs or pair.state:
        return None
    is_dtype = isinstance(found.arguments[0].new, torch.dtype)
    return wording.arguments(found.arguments) if is_dtype == are_dtypes else None


def _operands(pair: Pair) -> str | None:
    found = pair.found
    if not found.operands or found.inputs or found.hunks or pair.state:
        return None
    return wording.operands(pair.old, found.operands)


def _results(pair: Pair, are_dtypes: bool) -> str | None:
    found = pair.found
    if not found.results or found.inputs:
        return None
    first = found.results[0]
    made = zip(first.old.outs, first.new.outs, strict=False)
    is_dtype = any(a is not b and a and b and a.dtype != b.dtype for a, b in made)
    return wording.results(found.results) if is_dtype == are_dtypes else None


# Kind -> the rule that finds it; the first comes first in the sentence.
_RULES: tuple[tuple[str, Callable[[Pair], str | None]], ...] = (
    ("values alive", _alive),
    ("inputs given up", _given_up),
    ("evicted", _evicted),
    ("type of a number", _type_of_number),
    ("unused ops", _unused_ops),
    ("new optimizer state", _new_state),
    ("gradients kept", _gradients),
    ("initialisation", _initialisation),
    ("dtypes", _dtypes),
    ("shapes of the model", _shapes_of_model),
    ("shapes of the batch", _shapes_of_batch),
    ("memory format", _memory_format),
    ("cut elsewhere", _cut_elsewhere),
    ("new code", _new_code),
    ("other ops", _other_ops),
    ("dtypes", functools.partial(_arguments, are_dtypes=True)),
    ("structural argument", functools.partial(_arguments, are_dtypes=False)),
    ("other operands", _operands),
    ("dtypes", functools.partial(_dtypes, at_least=0.0)),
    ("shapes of the model", functools.partial(_shapes_of_model, at_least=0.0)),
    ("shapes of the batch", functools.partial(_shapes_of_batch, at_least=0.0)),
    ("memory format", functools.partial(_memory_format, at_least=0.0)),
    ("dtypes", functools.partial(_results, are_dtypes=True)),
    ("other results", functools.partial(_results, are_dtypes=False)),
)
_OF_SIBLINGS = frozenset({"values alive", "inputs given up", "evicted", "unused ops"})

# Kinds that leave nothing to add, and are nothing to add.
_ALONE = frozenset(
    {"evicted", "type of a number", "unused ops", "new code", "other operands", "other results"}
)

PAIR_KINDS = tuple(dict.fromkeys(kind for kind, _ in _RULES))
