"""The reference executor defines what a graph means: random graphs against eager PyTorch, faults included."""

import dataclasses
import functools
import gc
import random
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from ltc_core.executors import EXECUTORS
from ltc_core.executors.reference.executor import ReferenceExecutor
from ltc_core.graph.ir import Graph, Node, Ref, Scalar, TensorMeta, ViewStep, Write, references
from ltc_core.graph.passes import origins
from ltc_core.program.failure import NodeFailure
from ltc_core.program.plan import plan
from ltc_core.settings import settings
from tests.core.random_graphs import RandomGraph, random_graph

aten = torch.ops.aten
META = TensorMeta.packed((2, 3), torch.float32)
NUM_GRAPHS = 600


@pytest.fixture(autouse=True, params=["never", "always"], ids=["python", "c++"])
def replay(request: pytest.FixtureRequest) -> Iterator[str]:
    """Whether instructions run one by one in Python, or are replayed in C++."""
    with settings.override(replay=request.param):
        yield request.param


@functools.cache
def executor() -> ReferenceExecutor:
    return ReferenceExecutor()


def memory_of(t: torch.Tensor) -> int:
    return t.untyped_storage().data_ptr()


def run(graph: Graph, *inputs: torch.Tensor, scalars: tuple[Any, ...] = ()) -> list[torch.Tensor]:
    return executor().compile(graph).run(list(inputs), scalars)


def one_node(node: Node, num_inputs: int, donated: frozenset[int] = frozenset()) -> Graph:
    outputs = tuple(range(node.first, node.first + len(node.outs)))
    return Graph((node,), dict.fromkeys(range(num_inputs), META), outputs, donated)


def test_it_is_in_the_table() -> None:
    assert type(EXECUTORS["reference"](0)) is ReferenceExecutor


# -- random graphs ---------------------------------------------------------------------------------


def check_memory(found: RandomGraph, inputs: list[torch.Tensor], outputs: list[Any]) -> None:
    """Kept inputs are as they were, and no output lies in their memory or in another output's."""
    kept = []
    for number, given, before in zip(found.graph.inputs, inputs, found.inputs, strict=True):
        if number not in found.graph.donated:
            assert torch.equal(given, before), f"input %{number} was overwritten"
            kept.append(memory_of(given))
    used = [memory_of(t) for t in outputs if t is not None] + kept
    assert len(set(used)) == len(used)


@pytest.mark.parametrize("num_ops", [4, 14])
def test_random_graphs_give_what_eager_gives(num_ops: int) -> None:
    for seed in range(NUM_GRAPHS):
        found = random_graph(seed, num_ops)
        program = executor().compile(found.graph)
        for _ in range(2):  # a program keeps nothing from one run to the next
            inputs = found.fresh_inputs()
            outputs = program.run(inputs, found.scalars)
            for number, got, wanted in zip(
                found.graph.outputs, outputs, found.expected, strict=True
            ):
                assert torch.equal(got, wanted), f"seed {seed}, %{number} of\n{found.graph}"
            check_memory(found, inputs, outputs)


def test_outputs_end_in_the_memory_of_the_inputs_they_replace() -> None:
    reused = 0
    for seed in range(NUM_GRAPHS):
        found = random_graph(seed)
        inputs = found.fresh_inputs()
        before = dict(zip(found.graph.inputs, map(memory_of, inputs), strict=True))
        program = executor().compile(found.graph)
        outputs = program.run(inputs, found.scalars)
        by_number = dict(zip(found.graph.outputs, outputs, strict=True))
        origins = plan(found.graph).origins
        for output, given in program.reuses.items():
            if given in origins[output]:  # by writes alone: a view on the way may have been a copy
                assert memory_of(by_number[output]) == before[given]
                reused += 1
    assert reused > NUM_GRAPHS / 4


# -- what a node's arguments may be ----------------------------------------------------------------


def test_numbers_are_filled_in_by_position() -> None:
    args = (Ref(0), Scalar(1))
    node = Node(aten.add.Scalar, args, {}, 1, (META,), result=0)
    (out,) = run(one_node(node, 1), torch.ones(2, 3), scalars=(100.0, 2.5))
    assert torch.equal(out, torch.full((2, 3), 3.5))


