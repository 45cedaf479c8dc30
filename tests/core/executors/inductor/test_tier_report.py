"""What a user reads of the tiers: `metrics.summary` and LTC_EXPLAIN after a training loop.

The compiler is a stand-in that answers when a test tells it to; everything else is the runtime.
"""

import re
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import nn

import ltc_core as ltc
from ltc_core import metrics
from ltc_core.debug import explain
from ltc_core.executors.inductor import tier_report, tiers
from ltc_core.executors.inductor.compiler.service import Outcome
from ltc_core.executors.inductor.executor import InductorExecutor
from ltc_core.executors.inductor.tier_report import refuse
from ltc_core.executors.reference import replay
from ltc_core.graph.ir import Graph, Node, Ref, TensorMeta
from ltc_core.runtime.run_policy import RunPolicy
from ltc_core.settings import settings
from tests.core.executors.inductor import fake_service
from tests.core.executors.inductor.fake_service import Interpreted, Service
from tests.nets.tiers import tier

META = TensorMeta.packed((4,), torch.float32)


@pytest.fixture
def service(monkeypatch: pytest.MonkeyPatch) -> Iterator[Service]:
    monkeypatch.setattr(tier_report, "_programs", type(tier_report._programs)())
    assert replay.extension.load() is not None
    with (
        tier("ops"),
        fake_service.use(monkeypatch) as made,
        settings.override(compile="async", compile_after=3),
    ):
        yield made


def training(
    change: Callable[[torch.Tensor], torch.Tensor] = lambda out: out,
) -> Callable[[int], None]:
    """A function that trains a small MLP for some steps; `change` is applied to what the net returns."""
    device = ltc.lazy_device()
    model = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 1)).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def train(num_steps: int) -> None:
        for _ in range(num_steps):
            optimizer.zero_grad()
            out = change(model(torch.ones(4, 8).to(device)))
            out.square().mean().backward()
            optimizer.step()
            ltc.mark_step()
            ltc.wait_device_ops()

    return train


def summary() -> str:
    """The summary, without what depends on where the test is."""
    return re.sub(r" \(recorded at [^)]*\)", "", metrics.summary())


def test_a_loop_before_while_and_after_it_is_compiled(service: Service) -> None:
    train = training()
    train(2)
    assert "Of these runs, 2 were op by op (2 of them in C++) and 0 compiled." in summary()
    assert "ops: op by op, to be compiled if it comes back (after 3 runs, LTC_COMPILE_AFTER)." in (
        summary()
    )
    train(4)
    text = summary()
    assert "Of these runs, 6 were op by op (6 of them in C++) and 0 compiled." in text
    assert re.search(
        r"The last run was a graph of \d+ ops: op by op while it is compiled in the background, for \d+ s so far. "
        r"Next: go on training: the compiler takes what the steps leave of the cores "
        r"\(LTC_COMPILE_PRIORITY=low gives it more, and slows them\); "
        r"LTC_COMPILE=sync waits for the compiler before the first run;",
        text,
    )
    service.answer()
    assert "ops: compiled.\n" in summary()  # from the next run on
    train(6)
    text = summary()
    assert "Of these runs, 6 were op by op (6 of them in C++) and 6 compiled." in text
    assert re.search(r"The last run was a graph of \d+ ops: compiled\.\n", text)
    assert "Not compiled" not in text and "Op by op between" not in text


def test_sync_waits_for_the_compiler(service: Service) -> None:
    service.answers_at_once = True
    with settings.override(compile="sync"):
        training()(12)
    text = summary()
    assert "Of these runs, 0 were op by op and 12 compiled." in text
    assert metrics.metric_data("CompilerWait") is not None


def test_off(service: Service) -> None:
    with settings.override(compile="off"):
        training()(12)
        text = summary()
    assert "Of these runs, 12 were op by op (12 of them in C++) and 0 compiled." in text
    assert "op by op, because of LTC_COMPILE=off. Next: LTC_COMPILE=async compiles graphs" in text


def test_an_op_that_is_not_compiled_is_named_with_the_reason(service: Service) -> None:
    service.answers_at_once = True
    training(lambda out: out + torch.histc(out.detach(), 4).sum())(8)
    text = summary()
    assert re.search(r"ops: compiled, all but 1 of its ops\.", text)
    assert re.search(
        r"Op by op between compiled code: aten::histc at .*test_tier_report.py:\d+ in .* \(it checks the values of "
        r"its operands, which compiled code does not\). That is no fault",
        text,
    )


def test_a_graph_without_an_op_that_can_be_compiled(service: Service) -> None:
    x = torch.ones(4).to(ltc.lazy_device())
    for _ in range(4):
        y = torch.histc(x, 4)
        ltc.mark_step()
        ltc.wait_device_ops()
    del y
    assert "a graph of 1 ops: op by op, none of its ops can be compiled." in summary()
    assert "aten::histc" in summary()


def test_an_op_that_the_compiler_refuses(service: Service) -> None:
    train = training(torch.erfinv)
    train(4)
    service.answer(Outcome(problem="no such kernel", op="aten.erfinv.default"))
    service.answers_at_once = True
    train(4)
    text = summary()
    assert (
        "Not compiled: aten.erfinv.default runs op by op between compiled parts: no such kernel. "
        "Next: nothing if it is a small part of the step, else use another op." in text
    )
    assert re.search(r"ops: compiled, all but \d+ of its ops\.", text)


