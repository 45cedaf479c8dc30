"""The graph's parts: metas that are one object when equal, nodes that can be read."""

import pytest
import torch

from ltc_core.graph.ir import (
    Graph,
    Node,
    Ref,
    Scalar,
    TensorMeta,
    ViewStep,
    Write,
    contiguous_stride,
    references,
)

aten = torch.ops.aten
META = TensorMeta.packed((2, 3), torch.float32)
SIZES = [(), (1,), (5,), (2, 3), (4, 1, 3), (2, 0, 3), (0,), (1, 1, 1), (3, 2, 1, 4)]

TENSORS = {
    "packed": lambda: torch.ones(2, 3),
    "0-dim": lambda: torch.tensor(1.0),
    "empty": lambda: torch.ones(2, 0, 3),
    "transposed": lambda: torch.ones(2, 3).t(),
    "permuted": lambda: torch.ones(2, 3, 4).permute(2, 0, 1),
    "channels_last": lambda: torch.ones(2, 3, 4, 5).to(memory_format=torch.channels_last),
    "expanded": lambda: torch.ones(3, 1).expand(3, 4),
    "part": lambda: torch.ones(6, 4)[2:5, 1::2],
    "part of the end": lambda: torch.ones(6, 4)[5, 3],
    "empty part": lambda: torch.ones(6, 4)[6:],
    "empty part of a part": lambda: torch.ones(6, 4)[3:, 2:][:, 5:],
    "overlapping": lambda: torch.ones(10).unfold(0, 4, 2),
    "half": lambda: torch.ones(3, dtype=torch.float16),
    "complex": lambda: torch.ones(3, dtype=torch.complex64),
    "bool": lambda: torch.ones(3, dtype=torch.bool),
}


# -- TensorMeta ------------------------------------------------------------------------------------


def test_equal_metas_are_one_object() -> None:
    first = TensorMeta.of((2, 3), (3, 1), 0, torch.float32)
    assert TensorMeta.of([2, 3], [3, 1], 0, torch.float32) is first
    assert TensorMeta.of(torch.Size((2, 3)), (3, 1), 0, torch.float32) is first
    assert TensorMeta.packed((2, 3), torch.float32) is first
    assert TensorMeta.like(torch.zeros(2, 3)) is first


@pytest.mark.parametrize(
    "other",
    [
        ((3, 2), (3, 1), 0, torch.float32),
        ((2, 3), (1, 2), 0, torch.float32),
        ((2, 3), (3, 1), 1, torch.float32),
        ((2, 3), (3, 1), 0, torch.int32),
    ],
    ids=["size", "stride", "offset", "dtype"],
)
def test_metas_that_differ_are_different(other: tuple) -> None:
    assert TensorMeta.of(*other) is not META
    assert TensorMeta.of(*other) != META


@pytest.mark.parametrize("kind", TENSORS)
def test_like_and_meta_tensor_are_inverse(kind: str) -> None:
    tensor = TENSORS[kind]()
    meta = TensorMeta.like(tensor)
    again = meta.meta_tensor()
    assert again.device.type == "meta"
    assert (again.shape, again.dtype) == (tensor.shape, tensor.dtype)
    assert (again.stride(), again.storage_offset()) == (tensor.stride(), tensor.storage_offset())
    assert TensorMeta.like(again) is meta


@pytest.mark.parametrize("kind", TENSORS)
def test_what_a_meta_says_of_its_tensor(kind: str) -> None:
    tensor = TENSORS[kind]()
    meta = TensorMeta.like(tensor)
    assert meta.size == tensor.shape
    assert isinstance(meta.size, torch.Size)
    assert meta.numel == tensor.numel()
    assert meta.nbytes == tensor.numel() * tensor.element_size()
    if tensor.numel():
        assert meta.contiguous == (tensor.stride() == contiguous_stride(tensor.shape))


