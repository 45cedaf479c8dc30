"""Indices are traced to inputs and compared with what the ops allow; what cannot be told is said."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch

from ltc_core.executors.inductor.compiled_subgraph import compiled_program
from ltc_core.executors.inductor.partition import partition
from ltc_core.graph.ir import Graph, Node, Ref, TensorMeta, ViewStep, Write
from ltc_core.program import index_checks
from ltc_core.program.failure import NodeFailure
from ltc_core.program.index_checks import Bound, find_bounds, in_bounds
from ltc_core.program.partitioned import PartitionedProgram
from tests.core.stand_ins import ended

aten = torch.ops.aten
FLOAT, LONG = torch.float32, torch.int64


def meta(*size: int, dtype: torch.dtype = FLOAT) -> TensorMeta:
    return TensorMeta.packed(size, dtype)


TABLE, INDEX = meta(9, 4), meta(3, dtype=LONG)


def graph_of(
    inputs: Sequence[TensorMeta], *nodes: tuple[Any, tuple[Any, ...], TensorMeta]
) -> Graph:
    """Nodes (op, arguments, result) that follow each other; the last one's value is wanted."""
    first = len(inputs)
    made = tuple(
        Node(op, args, {}, first + k, (out,), view=op in VIEWS, result=0)
        for k, (op, args, out) in enumerate(nodes)
    )
    return Graph(made, dict(enumerate(inputs)), (first + len(nodes) - 1,))


VIEWS = {aten.view.default, aten.select.int}
# op and arguments, metas of the inputs, the bounds to be found
CALLS: list[tuple[Any, tuple[Any, ...], list[TensorMeta], list[Bound]]] = [
    (aten.embedding.default, (Ref(0), Ref(1)), [TABLE, INDEX], [Bound(1, 0, 8)]),
    (aten.embedding_dense_backward.default, (Ref(0), Ref(1), 9, -1, False), [meta(3, 4), INDEX], [Bound(1, 0, 8)]),
    (aten.gather.default, (Ref(0), 1, Ref(1)), [TABLE, meta(9, 2, dtype=LONG)], [Bound(1, 0, 3)]),
    (aten.gather.default, (Ref(0), -1, Ref(1)), [TABLE, meta(9, 2, dtype=LONG)], [Bound(1, 0, 3)]),
    (aten.gather.default, (Ref(0), 0, Ref(1)), [meta(), meta(dtype=LONG)], [Bound(1, 0, 0)]),
    (aten.index_select.default, (Ref(0), 0, Ref(1)), [TABLE, INDEX], [Bound(1, 0, 8)]),
    (aten.index.Tensor, (Ref(0), [None, Ref(1)]), [TABLE, INDEX], [Bound(1, -4, 3)]),
    (aten.index.Tensor, (Ref(0), [Ref(1), Ref(1)]), [TABLE, INDEX], [Bound(1, -9, 8), Bound(1, -4, 3)]),
    (aten.index.Tensor, (Ref(0), [Ref(1)]), [TABLE, meta(9, dtype=torch.bool)], []),
    (aten.index.Tensor, (Ref(0), [Ref(1)]), [meta(), meta(dtype=torch.bool)], []),
    (aten.index.Tensor, (Ref(0), [Ref(1), Ref(2)]), [meta(4), meta(dtype=torch.uint8), INDEX], [Bound(2, -4, 3)]),
    (aten.take.default, (Ref(0), Ref(1)), [TABLE, INDEX], [Bound(1, -36, 35)]),
    (aten.scatter.value, (Ref(0), 1, Ref(1), 2.0), [TABLE, meta(9, 2, dtype=LONG)], [Bound(1, 0, 3)]),
    (aten.nll_loss_forward.default, (Ref(0), Ref(1), None, 1, -100), [meta(3, 4), INDEX], [Bound(1, 0, 3, -100)]),
    (aten.nll_loss_forward.default, (Ref(0), Ref(1), None, 1, 7), [meta(4), meta(dtype=LONG)], [Bound(1, 0, 3, 7)]),
    (aten.mul.Tensor, (Ref(0), Ref(0)), [TABLE], []),
]  # fmt: skip


