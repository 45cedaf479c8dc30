"""Which nodes each kernel computes: FX nodes keep the position of their node, and reported kernels are noted by it."""

import warnings
from types import SimpleNamespace
from typing import Any

import torch
from torch.fx import Graph as FxGraph

from ltc_core.executors.inductor.lowering.lower import lower, position_of
from ltc_core.executors.inductor.partition import partition
from ltc_core.graph.ir import Graph, Node, Ref, TensorMeta

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # PyTorch's compiler uses what PyTorch deprecates
    from torch._inductor import debug

    from ltc_core.executors.inductor.compiler import kernels

aten = torch.ops.aten
META = TensorMeta.packed((4,), torch.float32)


def test_fx_nodes_have_the_position_of_their_node() -> None:
    """Also those of decomposed and foreach ops, and after equal calls were merged; copies of outputs have none."""
    nodes = (
        Node(aten.silu.default, (Ref(0),), {}, 1, (META,), result=0),  # x / (exp(-x) + 1)
        Node(aten._foreach_neg.default, ([Ref(0), Ref(1)],), {}, 2, (META, META), result=[0, 1]),
        Node(aten.neg.default, (Ref(1),), {}, 4, (META,), result=0),  # equal to the second neg
        Node(aten.mul.Tensor, (Ref(2), Ref(3)), {}, 5, (META,), result=0),
        Node(aten.mul.Tensor, (Ref(5), Ref(4)), {}, 6, (META,), result=0),
    )
    graph = Graph(nodes, {0: META}, (6,))
    (subgraph,) = partition(graph, [], frozenset(), frozenset())
    found = [
        (str(node.target).split(".")[1], position_of(node))
        for node in lower(subgraph, "cpu").module.graph.nodes
        if node.op == "call_function"
    ]
    assert {("neg", 0), ("exp", 0), ("div", 0)} <= set(found)
    assert [at for name, at in found if name == "neg"] == [0, 1]
    assert [at for name, at in found if name == "mul"] == [3, 4]
    assert [at for name, at in found if name == "own"] == [None]


def fx_node(position: int | None) -> Any:
    node = FxGraph().placeholder("x")
    if position is not None:
        node.meta["custom"] = {"ltc_position": position}
    return node


def test_reported_kernels() -> None:
    def loops(*positions: int | None) -> Any:
        return SimpleNamespace(node=SimpleNamespace(origins=[fx_node(at) for at in positions]))

    def call(*positions: int | None) -> Any:
        return SimpleNamespace(origins=[fx_node(at) for at in positions])

    before = debug.set_kernel_post_grad_provenance_tracing
    with kernels.noted() as calls:
        report: Any = debug.set_kernel_post_grad_provenance_tracing
        assert report([loops(4, 2), SimpleNamespace(), loops(2, None)], "cpp_fused_0") is None
        report(call(2, 7, None), "mm", is_extern=True)  # 2 makes an operand
        report([loops(None)], "a copy of an output")
        report([loops(4, 2)], "cpp_fused_0")  # the same code called again is another call
    assert debug.set_kernel_post_grad_provenance_tracing is before
    assert calls == [
        ("cpp_fused_0", [2, 4]),
        ("mm", [7]),
        ("cpp_fused_0", [2, 4]),
    ]
