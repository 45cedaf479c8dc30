"""A graph that breaks a rule of the IR is refused, with the rule, the node and the user's line."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from ltc_core.errors import GraphError
from ltc_core.graph.check import check
from ltc_core.graph.ir import Graph, Node, Ref, Scalar, TensorMeta, ViewStep, Write
from tests.core.random_graphs import random_graph

aten = torch.ops.aten
META = TensorMeta.packed((2, 3), torch.float32)
ROW = TensorMeta.packed((3,), torch.float32)
SECOND_ROW = (ViewStep(aten.select.int, (0, 1)),)


def node(op: Any, args: tuple[Any, ...], first: int, *outs: TensorMeta, **more: Any) -> Node:
    result = None if more.get("writes") else 0
    return Node(op, args, {}, first, outs, **{"result": result, "line": "train.py:41", **more})


def add(first: int = 2, **more: Any) -> Node:
    """%first = %0 + %1"""
    return node(aten.add.Tensor, (Ref(0), Ref(1)), first, META, **more)


def add_in_place(lens: Any = (), new: TensorMeta = META) -> Node:
    """A part of %0 += $0"""
    args = (Write(0, lens), Scalar(0))
    return node(aten.add_.Scalar, args, 2, new, writes=(0,), result="self")


def graph(*nodes: Node, outputs: tuple[int, ...] = (2,), donated: tuple[int, ...] = ()) -> Graph:
    return Graph(nodes, {0: META, 1: META}, outputs, frozenset(donated))


WELL_FORMED = {
    "an op": lambda: graph(add()),
    "two ops": lambda: graph(add(2), add(3), outputs=(3, 2, 0)),
    "a write": lambda: graph(add_in_place(), donated=(0,)),
    "a write through a view": lambda: graph(add_in_place(SECOND_ROW)),
    "an undefined result": lambda: graph(
        Node(aten.add.Tensor, (Ref(0), Ref(1)), {}, 2, (None,), result=0), outputs=(0,)
    ),
    "no nodes": lambda: graph(outputs=(1,)),
    "a view": lambda: graph(node(aten.select.int, (Ref(0), 0, 1), 2, ROW, view=True)),
}

BROKEN: dict[str, tuple[str, Callable[[], Graph]]] = {
    "numbers given twice": ("numbers its results from 2 on", lambda: graph(add(2), add(2))),
    "numbers going down": ("numbers its results from 2 on", lambda: graph(add(5), add(2))),
    "an input defined again": (r"defines \[1\], which are inputs", lambda: graph(add(1))),
    "a value that is not defined": (
        r"reads \[7\], which are not defined before it",
        lambda: graph(node(aten.neg.default, (Ref(7),), 2, META)),
    ),
    "a value that is defined later": (
        r"reads \[3\], which are not defined",
        lambda: graph(node(aten.neg.default, (Ref(3),), 2, META), add(3)),
    ),
    "a value in a list": (
        r"reads \[9\]",
        lambda: graph(node(aten.cat.default, ([Ref(0), Ref(9)],), 2, META)),
    ),
    "an undefined result that is read": (
        r"reads \[2\]",
        lambda: graph(
            Node(aten.add.Tensor, (Ref(0), Ref(1)), {}, 2, (None,), result=0),
            node(aten.neg.default, (Ref(2),), 3, META),
        ),
    ),
    "a write that no operand has": (
        r"has 2 writes, and operands \[&0\]",
        lambda: graph(
            node(aten.add_.Scalar, (Write(0, ()), 1), 2, META, META, writes=(0, 1), result="self")
        ),
    ),
    "an operand that no write has": (
        r"has 0 writes, and operands \[&0\]",
        lambda: graph(node(aten.add_.Scalar, (Write(0, ()), 1), 2, META)),
    ),
    "a write without a value": (
        "fewer values than writes",
        lambda: graph(node(aten.add_.Scalar, (Write(0, ()), 1), 2, writes=(0,)), outputs=(0,)),
    ),
    "a write that changes the size": (
        r"writes %0: .*, which becomes TensorMeta\(float32\[3\]\)",
        lambda: graph(add_in_place(new=ROW)),
    ),
    "a lens that leads nowhere": (
        r"operand &0.select\(5, 1\) is no part of float32\[2, 3\]: IndexError",
        lambda: graph(add_in_place((ViewStep(aten.select.int, (5, 1)),))),
    ),
    "a scalar before the first": (
        "a negative position",
        lambda: graph(node(aten.add.Scalar, (Ref(0), Scalar(-1)), 2, META)),
    ),
    "a result that the node does not have": (
        "has 1 results and returns 1",
        lambda: graph(add(result=1)),
    ),
    "a result that nobody returns": (
        "has 1 results and returns None",
        lambda: graph(add(result=None)),
    ),
    "a meta of its own": ("is not interned", lambda: graph(_own())),
    "a view of nothing": (
        "a view of no value",
        lambda: graph(node(aten.ones.default, ((2, 3),), 2, META, view=True)),
    ),
    "an output that is not defined": (r"outputs \[4\] are not", lambda: graph(add(), outputs=(4,))),
    "an output twice": ("an output is there twice", lambda: graph(add(), outputs=(2, 2))),
    "a donated value that is no input": (
        r"donated values \[2\] are no inputs",
        lambda: graph(add(), donated=(2,)),
    ),
}


def _own() -> Node:
    meta = TensorMeta()
    meta.size, meta.stride, meta.offset, meta.dtype = META.size, META.stride, 0, META.dtype
    return node(aten.add.Tensor, (Ref(0), Ref(1)), 2, meta)


@pytest.mark.parametrize("name", WELL_FORMED)
def test_well_formed(name: str) -> None:
    check(WELL_FORMED[name]())


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_rule_is_named(name: str) -> None:
    words, make = BROKEN[name]
    with pytest.raises(GraphError, match=f"a graph is not well formed: .*{words}") as raised:
        check(make())
    assert isinstance(raised.value, AssertionError) and "Next: report this" in str(raised.value)


def test_the_users_line_is_named() -> None:
    with pytest.raises(GraphError, match=r"recorded at train\.py:41"):
        check(graph(add(1)))


def test_random_graphs_are_well_formed() -> None:
    for seed in range(50):
        check(random_graph(seed).graph)
