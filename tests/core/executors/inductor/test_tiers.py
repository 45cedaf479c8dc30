"""Which tier runs a graph, by counting: a compile service of the test's own, libraries that are interpreted.

What is built here runs the lowered FX graph as it is, so each test takes milliseconds.
"""

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from ltc_core import metrics
from ltc_core.executors.inductor import look_budget, step_times, tiers
from ltc_core.executors.inductor.compiler.service import Outcome
from ltc_core.executors.inductor.executor import InductorExecutor
from ltc_core.executors.inductor.partition import partition
from ltc_core.executors.inductor.tier_report import State
from ltc_core.executors.inductor.tiers import TieredProgram
from ltc_core.executors.reference import replay
from ltc_core.executors.reference.executor import ReferenceExecutor
from ltc_core.executors.reference.program import ReferenceProgram
from ltc_core.graph.ir import Graph, Node, Ref, Scalar, TensorMeta
from ltc_core.program.novelty import novelty
from ltc_core.program.program import StepTimes, Tier
from ltc_core.settings import settings
from tests.core.executors.inductor import fake_service
from tests.core.executors.inductor.fake_service import Interpreted, Service

aten = torch.ops.aten
META = TensorMeta.packed((4,), torch.float32)


@pytest.fixture
def service(monkeypatch: pytest.MonkeyPatch) -> Iterator[Service]:
    with fake_service.use(monkeypatch) as made:
        yield made


def one_node(op: Any, *args: Any) -> TieredProgram:
    node = Node(op, (Ref(0), *args), {}, 1, (META,), result=0, line="train.py:7 in step")
    graph = Graph((node,), {0: META}, (1,))
    return TieredProgram(graph, ReferenceExecutor().interpret(graph), torch.device("cpu"))


def run(program: TieredProgram, *numbers: Any) -> torch.Tensor:
    x = torch.tensor([1.0, 2.0, 3.0, 4.0])
    (result,) = program.run([x], list(numbers))
    return result


def is_compiled(program: TieredProgram) -> bool:
    return program.tier is Tier.COMPILED


def test_replay_takes_over_where_it_was_quicker_and_compiled_code_again(service: Service) -> None:
    assert replay.extension.load() is not None
    program = one_node(aten.mul.Scalar, Scalar(0))
    for _ in range(4):
        run(program, 2.0)
    service.answer()
    assert is_compiled(program)
    for tier, state in ((Tier.REPLAY, State.SLOWER), (Tier.COMPILED, State.COMPILED)) * 2:
        program.prefer(tier)
        before = program.op_by_op_runs
        assert program.tier is tier and program.state is state
        assert torch.equal(run(program, 3.0), torch.tensor([3.0, 6.0, 9.0, 12.0]))
        assert program.op_by_op_runs - before == (tier is Tier.REPLAY)
    assert service.asked == 1


