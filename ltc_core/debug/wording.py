"""The words of causes: what `explain` found, as a part of a sentence with the user's line.

In come a new graph, the known one it is beside and what differs; out goes text. Compiles are named by number, inputs
by their place in the new graph, counted from 0.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ltc_core.debug.difference import ArgumentChange, Difference, Hunk, InputChange, NodeChange
from ltc_core.debug.nearest import Known
from ltc_core.graph.ir import Graph, Node, Ref, Scalar, TensorMeta, Write, references

_LONGEST_ARGUMENT = 60


def cut(known: Known) -> str:
    """Text such as ' (MarkStep at train.py:38)'."""
    return f" ({_cut(known)})"


def _cut(known: Known) -> str:
    return f"{known.reason}{_at(known.line)}"


def first(known: Known) -> str:
    """Text such as 'aten::view at train.py:20', the first op of a graph."""
    return _place(known.graph.nodes[0])


def _at(line: str) -> str:
    return f" at {line}" if line else ""


def _op(node: Node) -> str:
    return node.op._schema.name


def _place(node: Node) -> str:
    return f"{_op(node)}{_at(node.line)}"


def _more(number: int, word: str) -> str:
    """Text such as ' (and 2 more inputs)', or nothing for 0."""
    return f" (and {_counted(number, f'more {word}')})" if number > 0 else ""


def _counted(number: int, word: str) -> str:
    return f"{number} {word}" if number == 1 else f"{number} {word}s"


def _change(old: TensorMeta, new: TensorMeta) -> str:
    if old.size == new.size and old.dtype == new.dtype:
        return f"{new} with strides {list(old.stride)} -> {list(new.stride)}"
    text = str(new)
    return f"{old} -> {text if old.dtype != new.dtype else list(new.size)}"


# -- inputs and values -----------------------------------------------------------------------------


def inputs(new: Known, changes: Sequence[InputChange]) -> str:
    first = changes[0]
    place = list(new.graph.inputs).index(first.number)
    return (
        f"input {place}: {_change(first.old, first.new)}, first read{_at(first.reader.line)}"
        f"{_more(len(changes) - 1, 'input')}"
    )


def alive(old: Known, new: Known, found: Difference) -> str:
    """Which values are outputs of only one of the graphs."""
    if found.kept:
        value, outlives = _value(new.graph, found.kept[0]), "outlives"
    else:
        value, outlives = _value(old.graph, found.dropped[0]), "does not outlive"
    more = _more(len(found.kept) + len(found.dropped) - 1, "value")
    return f"{value} {outlives} the cut{cut(new)}, unlike at compile {old.number}{more}"


def given_up(old: Known, new: Known, found: Difference) -> str:
    """Which inputs only one of the programs may overwrite."""
    if found.given_up:
        value, is_held = _input(new.graph, found.given_up[0]), "is given up"
    else:
        value, is_held = _input(old.graph, found.held[0]), "is still held"
    more = _more(len(found.given_up) + len(found.held) - 1, "input")
    return (
        f"the old value of {value} {is_held} at the cut{cut(new)}, unlike at compile "
        f"{old.number}{more}"
    )


def _value(graph: Graph, number: int) -> str:
    for node in graph.nodes:
        if node.first <= number < node.first + len(node.outs):
            return f"{node.outs[number - node.first]} of {_place(node)}"
    return _input(graph, number)


def _input(graph: Graph, number: int) -> str:
    reader = next((node for node in graph.nodes if number in references(node)), None)
    read = f", first read{_at(reader.line)}" if reader is not None else ""
    return f"input {list(graph.inputs).index(number)} ({graph.inputs[number]}{read})"


def state(old: Known, numbers: Sequence[int], reader: Node) -> str:
    """Say that values which another graph made are inputs of this one."""
    return (
        f"{_counted(len(numbers), 'value')} that compile {old.number} made {'is' if len(numbers) == 1 else 'are'} "
        f"read from now on (first {_place(reader)})"
    )


def number(old: Known, node: Node) -> str:
    return f"{_place(node)} has a number of another type than in compile {old.number}"


def initialisation(old: Known, numbers: Sequence[int], once: Hunk) -> str:
    node = old.graph.nodes[once.old_from]
    return (
        f"{_counted(once.old_to - once.old_from, 'op')} of compile {old.number}, first {_place(node)}, "
        f"ran only once; {_counted(len(numbers), 'value')} that it made are read from now on"
    )


# -- ops -------------------------------------------------------------------------------------------


def ends_early(old: Known, new: Known, hunk: Hunk) -> str:
    missing = hunk.old_to - hunk.old_from
    return (
        f"{_cut(new)} ends it after {_counted(len(new.ops), 'op')}; compile {old.number} went on "
        f"for {missing} more"
    )


def rest(old: Known, new: Known, last: Known, num_same: int) -> str:
    return (
        f"it is what was left to do after {_cut(last)}: the last {_counted(num_same, 'op')} of "
        f"compile {old.number}, from {_place(new.graph.nodes[0])} on"
    )


def goes_on(old: Known, hunk: Hunk, node: Node) -> str:
    more = hunk.new_to - hunk.new_from
    return (
        f"it goes on for {_counted(more, 'op')} where compile {old.number} was cut{cut(old)}, "
        f"first {_place(node)}"
    )


def new_code(new: Known) -> str:
    return (
        f"nothing like its {_counted(len(new.ops), 'op')} was compiled before, the first is "
        f"{_place(new.graph.nodes[0])}"
    )


def hunks(old: Known, new: Known, all_hunks: Sequence[Hunk]) -> str:
    """Say what stands where the graphs first differ."""
    hunk = all_hunks[0]
    num_old, num_new = hunk.old_to - hunk.old_from, hunk.new_to - hunk.new_from
    if not num_new:
        text = (
            f"{_counted(num_old, 'op')} of compile {old.number} missing, "
            f"first {_place(old.graph.nodes[hunk.old_from])}"
        )
    elif not num_old:
        text = (
            f"{_counted(num_new, 'op')} that compile {old.number} had not, "
            f"first {_place(new.graph.nodes[hunk.new_from])}"
        )
    else:
        was, now = old.graph.nodes[hunk.old_from], new.graph.nodes[hunk.new_from]
        same = _op(was) == _op(now)
        names = [str(n.op).replace(".", "::", 1) if same else _op(n) for n in (now, was)]
        text = f"{names[0]}{_at(now.line)} where compile {old.number} had {names[1]}{_at(was.line)}"
    return text + _more(len(all_hunks) - 1, "place")


def arguments(changes: Sequence[ArgumentChange]) -> str:
    first = changes[0]
    return (
        f"{_place(first.node)}: {first.name} {_argument(first.old)} -> {_argument(first.new)}"
        f"{_more(len(changes) - 1, 'argument')}"
    )


def _argument(value: Any) -> str:
    if isinstance(value, Ref | Write):
        return "a tensor"
    if isinstance(value, Scalar):
        return "a number"
    if isinstance(value, list):  # of tensors or numbers; structure is in tuples
        return f"a list of {len(value)}"
    text = repr(list(value) if isinstance(value, tuple) else value)
    return text if len(text) <= _LONGEST_ARGUMENT else f"{text[:_LONGEST_ARGUMENT]}..."


def operands(old: Known, changes: Sequence[NodeChange]) -> str:
    first = changes[0]
    return (
        f"{_place(first.new)} reads other values than in compile {old.number}"
        f"{_more(len(changes) - 1, 'op')}"
    )


def results(changes: Sequence[NodeChange]) -> str:
    old, new = changes[0].old, changes[0].new
    pairs = zip(old.outs, new.outs, strict=False)
    made = [f"{b} where it made {a}" for a, b in pairs if a is not b] or [
        "another number of values"
    ]
    return f"{_place(new)} makes {made[0]}{_more(len(changes) - 1, 'op')}"