def test_overlaps_tells_of_elements_in_one_place() -> None:
    assert TensorMeta.like(torch.ones(3, 1).expand(3, 4)).overlaps
    assert not TensorMeta.of((3, 1), (1, 0), 0, torch.float32).overlaps  # one element is one place
    assert not TensorMeta.like(torch.ones(1).expand(1, 1)).overlaps
    assert not META.overlaps


@pytest.mark.parametrize("size", SIZES, ids=str)
def test_contiguous_stride_is_pytorchs(size: tuple[int, ...]) -> None:
    assert contiguous_stride(size) == torch.empty(size).stride()
    assert TensorMeta.packed(size, torch.int8).contiguous


def test_metas_are_written_as_dtype_and_size() -> None:
    assert str(META) == "float32[2, 3]"
    assert "float32[2, 3]" in repr(META)


# -- nodes -----------------------------------------------------------------------------------------


def write_node() -> Node:
    lens = (ViewStep(aten.select.int, (0, 1)), ViewStep(aten.unbind.int, (0,), 2))
    args = (Write(0, lens), Ref(4))
    return Node(
        aten.add_.Tensor, args, {"alpha": Scalar(0)}, 7, (META,), (3,), result="self", line="a.py:1"
    )


def test_references_are_what_is_written_over_then_what_is_read() -> None:
    assert list(references(write_node())) == [3, 4]
    args = ([Ref(1), None, Ref(2)], Scalar(9), (5, 6))
    node = Node(aten.cat.default, args, {"out": Write(0, ()), "x": [[Ref(8)]]}, 10, (META,), (0,))
    assert list(references(node))[0] == 0
    assert sorted(references(node)) == [0, 1, 2, 8]


def test_numbers_among_the_arguments_are_no_references() -> None:
    node = Node(aten.sum.dim_IntList, (Ref(0), (0, 1), True), {}, 1, (META,), result=0)
    assert list(references(node)) == [0]


def test_first_write_comes_after_the_ops_own_results() -> None:
    node = Node(aten.native_batch_norm.default, (), {}, 5, (META, META, META, META, META), (1, 2))
    assert node.first_write == 8
    assert write_node().first_write == 7


def test_a_node_reads_as_a_line() -> None:
    text = str(write_node())
    assert text == (
        "%7: float32[2, 3] = aten.add_.Tensor(&0.select(0, 1).unbind(0,)[2], %4, alpha=$0)"
        "  writes %3"
    )


# -- graphs ----------------------------------------------------------------------------------------


def small_graph() -> Graph:
    outs = (META, None)
    nodes = (
        Node(aten.relu.default, (Ref(0),), {}, 2, outs, result=(0, 1), line="train.py:41 in loss"),
        Node(aten.add.Tensor, (Ref(2), Ref(1)), {"alpha": Scalar(0)}, 4, (META,), result=0),
    )
    return Graph(nodes, {0: META, 1: META}, (2, 4), frozenset({1}))


def test_metas_of_a_graph_leave_out_undefined_results() -> None:
    assert small_graph().metas() == dict.fromkeys((0, 1, 2, 4), META)


def test_a_graph_reads_as_inputs_nodes_and_outputs() -> None:
    wanted = [
        "%0: float32[2, 3] = input",
        "%1: float32[2, 3] = input (donated)",
        "%2: float32[2, 3] = aten.relu.default(%0)  # train.py:41 in loss",
        "%4: float32[2, 3] = aten.add.Tensor(%2, %1, alpha=$0)",
        "return %2, %4",
    ]
    assert small_graph().text().split("\n") == wanted
    assert str(small_graph()) == small_graph().text()


def test_a_graph_can_be_read_without_lines() -> None:
    assert "train.py" not in small_graph().text(lines=False)


def test_view_steps_compare_by_value() -> None:
    """They are part of signatures."""
    first, second = (ViewStep(aten.select.int, (0, 1)) for _ in range(2))
    assert first == second
    assert hash(first) == hash(second)
    assert first != ViewStep(aten.select.int, (0, 2))
    assert first != ViewStep(aten.select.int, (0, 1), 0)
