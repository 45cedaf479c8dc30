"""Values made of nothing: which nodes begin a state, and which wait for no operand."""

import torch

from ltc_core.graph.ir import Graph, Node, Ref, TensorMeta, Write
from ltc_core.program.passes.initial_state import initial_values, without_operands

aten = torch.ops.aten
META = TensorMeta.packed((4,), torch.float32)


def node(op: torch._ops.OpOverload, first: int, *args: object) -> Node:
    return Node(op, args, {}, first, (META,), result=0)


def added(first: int, target: int, other: int) -> Node:
    args = (Write(0, ()), Ref(other))
    return Node(aten.add_.Tensor, args, {}, first, (META,), (target,), result="self")


def moments(*outputs: int) -> Graph:
    """m = zeros_like(x); m += x, as an optimizer's first step; and zeros that are only read."""
    nodes = (
        node(aten.zeros_like.default, 1, Ref(0)),
        node(aten.zeros_like.default, 2, Ref(0)),
        added(3, 1, 0),
        node(aten.add.Tensor, 4, Ref(3), Ref(2)),
    )
    return Graph(nodes, {0: META}, outputs)


def test_what_is_written_until_it_is_an_output_begins_a_state() -> None:
    assert initial_values(without_operands(moments(3, 4))) == {0}


def test_what_does_not_outlive_the_graph_begins_none() -> None:
    assert initial_values(without_operands(moments(4))) == set()


def test_what_waits_for_an_operand_is_none() -> None:
    assert initial_values(moments(3, 4)) == set()
    cloned = Graph((node(aten.clone.default, 1, Ref(0)), added(2, 1, 0)), {0: META}, (2,))
    assert initial_values(cloned) == set()


def test_zeros_like_is_written_as_what_it_makes() -> None:
    made = without_operands(moments(3, 4)).nodes[0]
    assert made.op is aten.full.default
    assert made.args == ((4,), 0) and made.kwargs == {"dtype": torch.float32}