def test_numbers_are_filled_in_inside_keywords_and_lists() -> None:
    by_name = Node(aten.add.Tensor, (Ref(0), Ref(0)), {"alpha": Scalar(0)}, 1, (META,), result=0)
    (out,) = run(one_node(by_name, 1), torch.ones(2, 3), scalars=(4,))
    assert torch.equal(out, torch.full((2, 3), 5.0))
    args = ([Ref(0), Ref(1)], [Scalar(0), Scalar(1)])
    in_list = Node(aten._foreach_mul.ScalarList, args, {}, 2, (META, META), result=[0, 1])
    first, second = run(one_node(in_list, 2), torch.ones(2, 3), torch.ones(2, 3), scalars=(2, 3))
    assert (first[0, 0], second[0, 0]) == (2, 3)


def test_none_among_operands_stays_none() -> None:
    rows = torch.tensor([1, 0])
    metas = {0: META, 1: TensorMeta.like(rows)}
    node = Node(aten.index.Tensor, (Ref(0), [None, Ref(1)]), {}, 2, (META,), result=0)
    (out,) = run(Graph((node,), metas, (2,)), torch.arange(6.0).view(2, 3), rows)
    assert torch.equal(out, torch.tensor([[1.0, 0.0], [4.0, 3.0]]))


def test_an_undefined_result_is_skipped() -> None:
    x, w = torch.randn(1, 1, 4, 4), torch.randn(1, 1, 3, 3)
    grad = torch.randn(1, 1, 2, 2)
    rest = ([1], [1, 1], [0, 0], [1, 1], False, [0, 0], 1, [False, True, False])
    wanted = aten.convolution_backward.default(grad, x, w, *rest)
    outs = (None, TensorMeta.like(w), None)
    args = (Ref(0), Ref(1), Ref(2), *rest)
    node = Node(aten.convolution_backward.default, args, {}, 3, outs, result=(0, 1, 2))
    metas = {k: TensorMeta.like(t) for k, t in enumerate((grad, x, w))}
    (out,) = run(Graph((node,), metas, (4,)), grad, x, w)
    assert wanted[0] is None
    assert torch.equal(out, wanted[1])


def test_a_list_inside_a_tuple_of_results() -> None:
    """`result` says where each tensor of a nested answer goes."""

    def answer(t: torch.Tensor) -> Any:
        return t + 1, [t + 2, t + 3]

    node = Node(answer, (Ref(0),), {}, 1, (META,) * 3, result=(0, [1, 2]))
    outputs = run(one_node(node, 1), torch.zeros(2, 3))
    assert [float(t[0, 0]) for t in outputs] == [1, 2, 3]


def test_a_write_through_a_lens_changes_the_part_only() -> None:
    lens = (ViewStep(aten.t.default, ()), ViewStep(aten.select.int, (0, 1)))
    node = Node(aten.fill_.Scalar, (Write(0, lens), Scalar(0)), {}, 1, (META,), (0,), result="self")
    before = torch.zeros(2, 3)
    (out,) = run(one_node(node, 1), before, scalars=(7.0,))
    assert torch.equal(out, torch.tensor([[0.0, 7.0, 0.0], [0.0, 7.0, 0.0]]))
    assert torch.equal(before, torch.zeros(2, 3))


def test_draws_come_from_the_state_and_advance_it() -> None:
    state = torch.Generator().manual_seed(3).get_state()
    metas = {0: META, 1: TensorMeta.like(state)}
    kwargs = {"generator": Write(1, ())}
    args = (Write(0, ()),)
    outs = (META, metas[1])
    node = Node(aten.uniform_.default, args, kwargs, 2, outs, (0, 1), result="self")
    graph = Graph((node,), metas, (2, 3), frozenset({0}))
    drawn, after = run(graph, torch.zeros(2, 3), state)
    generator = torch.Generator().manual_seed(3)
    assert torch.equal(drawn, torch.empty(2, 3).uniform_(generator=generator))
    assert torch.equal(after, generator.get_state())
    assert torch.equal(state, torch.Generator().manual_seed(3).get_state())  # it was not donated
    again, _ = run(graph, torch.zeros(2, 3), after)
    assert torch.equal(again, torch.empty(2, 3).uniform_(generator=generator))


