"""Native replay: what runs in C++, when it does, and that it is what Python does op by op."""

import gc
from pathlib import Path
from typing import Any

import pytest
import torch

import ltc_core as ltc
from ltc_core.executors.reference import replay
from ltc_core.executors.reference.executor import ReferenceExecutor
from ltc_core.executors.reference.program import ReferenceProgram
from ltc_core.graph.ir import Graph, Node, Ref, Scalar, TensorMeta, ViewStep, Write
from ltc_core.native_extension import Extension
from ltc_core.program.failure import NodeFailure
from ltc_core.program.program import Tier
from ltc_core.settings import settings
from tests.core import child

aten = torch.ops.aten
META = TensorMeta.packed((2, 3), torch.float32)


def program_of(*nodes: Node, inputs: int = 1, outputs: tuple[int, ...] = ()) -> ReferenceProgram:
    last = nodes[-1].first + len(nodes[-1].outs) - 1
    graph = Graph(nodes, dict.fromkeys(range(inputs), META), outputs or (last,))
    return ReferenceExecutor().interpret(graph)


def run(program: ReferenceProgram, *inputs: torch.Tensor, scalars: Any = ()) -> Any:
    """The output of a run in C++."""
    with settings.override(replay="always"):
        (result,) = program.run(list(inputs), scalars)
    assert program.is_replayed
    return result


def native_nodes(program: ReferenceProgram) -> int:
    assert program._replay is not None
    return program._replay.num_native


# -- when ------------------------------------------------------------------------------------------


def test_it_begins_with_the_first_run() -> None:
    assert replay.extension.load() is not None
    program = program_of(Node(aten.neg.default, (Ref(0),), {}, 1, (META,), result=0))
    x, replayed = torch.ones(2, 3), []
    with settings.override(replay="auto"):
        for _ in range(3):
            (y,) = program.run([x], ())
            assert torch.equal(y, -x)
            replayed.append(program.is_replayed)
        assert program.tier is Tier.REPLAY
    assert replayed == [True, True, True]


