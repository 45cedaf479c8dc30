"""Why a program was built: the cause in one sentence, with the user's line.

`runtime.program_cache` calls `explain` at each cache miss. The new graph is compared with the nearest known one
(`nearest`, `difference`). The conditions that hold choose sentences from a table, the one that explains most first.
Sentences name programs by number and inputs by position. The metrics count causes as `CompileCause.<kind>`.
"""

from __future__ import annotations

import dataclasses
import itertools
import sys
import warnings
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from typing import Any

import torch

from ltc_core import metrics, source
from ltc_core.debug.difference import Change, Difference, compare
from ltc_core.debug.nearest import Known, KnownGraphs
from ltc_core.executors.inductor import tier_report
from ltc_core.graph.ir import Graph, Node, Ref, Scalar, TensorMeta, Write, references
from ltc_core.metrics_report import cause_counter
from ltc_core.program.novelty import novelty
from ltc_core.settings import settings

__all__ = ["KINDS", "Cause", "KnownGraphs", "explain", "on_compile"]

# Condition -> kind and sentence.
_TABLE = {
    # alone
    "first": "first graph: nothing was recorded before ({new.cut})",
    "forgotten": "forgotten: so many different ops were recorded that all graphs were dropped ({new.cut})",
    "eager": "eager: LTC_EAGER=1 runs each op by itself, here {node}",
    "part": "part of a step: it runs while the rest of the step is recorded, which may be quicker where each step is "
    "waited for; its {ops} begin with {node}",
    # the same code
    "kept": "values alive: {value} outlives the cut ({new.cut}), unlike in {old}{more}",
    "dropped": "values alive: {value} does not outlive the cut ({new.cut}), unlike in {old}{more}",
    "donated": "inputs still held: nothing holds the old {value} at the cut ({new.cut}), unlike in {old}{more}",
    "held": "inputs still held: the old {value} is still held at the cut ({new.cut}), unlike in {old}{more}",
    "evicted": "evicted: {old} built this graph and it was dropped for others; "
    "LTC_COMPILATION_CACHE_SIZE={size} allows no more",
    "scalar": "type of a number: {node} has a number of another type than in {old}",
    "unused": "unused ops: it does what {old} did; what differs is used by nothing ({new.cut})",
    # values that the old graph made are inputs
    "optimizer": "new optimizer state: {values} that {old} made {are} read from now on (first {node}), "
    "as after any first step",
    "gradients": "gradients kept: {values} that {old} made {are} read from now on (first {node})",
    "once": "initialisation: {ops} of {old}, first {node}, ran only once; "
    "{values} that it made are read from now on",
    # inputs
    "dtype": "dtypes: input {place}: {was} -> {now}, first read{at}{more}",
    "model": "shapes of the model: input {place}: {was} -> {size}, first read{at}{more}",
    "batch": "shapes of the batch: input {place}: {was} -> {size}, first read{at}{more}",
    "strides": "memory format: input {place}: {now} with strides {strides}, first read{at}{more}",
    # ops
    "rest": "cut elsewhere: it is what was left to do after {last.cut}: "
    "the last {ops} of {old}, from {node} on",
    "shorter": "cut elsewhere: {new.cut} ends it after {ops}; {old} went on for {num_old} more",
    "longer": "cut elsewhere: it goes on for {ops} where {old} was cut ({old.cut}), first {node}",
    "new": "new code: nothing like its {ops} was recorded before, the first is {node}",
    "missing": "other ops: {ops} of {old} missing, first {node}{more}",
    "added": "other ops: {ops} that {old} had not, first {node}{more}",
    "replaced": "other ops: {now} where {old} had {was}{more}",
    # nodes
    "argument dtype": "dtypes: {node}: {name} {was} -> {now}{more}",
    "argument": "argument: {node}: {name} {was} -> {now}{more}",
    "operands": "other operands: {node} reads other values than in {old}{more}",
    "result dtype": "dtypes: {node} makes {now} where it made {was}{more}",
    "result": "other results: {node} makes {now} where it made {was}{more}",
    "num results": "other results: {node} makes another number of values{more}",
}

# What cut a graph -> its condition, whatever was built before.
_ALONE = {"Eager": "eager", "Streaming": "part"}

_DYNAMIC = "it serves inputs of other sizes, too"

