"""A graph in parts: what is compiled, what runs op by op between, and what a part's text does not depend on."""

from typing import Any

import pytest
import torch

from ltc_core.executors.inductor.partition import partition
from ltc_core.graph.ir import Graph, Node, Ref, Scalar, TensorMeta, ViewStep, Write
from ltc_core.program.subgraph import Subgraph

aten = torch.ops.aten
META = TensorMeta.packed((4,), torch.float32)
STATE = TensorMeta.packed((5056,), torch.uint8)
NOTHING: frozenset[Any] = frozenset()


def node(op: Any, first: int, *args: Any, meta: TensorMeta = META, **kwargs: Any) -> Node:
    return Node(op, args, kwargs, first, (meta,), result=0)


def written(op: Any, first: int, target: Write, old: int, *args: Any) -> Node:
    return Node(op, (target, *args), {}, first, (META,), (old,), result="self")


def ops(part: Subgraph) -> list[str]:
    return [n.op._opname for n in part.graph.nodes]


def cut(
    graph: Graph,
    *scalars: Any,
    varied: frozenset[int] = NOTHING,
    refused: frozenset[str] = NOTHING,
) -> list[Subgraph]:
    return partition(graph, scalars, varied, refused)


def kinds(parts: list[Subgraph]) -> list[tuple[bool, list[str]]]:
    return [(part.compiled, ops(part)) for part in parts]