@pytest.mark.parametrize(("op", "args", "inputs", "bounds"), CALLS, ids=lambda v: str(v)[:40])
def test_what_an_op_allows(
    op: Any, args: tuple[Any, ...], inputs: list[TensorMeta], bounds: list[Bound]
) -> None:
    assert find_bounds(graph_of(inputs, (op, args, meta(1)))) == (bounds, set())


def test_every_name_of_the_table_is_an_op() -> None:
    for name in index_checks._INDEXED:
        assert hasattr(aten, name) or hasattr(aten, f"{name}_"), name


def test_an_index_that_is_written_through_a_lens_is_found_too() -> None:
    node = Node(
        aten.index_add_.default, (Write(0, ()), 0, Ref(1), Ref(2)), {}, 3, (TABLE,), (0,), result="self"
    )  # fmt: skip
    graph = Graph((node,), {0: TABLE, 1: INDEX, 2: meta(3, 4)}, (3,), frozenset({0}))
    assert find_bounds(graph) == ([Bound(1, 0, 8)], set())


def test_the_part_that_a_lens_leads_to_has_the_size_that_counts() -> None:
    rows, column = ViewStep(aten.slice.Tensor, (0, 2, 5)), ViewStep(aten.unsqueeze.default, (0,))
    for shape, lens, bound in (
        ((9, 4), (rows,), Bound(1, -3, 2)),
        ((), (column,), Bound(1, -1, 0)),
    ):
        whole = meta(*shape)
        args = (Write(0, lens), [Ref(1)], Ref(2))
        node = Node(aten.index_put_.default, args, {}, 3, (whole,), (0,), result="self")
        graph = Graph((node,), {0: whole, 1: INDEX, 2: meta()}, (3,), frozenset({0}))
        assert find_bounds(graph) == ([bound], set())


def test_a_mask_that_is_written_where_it_says_has_no_bounds() -> None:
    mask = TensorMeta.packed((9,), torch.bool)
    rows = ViewStep(aten.slice.Tensor, (0, 2, 5))
    for lens in ((), (rows,)):
        args = (Write(0, lens), [Write(0, lens)], Ref(1))
        node = Node(aten.index_put_.default, args, {}, 2, (mask,), (0,), result="self")
        graph = Graph((node,), {0: mask, 1: meta()}, (2,), frozenset({0}))
        assert find_bounds(graph) == ([], set())