def test_without_its_library_ops_run_in_python(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    missing = Extension("_ltc_missing", tmp_path / "missing.cpp")
    monkeypatch.setattr(replay, "extension", missing)
    (tmp_path / "missing.cpp").write_text("#error no compiler")
    program = program_of(Node(aten.neg.default, (Ref(0),), {}, 1, (META,), result=0))
    with settings.override(replay="always", cache_dir=str(tmp_path)):
        for _ in range(3):
            assert torch.equal(program.run([torch.ones(2, 3)], ())[0], -torch.ones(2, 3))
    assert program.tier is Tier.OP_BY_OP and not program.is_replayed


def test_training_is_replayed_with_the_losses_of_eager() -> None:
    out, err = child.run(
        """
        from ltc_core.executors.reference import replay

        built = []
        build = replay.build
        def noted(nodes, *rest):
            found = build(nodes, *rest)
            built.append((found.num_native, len(nodes)))
            return found
        replay.build = noted
        assert replay.extension.load() is not None

        def losses(where):
            torch.manual_seed(0)
            model = torch.nn.Sequential(
                torch.nn.Conv2d(1, 4, 3), torch.nn.BatchNorm2d(4), torch.nn.ReLU(),
                torch.nn.Flatten(), torch.nn.Linear(144, 3),
            ).to(where)
            optimizer = torch.optim.AdamW(model.parameters())
            found = []
            for step in range(8):
                x = torch.linspace(-1, 1, 2 * 64).view(2, 1, 8, 8).to(where)
                loss = torch.nn.functional.cross_entropy(model(x), torch.tensor([0, 2]).to(where))
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                found.append(loss.detach())
                if where != "cpu":
                    ltc.mark_step()
            return torch.stack(found).tolist()

        print(losses(device) == losses("cpu"), len(built) > 0, all(a == b for a, b in built))
        """,
        LTC_COMPILE="off",
    )
    assert (out.strip(), err) == ("True True True", "")


# -- arguments -------------------------------------------------------------------------------------


@pytest.mark.parametrize("number", [2, 2.5, True, 3 + 1j])
def test_a_number_is_taken_as_eager_takes_it(number: Any) -> None:
    """As a wrapped number: it promotes an integer tensor, but not from float32 to float64."""
    for op in (aten.mul.Scalar, aten.mul.Tensor):
        program = program_of(Node(op, (Ref(0), Scalar(0)), {}, 1, (META,), result=0))
        for x in (torch.ones(2, 3), torch.ones(2, 3, dtype=torch.int64)):
            wanted = x * number
            program._outputs[0] = (1, False, wanted.dtype)
            got = run(program_with(program, wanted.dtype), x, scalars=[number])
            assert got.dtype == wanted.dtype and torch.equal(got, wanted)


def program_with(program: ReferenceProgram, dtype: torch.dtype) -> ReferenceProgram:
    """The same program with another dtype of its output."""
    meta = TensorMeta.packed((2, 3), dtype)
    (node,) = program._nodes
    return program_of(Node(node.op, node.args, node.kwargs, 1, (meta,), result=0))


def test_a_number_of_another_type_is_converted_or_refused_as_in_python() -> None:
    node = Node(aten.leaky_relu.default, (Ref(0), Scalar(0)), {}, 1, (META,), result=0)
    program, x = program_of(node), torch.tensor([[-1.0, 1, 2], [3, 4, -5]])
    assert torch.equal(run(program, x, scalars=[1]), torch.nn.functional.leaky_relu(x, 1))
    assert native_nodes(program) == 1
    node = Node(aten.sum.dim_IntList, (Ref(0), [Scalar(0)]), {}, 1, (META,), result=0)
    program = program_of(node)
    assert torch.equal(run(program, x, scalars=[1]), x.sum(1))
    with pytest.raises(NodeFailure) as failure:
        run(program, x, scalars=[1.5])
    with pytest.raises(RuntimeError) as in_eager:
        aten.sum.dim_IntList(x, [1.5])
    assert str(failure.value.__cause__) == str(in_eager.value)


def test_a_lens_that_copies_is_written_back() -> None:
    """`view` of a transposed tensor: what the lens leads to is a copy there."""
    lens = (ViewStep(aten.view.default, ([6],)), ViewStep(aten.slice.Tensor, (0, 1, 3)))
    node = Node(aten.mul_.Tensor, (Write(0, lens), 10), {}, 1, (META,), writes=(0,), result="self")
    for x in (torch.arange(6.0).view(2, 3), torch.arange(6.0).view(3, 2).t()):
        program = program_of(node)
        wanted = x.clone()
        flat = wanted.reshape(6)
        flat[1:3] *= 10
        assert torch.equal(
            run(program, x.clone(memory_format=torch.preserve_format)), flat.view(2, 3)
        )
        assert native_nodes(program) == 1


def test_an_op_of_the_script_runs_in_python_between_native_ones() -> None:
    seen = []

    def doubled(x: torch.Tensor) -> torch.Tensor:
        seen.append(torch.is_grad_enabled())
        return x * 2

    one: Any = doubled
    program = program_of(
        Node(aten.neg.default, (Ref(0),), {}, 1, (META,), result=0),
        Node(one, (Ref(1),), {}, 2, (META,), result=0),
        Node(aten.exp.default, (Ref(2),), {}, 3, (META,), result=0),
    )
    x = torch.arange(6.0).view(2, 3)
    assert torch.equal(run(program, x), torch.exp(-x * 2))
    assert native_nodes(program) == 2 and len(seen) == 1


def test_the_default_dtype_of_recording_counts() -> None:
    meta = TensorMeta.packed((2, 3), torch.int64)
    out = TensorMeta.packed((2, 3), torch.float32)
    node = Node(aten.sqrt.default, (Ref(0),), {}, 1, (out,), result=0, uses_default_dtype=True)
    program = ReferenceExecutor().interpret(Graph((node,), {0: meta}, (1,)))
    x = torch.full((2, 3), 2)
    assert torch.equal(run(program, x), torch.sqrt(x))
    torch.set_default_dtype(torch.float64)
    try:
        there = run(program, x)
    finally:
        torch.set_default_dtype(torch.float32)
    assert there.dtype is torch.float32 and torch.equal(there, torch.sqrt(x))


# -- errors and memory -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    "op, args, kind",
    [
        (aten.index_select.default, (Ref(0), 0, torch.tensor([7])), IndexError),
        (aten.mm.default, (Ref(0), Ref(0)), RuntimeError),
        (aten.linalg_inv_ex.default, (Ref(0),), RuntimeError),
    ],
)
def test_an_op_fails_with_the_error_of_eager(op: Any, args: Any, kind: type[Exception]) -> None:
    outs = (META,) * len(op._schema.returns)
    result = 0 if len(outs) == 1 else tuple(range(len(outs)))
    program = program_of(Node(op, args, {}, 1, outs, result=result))
    x = torch.ones(2, 3)
    with pytest.raises(kind) as in_eager:
        op(*(x if type(a) is Ref else a for a in args))
    with pytest.raises(NodeFailure) as failure:
        run(program, x)
    cause = failure.value.__cause__
    assert type(cause) is type(in_eager.value)
    assert str(cause).splitlines()[0] == str(in_eager.value).splitlines()[0]


def test_a_donated_input_is_freed_at_its_last_use() -> None:
    """It leaves the list, so that the program has the only reference."""
    alive: list[int] = []
    inputs = [torch.ones(2, 3)]

    def count(x: torch.Tensor) -> torch.Tensor:
        alive.append(sum(t is not None for t in inputs))
        return x + 1

    one: Any = count
    nodes = (
        Node(aten.neg.default, (Ref(0),), {}, 1, (META,), result=0),
        Node(one, (Ref(1),), {}, 2, (META,), result=0),
    )
    program = ReferenceExecutor().interpret(Graph(nodes, {0: META}, (2,), frozenset({0})))
    with settings.override(replay="always"):
        (result,) = program.run(inputs, ())
    assert alive == [0] and torch.equal(result, torch.zeros(2, 3))


def test_nothing_outlives_a_run() -> None:
    program = program_of(Node(aten.neg.default, (Ref(0),), {}, 1, (META,), result=0))
    x = torch.ones(2, 3)
    run(program, x)
    before = x._use_count()
    for _ in range(3):
        run(program, x)
    gc.collect()
    assert x._use_count() == before


def test_random_numbers_are_those_of_python() -> None:
    device = ltc.lazy_device()

    def drawn() -> list[float]:
        torch.manual_seed(3)
        found = []
        for _ in range(4):
            found.append(torch.rand(3, device=device) + torch.randn(3, device=device))
            ltc.mark_step()
        return torch.stack(found).flatten().tolist()

    with settings.override(replay="never"):
        in_python = drawn()
    with settings.override(replay="always"):
        assert drawn() == in_python
