"""Draws by key: which nodes take keys, and that states go on from draw to draw."""

from typing import Any

import torch

from ltc_core.graph.ir import Graph, Node, Ref, TensorMeta, Write
from ltc_core.program.lowering.threefry import next_key
from ltc_core.program.passes.random_keys import NEXT_KEY, is_draw, of_host, with_keys

aten = torch.ops.aten
META = TensorMeta.packed((4,), torch.float32)
STATE = TensorMeta.packed((5056,), torch.uint8)
NONE: frozenset[str] = frozenset()


def draw(first: int, written: int, state: int) -> Node:
    """x.uniform_() with a stream: values `first` and `first + 1` are x and the state after it."""
    args, kwargs = (Write(0, ()),), {"generator": Write(1, ())}
    return Node(
        aten.uniform_.default, args, kwargs, first, (META, STATE), (written, state), result="self"
    )


def two_draws() -> Graph:
    """Inputs 0 (a tensor) and 1 (a state); both draws write the tensor."""
    nodes = (
        draw(2, 0, 1),
        draw(4, 2, 3),
        Node(aten.neg.default, (Ref(4),), {}, 6, (META,), result=0),
    )
    return Graph(nodes, {0: META, 1: STATE}, (6, 5), frozenset({0, 1}))


def names(graph: Graph) -> list[str]:
    return [node.op._opname for node in graph.nodes]


def test_each_draw_takes_a_key_of_the_state_before_it() -> None:
    graph = with_keys(two_draws(), NONE)
    assert names(graph) == ["next_key", "uniform_", "next_key", "uniform_", "neg"]
    first, drawn, second, again, _ = graph.nodes
    assert first.writes == (1,) and second.writes == (first.first + 1,)
    assert drawn.kwargs == {"generator": Ref(first.first)} and drawn.writes == (0,)
    assert again.kwargs == {"generator": Ref(second.first)} and again.writes == (2,)
    assert not is_draw(drawn)
    # What was the state after the second draw is the state after its key.
    assert graph.outputs == (6, second.first + 1)
    assert graph.metas()[second.first + 1] is STATE


def test_states_and_keys_stay_on_the_host() -> None:
    graph = with_keys(two_draws(), NONE)
    first, _, second, *_ = graph.nodes
    here = of_host(graph)
    assert here == {1, first.first, first.first + 1, second.first, second.first + 1}
    assert of_host(two_draws()) == {1, 3, 5}


def test_a_refused_draw_and_one_without_a_rule_stay_what_they_are() -> None:
    refused = frozenset({str(aten.uniform_.default)})
    graph = two_draws()
    assert with_keys(graph, refused) is graph
    kwargs: dict[str, Any] = {"generator": Write(0, ())}
    poisson = Node(aten.poisson.default, (Ref(0),), kwargs, 2, (META, STATE), (1,), result=0)
    graph = Graph((poisson,), {0: META, 1: STATE}, (2, 3))
    assert with_keys(graph, NONE) is graph


def test_the_op_gives_a_key_and_writes_the_state() -> None:
    state = torch.Generator().manual_seed(3).get_state()
    key, after = next_key(state)
    written = state.clone()
    assert NEXT_KEY(written).equal(key) and written.equal(after)