class TestWhereIndicesComeFrom:
    """One node makes them of input 1 (or of nothing); `embedding` reads them."""

    def found(self, made: tuple[Any, tuple[Any, ...], TensorMeta], source: TensorMeta) -> Any:
        read = (aten.embedding.default, (Ref(0), Ref(2)), meta(3, 4))
        return find_bounds(graph_of([TABLE, source], made, read))

    @pytest.mark.parametrize(
        ("op", "args"),
        [(aten.view.default, (Ref(1), [3])), (aten.clone.default, (Ref(1),)), (aten._to_copy.default, (Ref(1),))],
    )  # fmt: skip
    def test_ops_that_keep_the_values_are_seen_through(self, op: Any, args: Any) -> None:
        assert self.found((op, args, INDEX), INDEX) == ([Bound(1, 0, 8)], set())

    @pytest.mark.parametrize(
        ("args", "count", "fits"),
        [((9,), 9, True), ((10,), 10, False), ((6, 9), 3, True), ((-1, 2), 3, False), ((8, -1, -4), 3, True)],
    )  # fmt: skip
    def test_arange(self, args: tuple[int, ...], count: int, fits: bool) -> None:
        made = (aten.arange.start_step, args, meta(count, dtype=LONG))
        assert self.found(made, INDEX) == ([], set() if fits else {1})

    @pytest.mark.parametrize(("size", "fits"), [((3, 9), True), ((3, 10), False)])
    def test_positions_within_a_dim(self, size: tuple[int, ...], fits: bool) -> None:
        made = (aten.argmax.default, (Ref(1), 1), INDEX)
        assert self.found(made, meta(*size)) == ([], set() if fits else {1})

    @pytest.mark.parametrize(("size", "fits"), [((3, 3), True), ((2, 5), False)])
    def test_positions_within_a_flattened_tensor(self, size: tuple[int, ...], fits: bool) -> None:
        made = (aten.argmax.default, (Ref(1),), meta(dtype=LONG))
        assert self.found(made, meta(*size)) == ([], set() if fits else {1})

    @pytest.mark.parametrize(("result", "is_known"), [(0, False), (1, True)])
    def test_values_that_were_sorted_are_no_positions(self, result: int, is_known: bool) -> None:
        outs = meta(3, dtype=LONG), meta(3, dtype=LONG)
        nodes = (
            Node(aten.sort.default, (Ref(1),), {}, 2, outs, result=(0, 1)),
            Node(aten.embedding.default, (Ref(0), Ref(2 + result)), {}, 4, (meta(3, 4),), result=0),
        )
        graph = Graph(nodes, {0: TABLE, 1: INDEX}, (4,))
        assert find_bounds(graph) == ([], set() if is_known else {1})

    def test_arithmetic_is_left_to_the_reference_executor(self) -> None:
        assert self.found((aten.add.Tensor, (Ref(1), Ref(1)), INDEX), INDEX) == ([], {1})


@pytest.mark.parametrize(
    ("values", "bound", "expected"),
    [
        ([0, 8], Bound(0, 0, 8), True),
        ([0, 9], Bound(0, 0, 8), False),
        ([-1, 3], Bound(0, 0, 8), False),
        ([-4, 3], Bound(0, -4, 3), True),
        ([-100, 3], Bound(0, 0, 3, -100), True),
        ([-100, 4], Bound(0, 0, 3, -100), False),
        ([], Bound(0, 0, -1), True),
    ],
)
def test_hold(values: list[int], bound: Bound, expected: bool) -> None:
    assert in_bounds([bound], [torch.tensor(values, dtype=LONG)]) is expected


class TestInAProgram:
    """A compiled part whose indices are out of range runs op by op, where the op at fault raises."""

    def chain(self, launched: list[int]) -> PartitionedProgram:
        graph = graph_of([TABLE, INDEX], (aten.embedding.default, (Ref(0), Ref(1)), meta(3, 4)))
        parts = partition(graph, [], frozenset(), frozenset())
        assert [part.compiled for part in parts] == [True]

        class Library:
            def run(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
                table, index = (tensors[parts[0].inputs.index(value)] for value in (0, 1))
                launched.append(int(index.max()))
                return [torch.nn.functional.embedding(index, table)]

        library: Any = Library()
        return compiled_program(graph, parts, {0: (library, (2,))}, torch.device("cpu"))

    def test_in_range(self) -> None:
        launched: list[int] = []
        table = torch.arange(36.0).view(9, 4)
        steps = self.chain(launched).run_in_steps([table, torch.tensor([0, 8, 1])], [])
        (rows,), _ = ended(steps)
        assert torch.equal(rows, table[[0, 8, 1]]) and launched == [8]

    def test_out_of_range(self) -> None:
        launched: list[int] = []
        with pytest.raises(NodeFailure) as failure:
            ended(
                self.chain(launched).run_in_steps([torch.ones(9, 4), torch.tensor([0, 9, 1])], [])
            )
        assert isinstance(failure.value.__cause__, IndexError) and launched == []
        assert failure.value.node is not None and failure.value.node.op is aten.embedding.default