# Where graphs do not come again, the cause of one graph in so many is looked for.
_TOLD = 16
_OTHERS = "new each time"

KINDS = (
    *dict.fromkeys(sentence.partition(":")[0] for sentence in _TABLE.values()),
    _OTHERS,
    "unknown",
)

_SAME_STEP = 0.9  # of the ops are in both graphs: other inputs are why the rest differs
_MIN_ALIKE = 0.3  # of the ops are in both graphs, or ...
_MIN_PART = 4  # ... so many of them, and they are half of the new graph's
_LONGEST_ARGUMENT = 60

_numbers = itertools.count(1)
_Found = Iterator[tuple[str, dict[str, Any]]]  # conditions that hold, words of their sentences


@dataclasses.dataclass(frozen=True)
class Cause:
    """Why a program was built: number `number` of this process, compared with the one numbered `nearest`."""

    number: int
    kind: str  # one of KINDS; the sentence begins with it
    sentence: str
    nearest: int | None = None


latest: Cause | None = None  # of the last new program of this process


def explain(graph: Graph, known: KnownGraphs, reason: str, path: object) -> Cause:
    """Say why the program of a graph is built, count the cause, and add the graph to the known ones.

    Args:
        reason: what cut the graph: MarkStep, Wait, Item, GraphLimit, ...
        path: identifies the recording: the same object for each cut at the same place of it.

    Cost: 1 ms for 300 nodes, 50 ms for 20,000 if the nearest graph shares none of them; 4 ms more to find it among
    1024. Building their programs for the reference executor takes 2 ms and 150 ms.
    """
    global latest
    number = next(_numbers)
    if novelty.is_rule and number % _TOLD and not settings.explain:
        sentence = f"{_OTHERS}: no graph has come a second time lately; causes are looked for in one of {_TOLD}"
        metrics.count(cause_counter(_OTHERS))
        latest = Cause(number, _OTHERS, sentence)
        return latest
    new = Known(graph, number, reason, source.user_line(), path)
    try:
        cause = _cause(new, known)
    except Exception as error:  # a training run must not end because a program has no explanation
        warnings.warn(
            f"the cause of a new program cannot be told: {error!r}; report this", stacklevel=2
        )
        cause = Cause(new.number, "unknown", f"unknown: {error!r}")
    if graph.dynamic:
        cause = dataclasses.replace(cause, sentence=f"{cause.sentence}; {_DYNAMIC}")
    new.short_of = cause.nearest if cause.kind == "cut elsewhere" else None
    known.add(new)
    metrics.count(cause_counter(cause.kind))
    latest = cause
    return cause


def on_compile(cause: Cause) -> None:
    """Print the cause of a new program if LTC_EXPLAIN asks for it."""
    if settings.explain:
        print(f"[ltc] program {cause.number}: {cause.sentence}", file=sys.stderr)


def at_exit() -> None:
    """Print how each graph ran, and how it runs at the end, if LTC_EXPLAIN asks for it."""
    if settings.explain:
        for line in tier_report.graph_lines():
            print(f"[ltc] {line}", file=sys.stderr)


def _cause(new: Known, known: KnownGraphs) -> Cause:
    """The first condition that holds is the cause; the first of another kind is added to its sentence."""
    old = known.nearest(new) if len(known) and new.reason not in _ALONE else None
    said: dict[str, str] = {}
    for condition, words in _conditions(new, old, known):
        sentence = _TABLE[condition].format(old=old, new=new, **words)
        said.setdefault(sentence.partition(":")[0], sentence)
        if len(said) == 2:
            break
    nearest = None if old is None else old.number
    return Cause(new.number, next(iter(said)), "; also ".join(said.values()), nearest)


# -- conditions ------------------------------------------------------------------------------------


