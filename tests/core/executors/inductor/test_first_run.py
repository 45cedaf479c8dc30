"""What a library gives at its first run is checked: shared memory is found by addresses, and is not used again."""

import logging
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

from ltc_core import metrics
from ltc_core.executors.inductor.compiled_subgraph import compiled_program
from ltc_core.executors.inductor.first_run import shared_outputs, wrong_output
from ltc_core.executors.inductor.launcher import Mismatch
from ltc_core.executors.inductor.partition import partition
from ltc_core.graph.ir import Graph, Node, Ref, TensorMeta, Write
from ltc_core.program.failure import NodeFailure
from ltc_core.program.partitioned import PartitionedProgram
from tests.core.stand_ins import ended

aten = torch.ops.aten
META = TensorMeta.packed((4,), torch.float32)


def test_memory_is_compared_by_addresses() -> None:
    x, y = torch.arange(8.0), torch.arange(8.0)
    assert shared_outputs([y, y.clone(), y.new_empty(0)], [x, x]) == {}
    assert shared_outputs([y, y], [x]) == {1: None}
    assert shared_outputs([y[2:4], y[1:6]], [x]) in ({0: None}, {1: None})
    assert shared_outputs([y[:4], y[4:]], [x]) == {}  # one storage, no element in common
    assert shared_outputs([y, x.view(2, 4)[0]], [y + 1, x]) == {1: 1}
    assert shared_outputs([x], [x[2:4]]) == {0: 0}


def test_dtypes_and_sizes_are_compared() -> None:
    assert wrong_output([torch.ones(4)], [META]) == ""
    assert (
        wrong_output([torch.ones(4).double()], [META]) == "output 0 is float64[4], not float32[4]"
    )
    assert wrong_output([torch.ones(5)], [META]) == "output 0 is float32[5], not float32[4]"


class _Library:
    """A library that computes what it is told to, and counts its runs."""

    def __init__(self, outputs: Callable[[Sequence[torch.Tensor]], list[torch.Tensor]]) -> None:
        self._outputs = outputs
        self.num_runs = 0

    def run(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        self.num_runs += 1
        return self._outputs(tensors)


def program(library: Any, donated: bool = False) -> PartitionedProgram:
    """neg(x), neg(x), and x += 1 if x is donated."""
    nodes = [Node(aten.neg.default, (Ref(0),), {}, k, (META,), result=0) for k in (1, 2)]
    outputs: tuple[int, ...] = (1, 2)
    if donated:
        nodes.append(Node(aten.add_.Scalar, (Write(0, ()), 1), {}, 3, (META,), (0,), result="self"))
        outputs = (1, 2, 3)
    graph = Graph(tuple(nodes), {0: META}, outputs, frozenset({0} if donated else ()))
    parts = partition(graph, [], frozenset(), frozenset())
    return compiled_program(graph, parts, {0: (library, (1, 2))}, torch.device("cpu"))


def run(program: PartitionedProgram) -> list[torch.Tensor]:
    return ended(program.run_in_steps([torch.arange(4.0)], []))[0]


def test_outputs_that_share_memory_are_parted_and_the_library_is_left(
    caplog: pytest.LogCaptureFixture,
) -> None:
    library = _Library(lambda tensors: [-tensors[0]] * 2)
    chain = program(library)
    before = metrics.counter_value("CompileRefused") or 0
    with caplog.at_level(logging.WARNING, "ltc"):
        for _ in range(2):
            first, second = run(chain)
            second.add_(100)
            assert torch.equal(first, -torch.arange(4.0))
    assert library.num_runs == 1
    assert metrics.counter_value("CompileRefused") == before + 1
    [record] = caplog.records
    assert "returns shared memory (outputs [1]); its ops run one by one" in record.message


def test_another_dtype_is_not_used(caplog: pytest.LogCaptureFixture) -> None:
    library = _Library(lambda tensors: [-tensors[0], -tensors[0].double()])
    chain = program(library)
    with caplog.at_level(logging.WARNING, "ltc"):
        assert [t.dtype for _ in range(2) for t in run(chain)] == [torch.float32] * 4
    assert library.num_runs == 1 and "output 1 is float64[4]" in caplog.text


def test_an_input_of_another_size_leaves_the_library() -> None:
    """An op before it has given other sizes than its meta kernel said."""

    def mismatch(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        raise Mismatch(0, TensorMeta.like(tensors[0]))

    library = _Library(mismatch)
    chain = program(library)
    given = torch.arange(3.0)
    for _ in range(2):
        results = ended(chain.run_in_steps([given], []))[0]
        assert [t.tolist() for t in results] == [(-given).tolist()] * 2
    assert library.num_runs == 1


def test_an_overwritten_input_is_an_error_and_no_value() -> None:
    def compute(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        return [-tensors[0].add_(1), tensors[0]]

    with pytest.raises(NodeFailure) as found:
        run(program(_Library(compute), donated=True))
    assert "memory of an input that was overwritten" in str(found.value.__cause__)
