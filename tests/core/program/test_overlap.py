"""Reductions written as vectors: what runs between a start and the finish, and that nothing else changes."""

from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch

import ltc_core as ltc
from ltc_core.executors.inductor.compiled_subgraph import compiled_program
from ltc_core.executors.inductor.lowering.lower import lower
from ltc_core.executors.inductor.partition import partition
from ltc_core.executors.reference.executor import ReferenceExecutor
from ltc_core.graph import collective
from ltc_core.graph.buckets import deal, deal_backwards
from ltc_core.graph.ir import Graph, Node, Ref, TensorMeta, ViewStep, Write
from ltc_core.program.partitioned import PartitionedProgram
from ltc_core.program.subgraph import Subgraph
from tests.core.stand_ins import Interpreted, ended

aten = torch.ops.aten
ops = collective.ops
TOKEN = TensorMeta.packed((1,), torch.uint8)
CPU = torch.device("cpu")


class Twin:
    """A group of two processes that have the same values: a sum is twice as much."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    def start_all_reduce(self, flat: torch.Tensor, kind: str, plan: str) -> None:
        self.calls.append(f"start {kind} {flat.numel() - collective.TRAILER}")
        flat.mul_(2)

    def finish_all_reduce(self, flat: torch.Tensor) -> None:
        self.calls.append(f"finish {flat.numel() - collective.TRAILER}")

    def all_reduce(
        self, values: list[torch.Tensor], kind: str, scale: float, label: str
    ) -> list[torch.Tensor]:
        return collective.all_reduce_in_vectors(self, values, kind, scale, label)

    def not_called(self, *args: Any) -> Any:
        raise AssertionError

    all_gather = reduce_scatter = all_to_all = permute = broadcast = not_called


@pytest.fixture
def twin() -> Iterator[Twin]:
    made = Twin()
    collective.TRANSPORTS["twins"] = made
    with ltc.settings.override(bucket_mb=0.0):  # each tensor is a vector
        yield made
    del collective.TRANSPORTS["twins"]


# What makes a vector of one tensor.
VECTOR = ["reshape.default", "constant_pad_nd.default"]


def node(op: Any, first: int, *args: Any, meta: TensorMeta, view: bool = False) -> Node:
    return Node(op, args, {}, first, (meta,), view=view, result=0)


def reduce_all(first: int, written: Sequence[tuple[int, TensorMeta]], token: int) -> Node:
    """`all_reduce_` of whole tensors."""
    items = [Write(k, ()) for k in range(len(written))]
    args = (items, Write(len(items), ()), "sum", 0.5, "gradients", "twins")
    metas = (*(meta for _, meta in written), TOKEN)
    return Node(ops.all_reduce_.default, args, {}, first, metas, (*(v for v, _ in written), token))


def backward_of_two_layers() -> tuple[Graph, list[torch.Tensor]]:
    """x -> sin -> cos, and what their gradients could be: that of the second layer (5) comes first."""
    meta = TensorMeta.packed((2, 3), torch.float32)
    nodes = (
        node(aten.sin.default, 2, Ref(0), meta=meta),
        node(aten.cos.default, 3, Ref(2), meta=meta),
        node(aten.mul.Tensor, 4, Ref(3), Ref(3), meta=meta),  # nobody's gradient
        node(aten.neg.default, 5, Ref(3), meta=meta),
        node(aten.exp.default, 6, Ref(5), meta=meta),
        node(aten.t.default, 7, Ref(2), meta=TensorMeta.like(torch.ones(2, 3).t()), view=True),
        node(aten.mm.default, 8, Ref(6), Ref(7), meta=TensorMeta.packed((2, 2), torch.float32)),
        reduce_all(9, [(8, TensorMeta.packed((2, 2), torch.float32)), (5, meta)], 1),
        node(aten.neg.default, 12, Ref(9), meta=TensorMeta.packed((2, 2), torch.float32)),
        node(aten.exp.default, 13, Ref(0), meta=meta),  # reads inputs only, is read at the end
        node(aten.add.Tensor, 14, Ref(10), Ref(13), meta=meta),
    )
    graph = Graph(nodes, {0: meta, 1: TOKEN}, (4, 9, 10, 11, 12, 14), frozenset({1}))
    return graph, [torch.arange(6.0).reshape(2, 3), torch.zeros(1, dtype=torch.uint8)]


def subgraphs_of(graph: Graph) -> list[Subgraph]:
    return partition(graph, [], frozenset(), frozenset())


def names(part: Subgraph) -> list[str]:
    return [str(n.op).partition(".")[2] for n in part.graph.nodes]


def chain_of(graph: Graph) -> PartitionedProgram:
    models: dict[int, Any] = {}
    parts = subgraphs_of(graph)
    for k, part in enumerate(parts):
        if part.compiled:
            lowered = lower(part, "cpu")
            models[k] = Interpreted(lowered.module), lowered.returned
    return compiled_program(graph, parts, models, CPU)


def test_the_second_vector_is_computed_while_the_first_is_under_way(twin: Twin) -> None:
    graph, inputs = backward_of_two_layers()
    parts = subgraphs_of(graph)
    assert [(part.compiled, names(part)) for part in parts] == [
        (True, ["sin.default", "cos.default", "mul.Tensor", "neg.default", *VECTOR]),
        (False, ["all_reduce.start"]),
        (True, ["exp.default", "t.default", "mm.default", *VECTOR]),
        (False, ["all_reduce.start"]),
        (False, ["all_reduce.finish"]),
        # What only reads inputs has waited for what it is used with.
        (True, ["neg.default", "exp.default", "add.Tensor"]),
    ]


def test_it_gives_what_the_reference_executor_gives(twin: Twin) -> None:
    graph, inputs = backward_of_two_layers()
    expected = ReferenceExecutor().interpret(graph).run([t.clone() for t in inputs], [])
    assert twin.calls == ["start sum 6", "start sum 4", "finish 6", "finish 4"]
    twin.calls.clear()
    got, waits = ended(chain_of(graph).run_in_steps(inputs, []))
    assert twin.calls == ["start sum 6", "start sum 4", "finish 6", "finish 4"] and waits == 1
    torch.testing.assert_close(got, expected, rtol=0, atol=0)


def test_small_tensors_share_a_vector(twin: Twin) -> None:
    graph, inputs = backward_of_two_layers()
    with ltc.settings.override(bucket_mb=1.0):
        expected = ReferenceExecutor().interpret(graph).run([t.clone() for t in inputs], [])
        got, _ = ended(chain_of(graph).run_in_steps(inputs, []))
    assert twin.calls == ["start sum 10", "finish 10"] * 2
    torch.testing.assert_close(got, expected, rtol=0, atol=0)


def test_gradients_that_are_views_of_their_whole_memory(twin: Twin) -> None:
    """Autograd transposes twice and reshapes; the op sees (3,) where the memory is (1, 3)."""
    square, row = (TensorMeta.packed(size, torch.float32) for size in ((2, 2), (1, 3)))
    transposed = ViewStep(aten.t.default, ())
    items = [
        Write(0, (transposed, transposed)),
        Write(1, (ViewStep(aten.view.default, ((3,),)),)),
    ]
    args = (items, Write(2, ()), "sum", 1.0, "gradients", "twins")
    node = Node(ops.all_reduce_.default, args, {}, 3, (square, row, TOKEN), (0, 1, 2))
    graph = Graph((node,), {0: square, 1: row, 2: TOKEN}, (3, 4, 5), frozenset({0, 1, 2}))
    inputs = [torch.ones(2, 2), torch.arange(3.0)[None], torch.zeros(1, dtype=torch.uint8)]
    assert [n for part in subgraphs_of(graph) for n in names(part)].count("all_reduce.start") == 2
    got, _ = ended(chain_of(graph).run_in_steps([t.clone() for t in inputs], []))
    torch.testing.assert_close(got[:2], [2 * t for t in inputs[:2]])


@pytest.mark.parametrize("how", ["part", "twice", "strided"])
def test_what_has_no_memory_of_its_own_stays_one_op(twin: Twin, how: str) -> None:
    meta = TensorMeta.packed((2, 3), torch.float32)
    if how == "strided":
        meta = TensorMeta.like(torch.ones(3, 2).t())
    lens = (ViewStep(aten.select.int, (0, 0)),) if how == "part" else ()
    items = [Write(0, lens)] * (2 if how == "twice" else 1)
    args = (items, Write(1, ()), "sum", 1.0, "tensors", "twins")
    node = Node(ops.all_reduce_.default, args, {}, 2, (meta, TOKEN), (0, 1))
    graph = Graph((node,), {0: meta, 1: TOKEN}, (2, 3), frozenset({0, 1}))
    (part,) = subgraphs_of(graph)
    assert names(part) == ["all_reduce_.default"]


def test_gradients_are_dealt_out_last_first() -> None:
    def mib(*sizes: float) -> list[torch.Tensor]:
        return [torch.empty(int(n * 2**18), device="meta") for n in sizes]

    assert list(deal_backwards(mib(0.5, 3, 2, 0.5, 0.25, 0.25), 4)) == [[5, 4, 3], [2, 1], [0]]
    assert list(deal_backwards(mib(2, 1, 0.5), 25)) == [[2, 1, 0]]  # too few to be worth two
    assert list(deal_backwards(mib(3, 1, 0.5), 25)) == [[2, 1], [0]]
    assert list(deal_backwards(mib(1, 1), 0)) == [[1], [0]]
    assert list(deal_backwards([], 4)) == []
    halves = [torch.empty(2, dtype=torch.half), torch.empty(2), torch.empty(2, dtype=torch.half)]
    assert list(deal_backwards(halves, 4)) == [[2, 0], [1]]
    assert list(deal(mib(1, 2, 4, 1), 3)) == [[0, 1], [2], [3]]


def test_images_go_from_part_to_part_as_convolutions_want_them(twin: Twin) -> None:
    image = TensorMeta.packed((2, 3, 4, 4), torch.float32)
    kernel = TensorMeta.packed((3, 3, 1, 1), torch.float32)
    conv = (None, (1, 1), (0, 0), (1, 1), False, (0, 0), 1)
    reduced = reduce_all(6, [(5, image), (4, image)], 2)
    nodes = (
        node(aten.convolution.default, 3, Ref(0), Ref(1), *conv, meta=image),
        node(aten.convolution.default, 4, Ref(3), Ref(1), *conv, meta=image),  # reduced first
        node(aten.convolution.default, 5, Ref(3), Ref(1), *conv, meta=image),
        reduced,
    )
    graph = Graph(nodes, {0: image, 1: kernel, 2: TOKEN}, (6, 7), frozenset({2}))
    inputs = [torch.randn(2, 3, 4, 4), torch.randn(3, 3, 1, 1), torch.zeros(1, dtype=torch.uint8)]
    first, second = [part for part in subgraphs_of(graph) if part.compiled]
    assert 3 in first.outputs and 3 in second.inputs and len(first.outputs) == 2
    handed_over = second.graph.inputs[second.inputs.index(3)]
    assert handed_over.stride == first.graph.metas()[first.graph.outputs[0]].stride
    assert handed_over.stride == (48, 1, 12, 3)
    assert first.graph.metas()[first.graph.outputs[1]].contiguous  # it goes into a vector
    expected = ReferenceExecutor().interpret(graph).run([t.clone() for t in inputs], [])
    got, _ = ended(chain_of(graph).run_in_steps(inputs, []))
    torch.testing.assert_close(got, expected)