class TestWhatIsCompiled:
    def test_a_graph_of_plain_ops_is_one_part(self) -> None:
        graph = Graph(
            (node(aten.exp.default, 1, Ref(0)), node(aten.neg.default, 2, Ref(1))), {0: META}, (2,)
        )
        [part] = cut(graph)
        assert (part.compiled, ops(part)) == (True, ["exp", "neg"])
        assert (part.inputs, part.outputs, part.graph.outputs) == ((0,), (2,), (2,))

    @pytest.mark.parametrize(
        "op, divisor, compiled",
        [
            (aten.remainder.Tensor, Ref(0), False),
            (aten.div.Tensor_mode, Ref(0), False),
            (aten.floor_divide.default, Scalar(0), True),
            (aten.fmod.Scalar, Scalar(1), False),
            (aten.floor_divide.default, 3, True),
        ],
    )
    def test_whole_numbers_are_divided_where_zero_raises(
        self, op: Any, divisor: Any, compiled: bool
    ) -> None:
        meta = TensorMeta.packed((4,), torch.int64)
        named = {"rounding_mode": "floor"} if op is aten.div.Tensor_mode else {}
        divide = Node(op, (Ref(0), divisor), named, 1, (meta,), result=0)
        [part] = cut(Graph((divide,), {0: meta}, (1,)), 2, 0)
        assert part.compiled == compiled
        floats = Node(op, (Ref(0), divisor), named, 1, (META,), result=0)
        assert cut(Graph((floats,), {0: META}, (1,)), 2, 0)[0].compiled

    def test_a_refused_op_runs_between_compiled_subgraphs(self) -> None:
        graph = Graph(
            (
                node(aten.exp.default, 1, Ref(0)),
                node(aten.neg.default, 2, Ref(1)),
                node(aten.sin.default, 3, Ref(2)),
                node(
                    aten.cos.default, 4, Ref(0)
                ),  # does not wait: in the first part that is compiled
            ),
            {0: META},
            (3, 4),
        )
        parts = cut(graph, refused=frozenset({"aten.neg.default"}))
        assert kinds(parts) == [(True, ["exp", "cos"]), (False, ["neg"]), (True, ["sin"])]
        assert [part.inputs for part in parts] == [(0,), (1,), (2,)]
        assert [part.outputs for part in parts] == [(1, 4), (2,), (3,)]

    def test_a_draw_runs_first_with_what_it_fills(self) -> None:
        """Dropout: the mask waits for nothing that is compiled, so the step is not cut in two."""
        generator = {"generator": Ref(1)}
        draw = Node(
            aten.bernoulli_.float, (Write(0, ()), 0.5), generator, 4, (META, STATE), (3, 1), result="self"
        )  # fmt: skip
        graph = Graph(
            (
                node(aten.exp.default, 2, Ref(0)),
                node(aten.empty_like.default, 3, Ref(2)),
                draw,
                node(aten.mul.Tensor, 6, Ref(2), Ref(4)),
            ),
            {0: META, 1: STATE},
            (6, 5),
            frozenset({1}),
        )
        parts = cut(graph)
        assert kinds(parts) == [(False, ["empty_strided", "bernoulli_"]), (True, ["exp", "mul"])]
        assert parts[0].inputs == (1,) and set(parts[1].inputs) == {0, 4}

    @pytest.mark.parametrize(
        ("op", "becomes"),
        [
            (aten.empty_like.default, (aten.empty_strided.default, ((4,), (1,)))),
            (aten.zeros_like.default, (aten.full.default, ((4,), 0))),
            (aten.ones_like.default, (aten.full.default, ((4,), 1))),
        ],
    )
    def test_what_reads_only_a_shape_waits_for_nothing(self, op: Any, becomes: Any) -> None:
        graph = Graph((node(aten.exp.default, 1, Ref(0)), node(op, 2, Ref(1))), {0: META}, (2,))
        [part] = cut(graph)
        [made] = part.graph.nodes  # nobody needs the exp
        assert (made.op, made.args) == becomes and part.inputs == ()
        assert made.kwargs == {"dtype": torch.float32}

    def test_strides_that_are_not_packed_are_kept(self) -> None:
        turned = TensorMeta.of((2, 3), (1, 2), 0, torch.float32)
        for op in (aten.zeros_like.default, aten.ones_like.default):
            [part] = cut(Graph((node(op, 1, Ref(0), meta=turned),), {0: turned}, (1,)))
            assert part.graph.nodes[0].op is op and part.inputs == (0,)
        [part] = cut(
            Graph((node(aten.empty_like.default, 1, Ref(0), meta=turned),), {0: turned}, (1,))
        )
        assert part.graph.nodes[0].args == ((2, 3), (1, 2))

    @pytest.mark.parametrize(
        ("lens", "compiled"),
        [
            ((), True),
            ((ViewStep(aten.slice.Tensor, (0, 1, 3)),), True),
            ((ViewStep(aten.slice.Tensor, (0, 1, 3)), ViewStep(aten.as_strided.default, ([1], [1], 1))), False),
            ((ViewStep(aten.unfold.default, (0, 2, 3)),), False),
        ],
        ids=["whole", "a slice", "strides of a slice", "windows"],
    )  # fmt: skip
    def test_writes_through_views(self, lens: Any, compiled: bool) -> None:
        graph = Graph(
            (written(aten.zero_.default, 1, Write(0, lens), 0),), {0: META}, (1,), frozenset({0})
        )
        assert kinds(cut(graph)) == [(compiled, ["zero_"])]

    def test_an_index_that_cannot_be_checked(self) -> None:
        index = TensorMeta.packed((3,), torch.int64)
        table = TensorMeta.packed((9, 4), torch.float32)
        rows = TensorMeta.packed((3, 4), torch.float32)
        graph = Graph(
            (
                node(aten.add.Tensor, 2, Ref(1), Ref(1), meta=index),
                node(aten.embedding.default, 3, Ref(0), Ref(2), meta=rows),
                node(aten.exp.default, 4, Ref(3), meta=rows),
            ),
            {0: table, 1: index},
            (4,),
        )
        found = kinds(cut(graph))
        assert found == [(True, ["add"]), (False, ["embedding"]), (True, ["exp"])]