@pytest.mark.parametrize(
    ("problem", "next"),
    [
        (
            "the compiler was killed (SIGKILL; most likely memory ran out)",
            "free some memory, and start the script again",
        ),
        (
            "the compiler refuses it (AliasingError: output 0 is the memory of output 1)",
            "report this; the check has kept a wrong program from being used",
        ),
        (
            "the compiler was not done after 5 s (LTC_COMPILE_TIMEOUT_S)",
            "raise that limit, or cut the graph by more calls of mark_step",
        ),
        ("the compiler crashed (SIGSEGV)", "LTC_DEBUG=2 keeps what the compiler printed"),
    ],
)
def test_a_graph_that_is_refused(service: Service, problem: str, next: str) -> None:
    train = training()
    train(4)
    service.answer(Outcome.failed(problem))
    train(8)
    text = summary()
    assert "Of these runs, 12 were op by op (12 of them in C++) and 0 compiled." in text
    assert "ops: op by op, it was refused (the reason is below)." in text
    assert re.search(
        rf"Not compiled: a graph of \d+ ops stays op by op: {re.escape(problem)}\. Next: {re.escape(next)}",
        text,
    )


def test_a_library_that_is_refused_at_its_first_run(
    service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Sharing(Interpreted):
        def run(self, tensors: list[torch.Tensor]) -> list[torch.Tensor]:
            return super().run(tensors)[:1] * 2

    monkeypatch.setattr(tiers, "load", Sharing)
    service.answers_at_once = True
    x = torch.ones(4).to(ltc.lazy_device())
    for _ in range(8):
        y, z = -x, x.neg()
        ltc.mark_step()
        ltc.wait_device_ops()
    del y, z
    text = summary()
    # The third run is compiled, and checked.
    assert "Of these runs, 7 were op by op (2 of them in C++) and 1 compiled." in text
    assert "a graph of 2 ops: op by op, it was refused (the reason is below)." in text
    assert (
        "Not compiled: the library of a subgraph of 2 ops did not pass the check of its first run, and its ops run "
        "one by one: it returns shared memory (outputs [1]). Next: report this;" in text
    )


def test_no_compiler(service: Service) -> None:
    service.problem = "there is no C++ compiler (no g++ on the PATH)"
    training()(4)
    text = summary()
    assert "no graph is compiled, all run op by op: there is no C++ compiler (no g++" in text
    assert "Next: install g++, or let CXX name a C++ compiler." in text


def test_a_number_with_too_many_values(service: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(RunPolicy, "_choose_tier", lambda *args: None)  # replay may be quicker
    service.answers_at_once = True
    x = torch.ones(4).to(ltc.lazy_device())
    for exponent in range(1, 7):
        for _ in range(4):
            y = x ** float(exponent)
            ltc.mark_step()
            ltc.wait_device_ops()
    del y
    text = summary()
    assert (
        "op by op, it is compiled for other values of its numbers or of PyTorch's numeric flags."
        in text
    )
    assert "; with other values it runs op by op. Next: let" in text


def test_stored_as_bfloat16(service: Service) -> None:
    graph = Graph(
        (Node(torch.ops.aten.neg.default, (Ref(0),), {}, 1, (META,), result=0),), {0: META}, (1,)
    )
    with settings.override(use_bf16=True):
        InductorExecutor().compile(graph)
    metrics.count("ExecuteComputation")
    assert "torch.autocast gives compiled bfloat16. Next: use torch.autocast instead" in summary()


def test_a_compile_that_the_end_of_the_process_drops(service: Service) -> None:
    train = training()
    train(4)
    service.answer(Outcome())
    assert "op by op, the process ended before it was compiled. Next: train for" in summary()


def test_reasons_are_counted_and_bounded(
    service: Service, capfd: pytest.CaptureFixture[str]
) -> None:
    metrics.count("ExecuteComputation")
    for k in range(300):
        refuse(f"reason {k}", "wait")
        refuse("often", "hurry")
    rows = [row for row in metrics.summary().splitlines() if "ompiled" in row]
    assert rows[0] == "Not compiled: often (300 times). Next: hurry."
    assert len(rows) == 6 and rows[-1].startswith("96 more reasons")
    printed = capfd.readouterr().err.splitlines()
    assert len(printed) == 101 and printed.count("[ltc] often") == 1


def test_cleared_counters_say_nothing_of_the_tiers(service: Service) -> None:
    training()(2)
    metrics.clear_all()
    assert metrics.summary() == metrics.summary().partition("Of these runs")[0]


def test_explain_says_it_of_each_graph_at_exit(
    service: Service, capsys: pytest.CaptureFixture[str]
) -> None:
    service.answers_at_once = True
    training(lambda out: out + torch.histc(out.detach(), 4).sum())(8)
    explain.at_exit()
    assert capsys.readouterr().err == ""
    with settings.override(explain=True):
        explain.at_exit()
    [row] = capsys.readouterr().err.splitlines()
    assert re.fullmatch(
        r"\[ltc\] a graph of \d+ ops \(recorded at .*\): 2 runs op by op, 6 compiled; now compiled, "
        r"all but 1 of its ops"
        r"; op by op: aten::histc at .* \(it checks the values of its operands, which compiled code does not\)",
        row,
    )