def _conditions(new: Known, old: Known | None, known: KnownGraphs) -> _Found:
    """The conditions that hold for a new graph and the nearest known one; what explains most comes first."""
    alone = _ALONE.get(new.reason)
    if alone is not None:
        yield alone, {"ops": _count(new.graph.nodes, "op"), "node": _place(new.graph.nodes[0])}
        return
    if old is None:
        yield "forgotten" if known.num_built else "first", {}
        return
    nodes = new.graph.nodes
    d = compare(old, new)
    if d.is_same_code:
        yield from _same_code(d, known)
        return
    state = list(_state(d))
    yield from state
    likeness = d.num_aligned / max(len(old.ops), len(nodes))
    is_part = d.num_aligned >= max(_MIN_PART, len(nodes) / 2)
    if not state and likeness < _MIN_ALIKE and not is_part:
        yield "new", {"ops": _count(nodes, "op"), "node": _place(nodes[0])}
        return
    if likeness >= _SAME_STEP:
        yield from _inputs(d)
    if d.hunks and not state:
        yield from _hunks(d, known.last)
    yield from _inputs(d) if d.inputs else _nodes(d, bool(state))


def _same_code(d: Difference, known: KnownGraphs) -> _Found:
    """Other outputs or donated inputs; without them, the graph of another compile or nearly that."""
    for (by_new, by_old), (only_new, only_old), noun in (
        (("kept", "dropped"), d.outputs, "value"),
        (("donated", "held"), d.donated, "input"),
    ):
        more = _more([*only_new, *only_old], noun)
        if only_new:
            yield by_new, {"value": _value(d.new.graph, only_new[0]), "more": more}
        elif only_old:
            yield by_old, {"value": _value(d.old.graph, only_old[0]), "more": more}
    if any((*d.outputs, *d.donated)):
        return
    size = settings.compilation_cache_size
    if d.old.path is d.new.path and known.num_built >= size:
        yield "evicted", {"size": size}
    elif d.first_pair and d.first_pair[0].first == d.first_pair[1].first:
        yield "scalar", {"node": _place(d.first_pair[1])}  # all but the types of scalars is equal
    else:
        yield "unused", {}


def _state(d: Difference) -> _Found:
    """Inputs without a partner, if the graph writes them and the old one seems to have made them."""
    graph, extra = d.new.graph, set(d.extra_inputs)
    metas = Counter(graph.inputs[n] for n in extra)
    if not (d.hunks and extra and extra <= _written(graph) and metas <= _made(d.old.graph)):
        return
    removed = d.old.graph.nodes[d.hunks[0].old_from : d.hunks[0].old_to]
    reader = next(node for node in graph.nodes if not extra.isdisjoint(references(node)))
    are = "is" if len(extra) == 1 else "are"
    words = {"values": _count(extra, "value"), "are": are, "node": _place(reader)}
    is_written = not extra.isdisjoint(reader.writes)  # as optimizers do
    if reader.op._opname in ("zero_", "_foreach_zero_") or reader.line.endswith("in backward"):
        yield "gradients", words
    elif is_written:
        yield "optimizer", words
    if removed and not is_written:
        yield "once", {**words, "ops": _count(removed, "op"), "node": _place(removed[0])}


def _written(graph: Graph) -> set[int]:
    return {n for node in graph.nodes for n in node.writes}


def _made(graph: Graph) -> Counter[TensorMeta]:
    """Metas of the outputs that are no new value of an input."""
    taken = set(graph.inputs)
    for node in graph.nodes:
        taken |= {node.first_write + k for k, old in enumerate(node.writes) if old in taken}
    metas = graph.metas()
    return Counter(metas[n] for n in graph.outputs if n not in taken)


def _inputs(d: Difference) -> _Found:
    """Changed inputs; a batch is what the graph only reads, and the smaller part of the inputs."""
    inputs = d.new.graph.inputs
    same_dtype = [c for c in d.inputs if c.old.dtype == c.new.dtype]
    resized = [c for c in same_dtype if c.old.size != c.new.size]
    is_most = len(resized) > max(2, len(inputs) / 2)
    is_model = is_most or not _written(d.new.graph).isdisjoint(c.key for c in resized)
    for condition, changes in (
        ("dtype", [c for c in d.inputs if c.old.dtype != c.new.dtype]),
        ("model" if is_model else "batch", resized),
        ("strides", [c for c in same_dtype if c.old.size == c.new.size]),
    ):
        if changes:
            old, new = changes[0].old, changes[0].new
            words = _first(changes, "input") | {"place": list(inputs).index(changes[0].key)}
            words["strides"] = f"{list(old.stride)} -> {list(new.stride)}"
            yield condition, {**words, "size": list(new.size)}


