"""What the compiler is given: functional FX graphs, writes at the end, numbers as inputs, convolutions channels-last.

That they compute what eager computes is in test_compiled_subgraph.py, on random graphs.
"""

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from ltc_core.executors.inductor.lowering.lower import Lowered, lower
from ltc_core.executors.inductor.partition import partition
from ltc_core.graph.ir import Graph, Node, Ref, Scalar, TensorMeta, ViewStep, Write
from ltc_core.ops.attention import _takes_groups
from ltc_core.program.lowering.decompositions import FOR_INDUCTOR, attention, attention_backward
from ltc_core.program.lowering.retrace import Refused
from ltc_core.program.plan import plan
from ltc_core.program.scalar_inputs import SCALAR_DTYPES, WHOLE_RULES
from ltc_core.program.subgraph import Subgraph
from tests.core.beside_eager import run_beside_eager
from tests.nets.tiers import tier

aten = torch.ops.aten
META = TensorMeta.packed((4,), torch.float32)
FLASH = aten._scaled_dot_product_flash_attention_for_cpu.default
FLASH_BACKWARD = aten._scaled_dot_product_flash_attention_for_cpu_backward.default


def node(op: Any, first: int, *args: Any, meta: TensorMeta = META, **kwargs: Any) -> Node:
    return Node(op, args, kwargs, first, (meta,), result=0)


def lowered(graph: Graph, *scalars: Any, varied: frozenset[int] = frozenset()) -> Lowered:
    part = only_part(graph, *scalars, varied=varied)
    return lower(part, "cpu")


def only_part(graph: Graph, *scalars: Any, varied: frozenset[int] = frozenset()) -> Subgraph:
    [part] = partition(graph, scalars, varied, frozenset())
    assert part.compiled
    return part


def calls(found: Lowered) -> list[str]:
    """Names of the ops of the FX graph, in order; without clones, which the compiler drops."""
    targets = [n.target for n in found.module.graph.nodes if n.op == "call_function"]
    names = [t._opname for t in targets if isinstance(t, torch._ops.OpOverload)]
    return [name for name in names if name != "clone"]


def run(
    graph: Graph,
    tensors: Sequence[torch.Tensor],
    *scalars: Any,
    varied: frozenset[int] = frozenset(),
) -> list[torch.Tensor]:
    """Run a lowered graph on its inputs, in order; give all outputs, in order, those in inputs' memory too."""
    part = only_part(graph, *scalars, varied=varied)
    found = lower(part, "cpu")
    values = dict(zip(graph.inputs, tensors, strict=True))
    typed = list(zip(part.scalars, part.scalar_types, strict=True))
    numbers = [
        torch.tensor([scalars[k] for k, t in typed if t is kind], dtype=dtype)
        for kind, dtype in SCALAR_DTYPES.items()
        if kind in part.scalar_types
    ]  # fmt: skip
    with torch.no_grad():
        returned = found.module(*(values[v] for v in part.inputs), *numbers)
    results = dict(zip(found.returned, returned, strict=True))
    reuses = plan(part.graph).reuses
    return [
        results[o]
        if o in results
        else values[part.inputs[list(part.graph.inputs).index(reuses[o])]]
        for o in part.graph.outputs
    ]