class TestCanonicalForm:
    def graph(self, first: int, x: int, y: int) -> Graph:
        nodes = (
            node(aten.sub.Tensor, first, Ref(x), Ref(y)),
            node(aten.mul.Tensor, first + 1, Ref(first), Scalar(first % 3)),
        )
        return Graph(nodes, {x: META, y: META}, (first + 1,))

    def test_values_and_numbers_are_counted_from_zero(self) -> None:
        texts = set()
        for first, x, y in ((2, 0, 1), (40, 7, 3), (9, 3, 7)):
            [part] = cut(self.graph(first, x, y), 0.1, 0.2, 0.3)
            texts.add(part.graph.text())
            assert part.scalars == (first % 3,) and part.scalar_types == (float,)
            assert set(part.inputs) == {x, y} and part.outputs == (first + 1,)
        assert len(texts) == 1

    def test_nodes_are_given_as_they_were(self) -> None:
        graph = self.graph(40, 7, 3)
        [part] = cut(graph, 0.1, 0.2, 0.3)
        assert all(a is b for a, b in zip(part.nodes, graph.nodes, strict=True))

    def test_each_part_counts_its_own_numbers(self) -> None:
        graph = Graph(
            (
                node(aten.mul.Tensor, 1, Ref(0), Scalar(0)),
                node(aten.neg.default, 2, Ref(1)),
                node(aten.mul.Tensor, 3, Ref(2), Scalar(1)),
                node(aten.add.Tensor, 4, Ref(3), Scalar(1)),
            ),
            {0: META},
            (4,),
        )
        parts = cut(graph, 0.1, 0.2, refused=frozenset({"aten.neg.default"}))
        assert [part.scalars for part in parts] == [(0,), (), (1,)]
        assert parts[2].graph.nodes[1].args[1] == Scalar(0)


class TestNumbers:
    def test_what_does_not_change_is_written_into_the_program(self) -> None:
        graph = Graph((node(aten.mul.Tensor, 1, Ref(0), Scalar(0)),), {0: META}, (1,))
        [part] = cut(graph, 2)
        assert (part.scalars, part.constants) == ((), {0: 2})
        assert part.graph.nodes[0].args[1] == 2 and type(part.graph.nodes[0].args[1]) is int

    def test_what_changed_once_is_an_input(self) -> None:
        graph = Graph((node(aten.mul.Tensor, 1, Ref(0), Scalar(0)),), {0: META}, (1,))
        [part] = cut(graph, 2, varied=frozenset({0}))
        assert (part.scalars, part.scalar_types, part.constants) == ((0,), (int,), {})

    def test_the_reference_executor_gets_all_of_them(self) -> None:
        graph = Graph((node(aten.pow.Tensor_Scalar, 1, Ref(0), Scalar(0)),), {0: META}, (1,))
        [part] = cut(graph, 2, refused=frozenset({"aten.pow.Tensor_Scalar"}))
        assert (part.scalars, part.constants) == ((0,), {})


class TestMemory:
    def test_what_nobody_reads_later_may_be_written_over(self) -> None:
        """Values between parts, and the graph's own donated inputs; in the last part that reads them."""
        graph = Graph(
            (
                node(aten.exp.default, 2, Ref(0)),
                node(aten.neg.default, 3, Ref(2)),
                node(aten.add.Tensor, 4, Ref(3), Ref(1)),
                node(aten.mul.Tensor, 5, Ref(4), Ref(2)),
            ),
            {0: META, 1: META},
            (5,),
            frozenset({0}),
        )
        parts = cut(graph, refused=frozenset({"aten.neg.default"}))
        donated = [{part.inputs[i] for i in part.graph.donated} for part in parts]
        assert kinds(parts) == [(True, ["exp"]), (False, ["neg"]), (True, ["add", "mul"])]
        assert donated == [{0}, set(), {2, 3}]  # 2 is read twice, 1 is not donated

    def test_an_output_is_nobodys_to_write_over(self) -> None:
        graph = Graph(
            (node(aten.exp.default, 1, Ref(0)), node(aten.neg.default, 2, Ref(1))), {0: META}, (1, 2)
        )  # fmt: skip
        parts = cut(graph, refused=frozenset({"aten.neg.default"}))
        assert [part.graph.donated for part in parts] == [NOTHING, NOTHING]

    def test_outputs_that_are_inputs_as_they_are(self) -> None:
        graph = Graph((node(aten.exp.default, 2, Ref(0)),), {0: META, 1: META}, (2, 1))
        compiled, passing = cut(graph)
        assert (compiled.compiled, compiled.outputs) == (True, (2,))
        assert (passing.compiled, passing.inputs, passing.outputs) == (False, (1,), (1,))
        assert not passing.graph.nodes

    def test_what_nobody_needs_is_in_no_part(self) -> None:
        graph = Graph(
            (node(aten.exp.default, 1, Ref(0)), node(aten.neg.default, 2, Ref(0))), {0: META}, (2,)
        )  # fmt: skip
        assert kinds(cut(graph)) == [(True, ["neg"])]