def test_an_empty_graph_runs() -> None:
    assert run(Graph((), {}, ())) == []


# -- placing and seeing ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    "tensor",
    [
        torch.arange(6.0).view(2, 3).t(),
        torch.ones(3).expand(2, 3),
        torch.tensor(5),
        torch.ones(0, 2),
    ],
    ids=["transposed", "expanded", "0-dim", "empty"],
)
def test_place_copies(tensor: torch.Tensor) -> None:
    placed = executor().upload(tensor)
    assert torch.equal(placed, tensor)
    assert placed.numel() == 0 or memory_of(placed) != memory_of(tensor)
    assert torch.equal(executor().view(placed, TensorMeta.like(tensor)), tensor)


def test_view_does_not_copy() -> None:
    data = torch.ones(2, 3)
    assert executor().view(data, META) is data


# -- memory while it runs --------------------------------------------------------------------------


def test_intermediate_values_are_freed_at_their_last_use() -> None:
    """A chain of ops never has more than two of its values alive."""
    alive: list[weakref.ref[torch.Tensor]] = []
    most = 0

    def link(t: torch.Tensor) -> torch.Tensor:
        nonlocal most
        result = t + 1
        alive.append(weakref.ref(result))
        most = max(most, sum(r() is not None for r in alive))
        return result

    nodes = [Node(link, (Ref(k),), {}, k + 1, (META,), result=0) for k in range(10)]
    graph = Graph(tuple(nodes), {0: META}, (10,))
    (out,) = run(graph, torch.zeros(2, 3))
    assert 1 <= most <= 2
    assert torch.equal(out, torch.full((2, 3), 10.0))


def test_a_program_keeps_no_value_after_its_run() -> None:
    found = random_graph(5)
    program = executor().compile(found.graph)
    inputs = found.fresh_inputs()
    refs = [weakref.ref(t) for t in inputs]
    outputs = program.run(inputs, found.scalars)
    refs += [weakref.ref(t) for t in outputs]
    del inputs, outputs
    gc.collect()
    assert [r() for r in refs] == [None] * len(refs)
    assert program.run(found.fresh_inputs(), found.scalars)


# -- faults ----------------------------------------------------------------------------------------


def boom(*args: Any, **kwargs: Any) -> None:
    raise ValueError("boom")


def with_fault(found: RandomGraph, at: int) -> Graph:
    """The graph with node `at` made to fail."""
    nodes = list(found.graph.nodes)
    nodes[at] = dataclasses.replace(nodes[at], op=boom)
    return dataclasses.replace(found.graph, nodes=tuple(nodes))


def newest(found: RandomGraph, output: int, at: int) -> int | None:
    """The newest version of an output that was there before node `at`; None if there was none."""
    before = {n.first_write + k: old for n in found.graph.nodes for k, old in enumerate(n.writes)}
    made = set(found.graph.inputs)
    for node in found.graph.nodes[:at]:
        made.update(range(node.first, node.first + len(node.outs)))
    version: int | None = output
    while version is not None and version not in made:
        version = before.get(version)
    return version


def run_with_fault(seed: int) -> tuple[RandomGraph, int, list[torch.Tensor], NodeFailure]:
    found = random_graph(seed, 10)
    at = random.Random(seed).randrange(len(found.graph.nodes))
    graph = with_fault(found, at)
    inputs = found.fresh_inputs()
    with pytest.raises(NodeFailure) as failure:
        executor().compile(graph).run(inputs, found.scalars)
    assert failure.value.node is graph.nodes[at]
    assert isinstance(failure.value.__cause__, ValueError)
    return found, at, inputs, failure.value