def _hunks(d: Difference, last: Known | None) -> _Found:
    """The place where ops differ first."""
    hunk, nodes = d.hunks[0], d.new.graph.nodes
    olds = d.old.graph.nodes[hunk.old_from : hunk.old_to]
    news = nodes[hunk.new_from : hunk.new_to]
    is_tail = len(d.hunks) == 1 and hunk.old_to == len(d.old.ops)
    ops, first = _count(news or olds, "op"), _place((news or olds)[0])
    words = {"ops": ops, "node": first, "more": _more(d.hunks, "place")}
    if last is not None and last.short_of == d.old.number and hunk.new_from == 0:
        ops = _count(range(d.num_aligned), "op")
        yield "rest", {"last": last, "ops": ops, "node": _place(nodes[0])}
    elif is_tail and not news:
        yield "shorter", {"ops": _count(nodes, "op"), "num_old": len(olds)}
    elif is_tail and not olds and d.old.cut != d.new.cut:
        yield "longer", words
    elif not d.inputs and d.arguments and d.arguments[0].at < hunk.new_from:
        return  # the changed argument explains the ops after it
    elif not news or not olds:
        yield "added" if news else "missing", words
    else:
        was, now = _op(olds[0]), _op(news[0])
        if was == now:  # other overloads
            was, now = (str(node.op).replace(".", "::", 1) for node in (olds[0], news[0]))
        yield "replaced", {**words, "was": was + _at(olds[0]), "now": now + _at(news[0])}


def _nodes(d: Difference, has_state: bool) -> _Found:
    """Arguments, operands or results of aligned nodes that read inputs of the same shapes."""
    if d.arguments and not has_state:
        old, new = d.arguments[0].old, d.arguments[0].new
        words = _first(d.arguments, "argument") | {"was": _argument(old), "now": _argument(new)}
        yield "argument dtype" if isinstance(new, torch.dtype) else "argument", words
    elif d.operands and not d.hunks:
        yield "operands", _first(d.operands, "op")
        return
    if d.results:
        outs = zip(d.results[0].old, d.results[0].new, strict=False)
        pairs = [(old, new) for old, new in outs if old is not new]
        was, now = pairs[0] if pairs else (None, None)
        words = _first(d.results, "op") | {"was": was, "now": now}
        if any(old and new and old.dtype != new.dtype for old, new in pairs):
            yield "result dtype", words
        elif not (d.hunks or d.arguments):
            yield "result" if pairs else "num results", words


# -- words -----------------------------------------------------------------------------------------


def _op(node: Node) -> str:
    return node.op._schema.name


def _at(node: Node) -> str:
    return f" at {node.line}" if node.line else ""


def _place(node: Node) -> str:
    """A node in words: 'aten::view at train.py:20'."""
    return _op(node) + _at(node)


def _count(items: Collection[Any], noun: str) -> str:
    return f"{len(items)} {noun}" if len(items) == 1 else f"{len(items)} {noun}s"


def _more(items: Sequence[Any], noun: str) -> str:
    """The items after the first: ' (and 2 more inputs)'."""
    return f" (and {_count(items[1:], f'more {noun}')})" if len(items) > 1 else ""


def _first(changes: Sequence[Change], noun: str) -> dict[str, Any]:
    """Words for the first of several changes."""
    _, node, old, new, key = changes[0]
    words = {"node": _place(node), "at": _at(node), "was": old, "now": new, "name": key}
    return {**words, "more": _more(changes, noun)}


def _value(graph: Graph, number: int) -> str:
    for node in graph.nodes:
        if node.first <= number < node.first + len(node.outs):
            return f"{node.outs[number - node.first]} of {_place(node)}"
    reader = next((node for node in graph.nodes if number in references(node)), None)
    read = f", first read{_at(reader)}" if reader is not None else ""
    return f"input {list(graph.inputs).index(number)} ({graph.inputs[number]}{read})"


def _argument(value: Any) -> str:
    if isinstance(value, Ref | Write):
        return "a tensor"
    if isinstance(value, Scalar):
        return "a number"
    if isinstance(value, list):  # of tensors or numbers; structure is in tuples
        return f"a list of {len(value)}"
    text = repr(list(value) if isinstance(value, tuple) else value)
    return text if len(text) <= _LONGEST_ARGUMENT else f"{text[:_LONGEST_ARGUMENT]}..."