class TestWrites:
    def graph(self, *outputs: int, donated: bool = True) -> Graph:
        """exp(x), then x += 1, then neg(x)."""
        nodes = (
            node(aten.exp.default, 1, Ref(0)),
            Node(aten.add_.Scalar, (Write(0, ()), 1), {}, 2, (META,), (0,), result="self"),
            node(aten.neg.default, 3, Ref(2)),
        )
        return Graph(nodes, {0: META}, outputs, frozenset({0} if donated else ()))

    def test_what_ends_in_an_inputs_memory_is_stored_there_at_the_end(self) -> None:
        found = lowered(self.graph(1, 2, 3))
        computed, own = ["exp", "add", "neg"], ["own", "own"]
        assert calls(found) == [*computed, *own, "before_writes", "copy_"]
        assert found.returned == (1, 3)
        x, old = torch.arange(4.0), torch.arange(4.0)
        exp, new, neg = run(self.graph(1, 2, 3), [x])
        assert new is x and torch.equal(x, old + 1)
        assert torch.equal(exp, old.exp()) and torch.equal(neg, -x)

    def test_an_input_that_others_see_is_not_written(self) -> None:
        assert calls(lowered(self.graph(2, donated=False))) == ["add", "own"]
        x = torch.arange(4.0)
        [new] = run(self.graph(2, donated=False), [x])
        assert torch.equal(x, torch.arange(4.0)) and torch.equal(new, x + 1)

    def test_two_inputs_change_places(self) -> None:
        nodes = (
            Node(aten.copy_.default, (Write(0, ()), Ref(1)), {}, 2, (META,), (0,), result="self"),
            Node(aten.copy_.default, (Write(0, ()), Ref(0)), {}, 3, (META,), (1,), result="self"),
        )
        graph = Graph(nodes, dict.fromkeys((0, 1), META), (2, 3), frozenset({0, 1}))
        first, second = run(graph, [torch.zeros(4), torch.ones(4)])
        assert torch.equal(first, torch.ones(4)) and torch.equal(second, torch.zeros(4))

    def test_a_write_through_a_view(self) -> None:
        lens = (ViewStep(aten.slice.Tensor, (0, 1, 3)),)
        write = Node(aten.mul_.Tensor, (Write(0, lens), 5), {}, 1, (META,), (0,), result="self")
        x = torch.ones(4)
        [result] = run(Graph((write,), {0: META}, (1,), frozenset({0})), [x])
        assert result is x and x.tolist() == [1, 5, 5, 1]

    def batch_norms(self) -> Graph:
        """Two in training on one pair of running statistics; the first ones are wanted too."""
        x = TensorMeta.packed((8, 4), torch.float32)
        nodes = []
        for first, mean, var in ((3, 1, 2), (8, 6, 7)):
            args = (Ref(0), None, None, Write(0, ()), Write(1, ()), True, 0.5, 1e-5)
            outs = (x, META, META, META, META)
            norm = aten.native_batch_norm.default
            nodes.append(Node(norm, args, {}, first, outs, (mean, var), result=(0, 1, 2)))
        return Graph(tuple(nodes), {0: x, 1: META, 2: META}, (6, 7, 11, 12), frozenset({1, 2}))

    @pytest.mark.parametrize("has_rule", [True, False])
    def test_writes_that_a_schema_does_not_mark(
        self, has_rule: bool, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Without a rule for the op its decomposition writes, and what was traced is made functional again."""
        if not has_rule:
            monkeypatch.delitem(WHOLE_RULES, "native_batch_norm")
        names = calls(lowered(self.batch_norms()))
        assert names.count("copy_") == 2 and names[-2:] == ["copy_", "copy_"]
        x, mean, var = torch.randn(8, 4), torch.zeros(4), torch.ones(4)
        first, _, second, _ = run(self.batch_norms(), [x, mean, var])
        torch.testing.assert_close(first, x.mean(0) / 2)
        torch.testing.assert_close(second, x.mean(0) * 0.75)


class TestNumbers:
    def test_they_are_elements_of_a_vector_for_each_type(self) -> None:
        nodes = (
            node(aten.mul.Tensor, 1, Ref(0), Scalar(0)),
            node(aten.add.Tensor, 2, Ref(1), Scalar(1)),
            node(aten.mul.Tensor, 3, Ref(2), Scalar(2)),
        )
        graph, varied = Graph(nodes, {0: META}, (3,)), frozenset({0, 1, 2})
        vectors = [
            (t.shape, t.dtype) for t in lowered(graph, 0.5, 3, 0.25, varied=varied).fakes[1:]
        ]
        assert vectors == [((2,), torch.float64), ((1,), torch.int64)]
        for a, b, c in ((0.5, 3, 0.25), (2.0, -1, 7.5)):
            [result] = run(graph, [torch.arange(4.0)], a, b, c, varied=varied)
            assert torch.equal(result, (torch.arange(4.0) * a + b) * c)

    def test_a_foreach_op_is_one_op_for_each_tensor(self) -> None:
        step = Node(
            aten._foreach_add_.List,
            ([Write(0, ()), Write(1, ())], [Ref(2), Ref(3)]),
            {"alpha": Scalar(0)},
            4,
            (META, META),
            (0, 1),
            result="self",
        )
        graph = Graph((step,), dict.fromkeys(range(4), META), (4, 5), frozenset({0, 1}))
        names = calls(lowered(graph, -0.5))
        assert names.count("add") == 2 and not any("foreach" in name for name in names)
        tensors = [torch.ones(4), torch.ones(4) * 2, torch.ones(4), torch.arange(4.0)]
        first, second = run(graph, tensors, -0.5)
        assert first is tensors[0] and torch.equal(first, torch.full((4,), 0.5))
        assert second is tensors[1] and torch.equal(second, 2 - 0.5 * torch.arange(4.0))

    def test_a_foreach_op_whose_first_operand_is_a_number(self) -> None:
        step = Node(
            aten._foreach_pow.ScalarAndTensor, (Scalar(0), [Ref(0), Ref(1)]), {}, 2, (META, META)
        )
        graph = Graph((step,), dict.fromkeys(range(2), META), (2, 3))
        tensors = [torch.arange(4.0), torch.ones(4)]
        results = run(graph, tensors, 0.5)
        assert [t.tolist() for t in results] == [[1.0, 0.5, 0.25, 0.125], [0.5] * 4]


class TestStrides:
    def test_convolutions_are_channels_last_inside_and_as_recorded_outside(self) -> None:
        x, weight = torch.randn(2, 3, 8, 8), torch.randn(4, 3, 3, 3)
        out = F.conv2d(x, weight)
        conv = node(
            aten.convolution.default, 2, Ref(0), Ref(1), None, [1, 1], [0, 0], [1, 1], False, [0, 0], 1,
            meta=TensorMeta.like(out),
        )  # fmt: skip
        graph = Graph((conv,), {0: TensorMeta.like(x), 1: TensorMeta.like(weight)}, (2,))
        nodes = lowered(graph).module.graph.nodes
        convolution = next(n for n in nodes if n.target is aten.convolution.default)
        for operand in convolution.args[:2]:
            assert operand.meta["val"].is_contiguous(memory_format=torch.channels_last)
        [result] = run(graph, [x, weight])
        assert result.stride() == out.stride()
        torch.testing.assert_close(result, out)

    def test_what_is_turned_stays_turned(self) -> None:
        turned = TensorMeta.of((2, 3), (1, 2), 0, torch.float32)
        graph = Graph((node(aten.exp.default, 1, Ref(0), meta=turned),), {0: turned}, (1,))
        [result] = run(graph, [torch.zeros(3, 2).t()])
        assert result.stride() == (1, 2)

    def test_an_output_that_is_a_view_of_an_input_is_a_copy(self) -> None:
        square = TensorMeta.packed((2, 2), torch.float32)
        view = Node(aten.view.default, (Ref(0), [2, 2]), {}, 1, (square,), view=True, result=0)
        x = torch.zeros(4)
        [result] = run(Graph((view,), {0: META}, (1,)), [x])
        assert result.untyped_storage().data_ptr() != x.untyped_storage().data_ptr()


@torch.library.custom_op("lower_tests::no_rule", mutates_args=())
def no_rule(x: torch.Tensor) -> torch.Tensor:
    return x.clone()  # without a rule for fake tensors


def test_an_op_that_cannot_be_traced_is_named() -> None:
    op = torch.ops.lower_tests.no_rule.default
    graph = Graph((node(aten.exp.default, 1, Ref(0)), node(op, 2, Ref(1))), {0: META}, (2,))
    with pytest.raises(Refused, match=r"^lower_tests\.no_rule\.default: ") as caught:
        lowered(graph)
    # The name is what `partition` takes: that op then runs op by op.
    parts = partition(graph, [], frozenset(), frozenset({caught.value.op}))
    assert [part.compiled for part in parts] == [True, False]


def test_an_op_with_a_complex_number_that_no_rule_replaces_is_named() -> None:
    complex_meta, index = (
        TensorMeta.like(torch.empty(2, 2, dtype=dtype)) for dtype in (torch.complex64, torch.int64)
    )
    op = aten.scatter.value
    scatter = node(op, 2, Ref(0), 0, Ref(1), 2j, meta=complex_meta)
    with pytest.raises(Refused, match="complex number") as caught:
        lowered(Graph((scatter,), {0: complex_meta, 1: index}, (2,)))
    assert caught.value.op == str(op)


def test_a_fused_optimizer_that_is_given_a_parameter_twice_is_not_compiled() -> None:
    twice = [Write(0, ()), Write(0, ())]
    options = dict.fromkeys(("weight_decay", "momentum", "dampening"), 0.0)
    flags = dict.fromkeys(("nesterov", "maximize", "is_first_step"), False)
    args = (twice, [Ref(1), Ref(1)], [])
    op = aten._fused_sgd_.default
    step = Node(op, args, {**options, "lr": Scalar(0), **flags}, 2, (META,), (0,))
    with pytest.raises(Refused, match="twice"):
        lowered(Graph((step,), {0: META, 1: META}, (2,)), 0.1, varied=frozenset({0}))


LAYOUTS: dict[str, Callable[[torch.Generator], torch.Tensor]] = {
    "heads inside": lambda g: torch.randn(2, 16, 4, 8, generator=g).transpose(1, 2),
    "packed": lambda g: torch.randn(2, 4, 16, 8, generator=g),
}


class TestSpelledOut:
    def operands(self, count: int, layout: str = "heads inside") -> list[torch.Tensor]:
        g = torch.Generator().manual_seed(0)
        return [LAYOUTS[layout](g) for _ in range(count)]

    @pytest.mark.parametrize("scale", [None, 0.3])
    @pytest.mark.parametrize("causal", [False, True])
    @pytest.mark.parametrize("layout", LAYOUTS)
    def test_attention_is_flash_attention(
        self, layout: str, causal: bool, scale: float | None
    ) -> None:
        """Where queries have their heads inside, as models make them, its strides are the op's too."""
        query, key, value, grad = self.operands(4, layout)
        expected = FLASH(query, key, value, 0.0, causal, scale=scale)
        given = (grad, query, key, value, *expected, 0.0, causal)
        pairs = [
            (attention(query, key, value, 0.0, causal, scale=scale), expected),
            (attention_backward(*given, scale=scale), FLASH_BACKWARD(*given, scale=scale)),
        ]
        for got, wanted in pairs:
            for a, b in zip(got, wanted, strict=True):
                torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)
                assert a.stride() == b.stride() or layout == "packed"

    @pytest.mark.skipif(not _takes_groups(), reason="the op of this PyTorch takes no groups")
    @pytest.mark.parametrize("num_groups", [1, 2])
    def test_heads_that_share_keys_and_values(self, num_groups: int) -> None:
        query, key, value, grad = self.operands(4)
        key, value = key[:, :num_groups], value[:, :num_groups]
        expected = FLASH(query, key, value, 0.0, True)
        given = (grad, query, key, value, *expected, 0.0, True)
        pairs = [
            (attention(query, key, value, 0.0, True), expected),
            (attention_backward(*given), FLASH_BACKWARD(*given)),
        ]
        for got, wanted in pairs:
            for a, b in zip(got, wanted, strict=True):
                torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)
                assert a.stride() == b.stride() or 1 in a.shape

    @pytest.mark.parametrize("what", ["a mask", "dropout", "bfloat16", "many tokens"])
    def test_what_is_left_to_the_op(self, what: str) -> None:
        rule = FOR_INDUCTOR[FLASH._opname]
        query, key, value = self.operands(3)
        assert rule(query, key, value) is not None
        mask, dropout = None, 0.0
        if what == "a mask":
            mask = torch.zeros(16, 16)
        elif what == "dropout":
            dropout = 0.5
        elif what == "bfloat16":
            query = query.bfloat16()
        else:
            query = key = value = torch.empty(1, 1, 257, 8, device="meta")
        assert rule(query, key, value, dropout, attn_mask=mask) is None

    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
    def test_a_mask_may_hide_all_that_a_token_could_look_at(self, dtype: torch.dtype) -> None:
        query, key, value, grad = (t.to(dtype) for t in self.operands(4))
        mask = torch.zeros(query.shape[2], key.shape[2], dtype=dtype)
        mask[0] = mask[1, :3] = float("-inf")
        expected = FLASH(query, key, value, attn_mask=mask)
        given = (grad, query, key, value, *expected, 0.0, False)
        pairs = [
            (attention(query, key, value, attn_mask=mask), expected),
            (attention_backward(*given, attn_mask=mask), FLASH_BACKWARD(*given, attn_mask=mask)),
        ]
        close = {} if dtype is torch.float32 else {"rtol": 0.02, "atol": 0.02}
        for got, wanted in pairs:
            for a, b in zip(got, wanted, strict=True):
                torch.testing.assert_close(a, b, **close)


def test_a_reduction_into_a_tensor_of_another_dtype() -> None:
    """Its operand is converted before it is reduced: 0.6 + 1.6 is 1 in whole numbers."""

    def program(device: torch.device) -> list[torch.Tensor]:
        x = torch.arange(4.0).to(device) + 0.6
        outs = [torch.zeros((), dtype=torch.int64, device=device) for _ in range(3)]
        torch.sum(x, 0, out=outs[0])
        torch.prod(x, 0, out=outs[1])
        torch.nansum(x, 0, out=outs[2])
        running = torch.zeros(4, dtype=torch.int64, device=device)
        return [*outs, torch.cumsum(x, 0, out=running)]

    with tier("lowered"):
        run_beside_eager(program, rounds=1)