def test_a_graph_that_may_run_once_is_not_prepared_for_later_runs(
    service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A graph's first run looks for no compiled code; nor for groups of ops, if graphs do not come again."""
    assert replay.extension.load() is not None
    partitioned: list[Graph] = []
    monkeypatch.setattr(
        tiers,
        "partition",
        lambda graph, *args: partitioned.append(graph) or partition(graph, *args),
    )
    looked_for_groups = []
    find = replay.element_groups.find
    monkeypatch.setattr(
        replay.element_groups, "find", lambda *args: looked_for_groups.append(1) or find(*args)
    )
    monkeypatch.setattr(tiers, "_MOST_SHORT", 0)
    for _ in range(100):
        novelty.note_new()
    program = one_node(aten.mul.Scalar, Scalar(0))
    expected = torch.tensor([2.0, 4.0, 6.0, 8.0])
    assert torch.equal(run(program, 2.0), expected)
    assert not partitioned and not looked_for_groups and program.native is None
    assert torch.equal(run(program, 2.0), expected)
    assert len(partitioned) == len(looked_for_groups) == 1
    novelty.note_again()
    run(one_node(aten.mul.Scalar, Scalar(0)), 2.0)
    assert (len(partitioned), len(looked_for_groups)) == (1, 2)


def test_a_later_run_of_the_script_knows_what_was_quicker(
    service: Service, capsys: pytest.CaptureFixture[str]
) -> None:
    assert replay.extension.load() is not None
    first = one_node(aten.mul.Scalar, Scalar(0))
    for _ in range(3):
        run(first, 2.0)
    service.cached.update(service.requests)
    for key in service.requests:
        (service.place / key).mkdir()  # where its library would be
    service.answer()
    assert first.step_times(True) is None and is_compiled(first)
    times = StepTimes(1e6, 2.5e6)
    with settings.override(explain=True):
        first.note_steps(True, times)
    replayed, compiled = times.replay_ns / 1e6, times.compiled_ns / 1e6
    assert capsys.readouterr().err == (
        "[ltc] a graph of 1 ops (recorded at train.py:7 in step): "
        f"{replayed:g} ms a step with its ops called one by one, {compiled:g} ms compiled, if each is waited for\n"
    )
    service.answers_at_once = True
    again = one_node(aten.mul.Scalar, Scalar(0))
    for _ in range(3):
        assert torch.equal(run(again, 2.0), torch.tensor([2.0, 4.0, 6.0, 8.0]))
    assert again.step_times(True) == times and again.step_times(False) is None


def test_compiling_begins_when_the_steps_have_taken_as_long(
    service: Service, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    now = [100.0]
    monkeypatch.setattr(tiers.time, "monotonic", lambda: now[0])
    program = one_node(aten.mul.Scalar, Scalar(0))
    with settings.override(compile_after=0, explain=True):
        for _ in range(10):
            run(program, 2.0)
            now[0] += tiers._COMPILE_S / 10
        assert not service.requests and capsys.readouterr().err == ""
        assert program.state.words == ("op by op, to be compiled after some more seconds of steps")
        now[0] += 1.0
        run(program, 2.0)
    assert service.requests
    assert capsys.readouterr().err == (
        "[ltc] a graph of 1 ops (recorded at train.py:7 in step) is compiled in the background; "
        "its ops are called one by one meanwhile\n"
    )


def test_a_graph_that_ran_once_is_not_compiled_however_long_that_is_ago(
    service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [100.0]
    monkeypatch.setattr(tiers.time, "monotonic", lambda: now[0])
    program = one_node(aten.mul.Scalar, Scalar(0))
    with settings.override(compile_after=0):
        for _ in range(2):
            run(program, 2.0)
            now[0] += 1000.0
        assert not service.requests
        run(program, 2.0)
    assert service.requests


def test_a_graph_that_is_shorter_than_a_launch_is_not_compiled(
    service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [100.0]
    monkeypatch.setattr(tiers.time, "monotonic", lambda: now[0])
    short, long = (one_node(aten.mul.Scalar, Scalar(0)) for _ in range(2))
    with settings.override(compile_after=0):
        for program, cost_ns in ((short, 5_000), (long, 500_000)):
            for _ in range(12):
                program.note_native_cost(cost_ns + 10**6)  # another process had the core
                program.note_native_cost(cost_ns)
                run(program, 2.0)
                now[0] += 1000.0
            assert bool(service.requests) == (program is long)
        assert "so short that a launch" in short.state.words
    with settings.override(compile_after=2):
        run(short, 2.0)
    assert service.asked == 2


def test_what_is_kept_of_steps_may_be_damaged(tmp_path: Path) -> None:
    file = tmp_path / "steps.json"
    assert step_times.read(file) == {}
    for text in (
        "",
        "{}",
        "[]",
        '{"free": 1}',
        '{"free": {"replay_ns": 1}}',
        '{"free": {"replay_ns": "x", "compiled_ns": 1}}',
        '{"free": {"replay_ns": 0, "compiled_ns": 1, "measured_s": 2e9}}',
        '{"free": {"replay_ns": 1, "compiled_ns": 1}}',
    ):
        file.write_text(text)
        assert step_times.read(file) == {}
    for times in ({False: StepTimes(1.5, 2.0)}, {True: StepTimes(1, 2), False: StepTimes(3, 4)}):
        step_times.write(file, times)
        assert step_times.read(file) == times
    step_times.write(tmp_path / "gone" / "steps.json", times)  # nothing is said
    assert [path.name for path in tmp_path.iterdir()] == ["steps.json"]


def test_what_is_kept_of_steps_is_measured_again_after_a_day(tmp_path: Path) -> None:
    file, now = tmp_path / "steps.json", time.time()
    new, old = StepTimes(1, 2, now - 3600), StepTimes(3, 4, now - 25 * 3600)
    step_times.write(file, {True: new, False: old})
    assert step_times.read(file) == {True: new}
    step_times.write(file, {True: StepTimes(1, 2, now + 3600)})  # by another clock
    assert step_times.read(file) == {}


def test_compiled_code_stays_where_nothing_can_be_replayed(service: Service) -> None:
    program = one_node(aten.mul.Scalar, Scalar(0))
    with settings.override(replay="never"):
        for _ in range(4):
            run(program, 2.0)
        service.answer()
        program.prefer(Tier.REPLAY)
        assert is_compiled(program)


def test_a_graph_that_comes_back_is_compiled_in_the_background(service: Service) -> None:
    program = one_node(aten.mul.Scalar, Scalar(0))
    for count in range(1, 4):
        assert service.asked == 0
        assert torch.equal(run(program, 2.0), torch.tensor([2.0, 4.0, 6.0, 8.0])), count
    assert service.asked == 1
    run(program, 2.0)
    assert not is_compiled(program)
    service.answer()
    assert is_compiled(program)
    assert torch.equal(run(program, 3.0), torch.tensor([3.0, 6.0, 9.0, 12.0]))
    assert service.asked == 1
    assert metrics.counter_value("CompiledProgram") == 1


def test_what_an_earlier_process_compiled_is_taken_from_the_second_run_on(
    service: Service,
) -> None:
    """A graph that runs once, as most of a script's start do, is not looked for."""
    first = one_node(aten.mul.Scalar, Scalar(0))
    for _ in range(3):
        run(first, 2.0)
    service.cached.update(service.requests)
    service.answer()
    service.answers_at_once = True
    second = one_node(aten.mul.Scalar, Scalar(0))
    run(second, 2.0)
    assert not is_compiled(second)
    run(second, 2.0)
    assert is_compiled(second)


def test_looking_for_compiled_code_takes_a_tenth_of_the_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = 1000.0
    monkeypatch.setattr(look_budget.time, "monotonic", lambda: now)
    budget = look_budget.LookBudget()
    assert budget.has(500) and not budget.has(20_000)
    now += 10
    assert budget.has(20_000)
    with budget.take():
        now += 1.5
    assert not budget.has(1)
    now += 10
    assert budget.has(1) and not budget.has(100_000)


def test_sync_compiles_before_the_first_run(service: Service) -> None:
    service.answers_at_once = True
    with settings.override(compile="sync"):
        program = one_node(aten.exp.default)
        run(program)
    assert is_compiled(program)


def test_off_never_compiles(service: Service) -> None:
    with settings.override(compile="off"):
        program = one_node(aten.exp.default)
        for _ in range(10):
            run(program)
    assert service.asked == 0


def test_a_learning_rate_that_changes_compiles_nothing_anew(service: Service) -> None:
    service.answers_at_once = True
    program = one_node(aten.mul.Scalar, Scalar(0))
    for step in range(20):
        assert run(program, 0.5 * step)[1] == step
    assert service.asked == 1


def test_a_whole_number_that_changes_becomes_an_input(service: Service) -> None:
    service.answers_at_once = True
    program = one_node(aten.mul.Scalar, Scalar(0))
    for _ in range(5):
        run(program, 2)
    assert is_compiled(program)
    for number in range(3, 30):
        assert run(program, number)[0] == number
    assert service.asked == 2


def test_a_constant_that_keeps_changing_is_said_once(
    service: Service, capfd: pytest.CaptureFixture[str]
) -> None:
    service.answers_at_once = True
    program = one_node(aten.pow.Tensor_Scalar, Scalar(0))
    for exponent in range(1, 8):
        for _ in range(4):
            assert run(program, float(exponent))[1] == 2.0**exponent
    assert service.asked == 4
    said = capfd.readouterr().err
    assert said.count("[ltc]") == 1
    assert "compiled for 4 values of numbers that are constants" in said
    assert "train.py:7 in step" in said


def test_a_graph_that_is_refused_stays_op_by_op(
    service: Service, capfd: pytest.CaptureFixture[str]
) -> None:
    programs = [one_node(aten.exp.default) for _ in range(2)]
    for program in programs:
        for _ in range(3):
            run(program)
        service.answer(Outcome.failed("the compiler crashed (SIGSEGV)"))
        for _ in range(5):
            assert torch.equal(run(program), torch.tensor([1.0, 2.0, 3.0, 4.0]).exp())
    assert service.asked == 2
    assert capfd.readouterr().err == (
        "[ltc] a graph of 1 ops stays op by op: the compiler crashed (SIGSEGV) "
        "(recorded at train.py:7 in step)\n"
    )
    assert metrics.counter_value("CompileRefused") == 2


def with_erfinv(first: Any = aten.exp.default) -> TieredProgram:
    nodes = (
        Node(first, (Ref(0),), {}, 1, (META,), result=0),
        Node(aten.erfinv.default, (Ref(1),), {}, 2, (META,), result=0),
        Node(aten.neg.default, (Ref(2),), {}, 3, (META,), result=0),
    )
    graph = Graph(nodes, {0: META}, (3,))
    return TieredProgram(graph, ReferenceExecutor().interpret(graph), torch.device("cpu"))


def test_an_op_that_is_refused_runs_between_compiled_subgraphs(
    service: Service, capfd: pytest.CaptureFixture[str]
) -> None:
    program = with_erfinv()
    x = torch.tensor([-1.0, -2.0, -3.0, -4.0])
    for _ in range(3):
        program.run([x], [])
    service.answer(Outcome(problem="no such kernel", op="aten.erfinv.default"))
    service.answers_at_once = True
    (got,) = program.run([x], [])
    (got,) = program.run([x], [])
    assert is_compiled(program)
    assert service.asked == 3  # the whole, then the two parts around it
    torch.testing.assert_close(got, -x.exp().erfinv())
    assert "aten.erfinv.default runs op by op between compiled parts" in capfd.readouterr().err


def test_two_graphs_in_flight_may_have_the_op_that_is_refused(service: Service) -> None:
    programs = [with_erfinv(), with_erfinv(aten.sigmoid.default)]
    x = torch.tensor([-1.0, -2.0, -3.0, -4.0])
    for program in programs:
        for _ in range(3):
            program.run([x], [])
    service.answer(Outcome(problem="no such kernel", op="aten.erfinv.default"))
    service.answers_at_once = True
    for program in programs:
        for _ in range(2):
            program.run([x], [])
        assert is_compiled(program)


def test_without_a_compiler_one_sentence_is_said(
    service: Service, capfd: pytest.CaptureFixture[str]
) -> None:
    service.problem = "there is no C++ compiler (no g++ on the PATH)"
    for _ in range(2):
        program = one_node(aten.exp.default)
        for _ in range(5):
            run(program)
    assert capfd.readouterr().err == (
        "[ltc] no graph is compiled, all run op by op: there is no C++ compiler (no g++ on the PATH)\n"
    )


def test_a_program_runs_with_any_number_of_threads(service: Service) -> None:
    service.answers_at_once = True
    program = one_node(aten.exp.default)
    for _ in range(3):
        run(program)
    before = torch.get_num_threads()
    torch.set_num_threads(before + 1)
    try:
        run(program)
    finally:
        torch.set_num_threads(before)
    assert is_compiled(program) and service.asked == 1


def test_a_service_that_ends_is_no_news(
    service: Service, capfd: pytest.CaptureFixture[str]
) -> None:
    program = one_node(aten.exp.default)
    for _ in range(3):
        run(program)
    service.answer(Outcome())
    for _ in range(5):
        run(program)
    assert service.asked == 1
    assert capfd.readouterr().err == ""


def test_what_is_stored_narrow_is_not_compiled(
    service: Service, capsys: pytest.CaptureFixture[str]
) -> None:
    graph = Graph((Node(aten.neg.default, (Ref(0),), {}, 1, (META,), result=0),), {0: META}, (1,))
    with settings.override(use_bf16=True):
        executor = InductorExecutor()
        programs = [executor.compile(graph) for _ in range(2)]
    assert [type(program) for program in programs] == [ReferenceProgram] * 2
    said = capsys.readouterr().err
    assert said.count("[ltc]") == 1 and "LTC_USE_BF16" in said and "torch.autocast" in said


def test_explain_says_when_native_code_takes_over(
    service: Service, capsys: pytest.CaptureFixture[str]
) -> None:
    service.answers_at_once = True
    graph = Graph((Node(aten.neg.default, (Ref(0),), {}, 1, (META,), result=0),), {0: META}, (1,))
    with settings.override(compile="sync", explain=True):
        program = InductorExecutor().compile(graph)
        program.run([torch.ones(4)], [])
    assert "compiled a graph of 1 ops in " in capsys.readouterr().err


@pytest.mark.parametrize("is_kept", [False, True], ids=["fresh", "kept"])
@pytest.mark.parametrize("mode", ["async", "sync"])
def test_no_library_is_used_unless_its_first_run_is_right(
    service: Service, monkeypatch: pytest.MonkeyPatch, mode: str, is_kept: bool
) -> None:
    """Wherever a library comes from: two outputs that share memory are parted, and it does not run again."""
    runs = []

    class Sharing(Interpreted):
        def run(self, tensors: list[torch.Tensor]) -> list[torch.Tensor]:
            runs.append(1)
            return super().run(tensors)[:1] * 2

    monkeypatch.setattr(tiers, "load", Sharing)
    nodes = [Node(aten.neg.default, (Ref(0),), {}, k, (META,), result=0) for k in (1, 2)]
    graph = Graph(tuple(nodes), {0: META}, (1, 2))
    if is_kept:  # by a process before this one
        with settings.override(compile="async", compile_after=1):
            program = TieredProgram(
                graph, ReferenceExecutor().interpret(graph), torch.device("cpu")
            )
            program.run([torch.ones(4)], [])
        service.cached.update(service.requests)
        service.requests.clear()
    service.answers_at_once = True
    with settings.override(compile=mode):
        program = TieredProgram(graph, ReferenceExecutor().interpret(graph), torch.device("cpu"))
        for _ in range(6):
            first, second = program.run([torch.ones(4)], [])
            second.add_(100)
            assert torch.equal(first, -torch.ones(4))
    assert is_compiled(program) and len(runs) == 1