def test_a_run_that_fails_leaves_each_output_at_its_newest_version() -> None:
    """As eager would have left the tensors at the line that raised; what is made later is made, where it can be."""
    kept = made = 0
    for seed in range(NUM_GRAPHS):
        found, at, _, failure = run_with_fault(seed)
        lost = reached(found, at)
        chains = origins(found.graph.nodes, found.graph.outputs)
        drawn = states_of_generators(found.graph)
        for output in found.graph.outputs:
            version = newest(found, output, at)
            versions = (output, *chains[output])
            is_state = versions[-1] in found.graph.inputs
            if output in drawn:  # goes on with the draws that are made after the failure
                since = versions[: versions.index(version) + 1]
                state = failure.left.data[output]
                assert any(torch.equal(state, found.values[v]) for v in since), f"seed {seed}"
                continue
            if not is_state and output not in lost:
                made += version != output
                version = output
            if version is not None:
                assert torch.equal(failure.left.data[output], found.values[version]), f"seed {seed}"
                assert version != output or output not in failure.left.older, f"seed {seed}"
                kept += 1
    assert kept > NUM_GRAPHS and made > NUM_GRAPHS // 4


def states_of_generators(graph: Graph) -> set[int]:
    """The states that the draws of a graph write."""
    draws = [n for n in graph.nodes if "generator" in n.kwargs]
    return {n.first_write + n.kwargs["generator"].base for n in draws}


def reached(found: RandomGraph, at: int) -> set[int]:
    """The values that depend on node `at`."""
    lost: set[int] = set()
    for position, node in enumerate(found.graph.nodes):
        if position == at or not lost.isdisjoint(references(node)):
            lost.update(range(node.first, node.first + len(node.outs)))
    return lost


def test_what_a_failed_run_leaves_shares_no_memory() -> None:
    """Else the next step, which writes in place, would change two tensors."""
    for seed in range(NUM_GRAPHS):
        found, _, inputs, failure = run_with_fault(seed)
        check_memory(found, inputs, list(failure.left.data.values()))


def test_state_that_was_to_be_made_after_the_fault_starts_as_it_was_to_start() -> None:
    """An optimizer's zeros, so that the next step finds the state it would have made."""
    zeros = Node(aten.zeros_like.default, (Ref(0),), {}, 2, (META,), result=0)
    failing = Node(boom, (Ref(0),), {}, 1, (META,), result=0)
    update = Node(aten.add_.Tensor, (Write(0, ()), Ref(1)), {}, 3, (META,), (2,), result="self")
    graph = Graph((failing, zeros, update), {0: META}, (3,))
    with pytest.raises(NodeFailure) as failure:
        run(graph, torch.ones(2, 3))
    assert torch.equal(failure.value.left.data[3], torch.zeros(2, 3))


def test_what_comes_from_the_op_that_failed_is_lost_and_nothing_else() -> None:
    failing = Node(boom, (Ref(0),), {}, 1, (META,), result=0)
    written = Node(aten.zero_.default, (Write(0, ()),), {}, 2, (META,), (1,), result="self")
    update = Node(aten.add_.Tensor, (Write(0, ()), Ref(2)), {}, 3, (META,), (0,), result="self")
    graph = Graph((failing, written, update), {0: META}, (2, 3), frozenset({0}))
    with pytest.raises(NodeFailure) as failure:
        run(graph, torch.ones(2, 3))
    assert list(failure.value.left.data) == [3]
    assert torch.equal(failure.value.left.data[3], torch.ones(2, 3))
    assert failure.value.node is failing


def test_a_program_works_again_after_a_failed_run() -> None:
    calls = 0

    def sometimes(t: torch.Tensor) -> torch.Tensor:
        nonlocal calls
        calls += 1
        if calls == 1:
            raise ValueError("not today")
        return t * 2

    node = Node(sometimes, (Ref(0),), {}, 1, (META,), result=0)
    program = executor().compile(one_node(node, 1))
    with pytest.raises(NodeFailure):
        program.run([torch.ones(2, 3)], ())
    assert torch.equal(program.run([torch.ones(2, 3)], ())[0], torch.full((2, 3), 2.0))


def test_the_reported_peak_is_that_of_the_plan() -> None:
    found = random_graph(11)
    program = executor().compile(found.graph)
    assert program.peak_bytes == plan(found.graph).peak_bytes
