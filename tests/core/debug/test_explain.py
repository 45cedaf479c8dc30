"""Why a graph was built: one cause for each compile, of a closed table, with the user's line.

`SCENARIOS` has a program for each kind of cause, written as users write them; its last compile must have that
kind.
"""

import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

import ltc_core as ltc
from ltc_core import metrics
from ltc_core.debug import explain as explain_module
from ltc_core.debug.explain import KINDS, Cause
from ltc_core.executors.reference.executor import ReferenceExecutor
from ltc_core.runtime import device_context as context_module
from ltc_core.runtime import program_cache as compiler_module
from ltc_core.runtime.devices import context
from ltc_core.runtime.program_cache import CompiledGraph, ProgramCache
from ltc_core.settings import settings
from tests.core.debug.explain_scenarios import SCENARIOS, Training, device, line_of, look
from tests.core.models import OPTIMIZERS, Run
from tests.core.models import batch as model_batch

pytestmark = pytest.mark.usefixtures("exact_shapes")


@pytest.fixture(autouse=True)
def causes(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Cause]]:
    """A compiler of its own for device 0, to which everything is new; the causes it gives."""
    found: list[Cause] = []
    ltc.mark_step(wait=True)
    context(0).trace.forget()
    monkeypatch.setattr(context(0), "compiler", ProgramCache(ReferenceExecutor()))
    monkeypatch.setattr(compiler_module, "on_compile", found.append)
    yield found
    ltc.mark_step(wait=True)
    context(0).trace.forget()  # its programs are not the next test's


@pytest.mark.parametrize("kind", SCENARIOS)
def test_each_kind(kind: str, causes: list[Cause]) -> None:
    program, num_compiles, pattern = SCENARIOS[kind]
    pattern = re.sub(r"\{([a-z ]+)\}", lambda m: line_of(m[1]), pattern)
    program()
    last = causes[-1]
    assert [c.kind for c in causes].count(kind) == (2 if kind == "cut elsewhere" else 1), causes
    assert len(causes) == num_compiles
    assert last.kind == kind
    assert re.fullmatch(f"{kind}: {pattern}", last.sentence), last.sentence
    assert (last.nearest is None) == (len(causes) == 1)


def test_the_table_of_kinds_is_closed() -> None:
    """What is in no scenario has a test of its own below."""
    elsewhere = {"part of a step", "new each time"}  # in the tests of streaming and of novelty
    assert set(KINDS) == {*SCENARIOS, "forgotten", "unknown", "other results", *elsewhere}
    assert len(set(KINDS)) == len(KINDS)


# -- programs with more than one thing to say --------------------------------------------------------


@pytest.mark.parametrize(("model", "optimizer"), [
    *((model, "adam") for model in ("cnn", "gpt", "lstm", "resnet")), *(("mlp", o) for o in OPTIMIZERS),
])  # fmt: skip
def test_a_training_loop_has_three_causes(
    model: str, optimizer: str, causes: list[Cause], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last batch is a short one."""

    def make(name: str, step: int) -> tuple[Tensor, Tensor]:
        x, y = model_batch(name, step)
        return (x[:3], y[:3]) if step == 3 else (x, y)

    monkeypatch.setattr("tests.core.models.batch", make)
    Run(model, optimizer, device(), ltc.mark_step).train(5)
    assert [c.kind for c in causes] == ["first graph", "new optimizer state", "shapes of the batch"]
    assert [c.nearest and c.nearest - causes[0].number for c in causes] == [None, 0, 1]
    assert "models.py:" in causes[2].sentence and "more input" in causes[2].sentence


def test_two_causes_at_once(causes: list[Cause]) -> None:
    training = Training(make=torch.optim.Adam)
    training.step(5)
    training.step(3)
    assert re.match(
        r"new optimizer state: 8 values .*; also shapes of the batch: input \d+: float32\[5, 8\] -> \[3, 8\]",
        causes[-1].sentence,
    )


@pytest.mark.parametrize("other", ["x", 3])
def test_one_of_two_like_values_is_kept(other: object, causes: list[Cause]) -> None:
    """Graphs of one recording are compared by their outputs, even where the last ops are the same."""
    for keeps_first in (True, False):
        x = torch.ones(3).to(device())
        first = x * 2  # the first
        second = x * (x if other == "x" else other)  # the second
        if keeps_first:
            del second
        else:
            del first
        ltc.mark_step()
    assert second.shape == (3,)
    assert [c.kind for c in causes] == ["first graph", "values alive"]
    assert re.match(
        rf"values alive: float32\[3\] of aten::mul at .*{line_of('the second', __file__)} in \w+ outlives "
        rf"the cut \(.*\), unlike in program {causes[0].number} \(and 1 more value\)",
        causes[1].sentence,
    )


def test_a_step_cut_in_the_middle_gives_two_graphs(causes: list[Cause]) -> None:
    look()
    assert re.match(
        rf"cut elsewhere: Item at .*{line_of('the look')} in step ends it after \d+ ops; "
        rf"program {causes[0].number} went on for \d+ more",
        causes[1].sentence,
    )


def test_a_step_that_goes_on_where_another_was_cut(causes: list[Cause]) -> None:
    x = torch.ones(3).to(device())
    for looks in (True, False):
        y = (x * 2 + 1).exp().log()
        if looks:
            assert y.tolist() == pytest.approx([3.0] * 3)  # the list
        z = y.tanh()  # the rest
        ltc.mark_step()
        del y, z
    was_cut, goes_on = line_of("the list", __file__), line_of("the rest", __file__)
    assert re.fullmatch(
        rf"cut elsewhere: it goes on for 1 op where program {causes[0].number} was cut "
        rf"\(ToCpu at .*{was_cut} in \w+\), first aten::tanh at .*{goes_on} in \w+",
        causes[2].sentence,
    )


def test_ops_that_are_there_only_sometimes(causes: list[Cause]) -> None:
    training = Training()
    for clips in (False, True, False):
        training.step(clips=clips)
    assert re.fullmatch(
        rf"other ops: \d+ ops that program {causes[0].number} had not, first "
        rf"aten::_foreach_norm at .*{line_of('the clipping')} in step",
        causes[1].sentence,
    )
    assert len(causes) == 2


@pytest.mark.parametrize(
    ("mode", "pattern"),
    [
        (torch.enable_grad, r"other ops: aten::argmax at .* where program \d+ had aten::_log_softmax at .*"),
        # A linear layer is one op where nothing needs its parts.
        (torch.no_grad, r"new code: nothing like its 4 ops was recorded before, the first is aten::linear at .*"),
    ],
)  # fmt: skip
def test_evaluation_after_training(
    mode: Callable[[], Any], pattern: str, causes: list[Cause]
) -> None:
    training = Training()
    training.step()
    with mode():
        kept = training.net(torch.ones(5, 8).to(device())).argmax(1)
    ltc.mark_step()
    assert kept.shape == (5,)
    assert re.match(pattern, causes[1].sentence)


@pytest.mark.parametrize(("make", "pattern"), [
    (lambda t: t / 2, r"aten::div at .* makes float64\[3\] where it made float32\[3\]"),
    (lambda t: torch.ones(3, device=t.device), r"aten::ones at .*: dtype torch.float32 -> torch.float64"),
])  # fmt: skip
def test_another_default_dtype(
    make: Callable[[Tensor], Tensor], pattern: str, causes: list[Cause]
) -> None:
    whole = torch.ones(3, dtype=torch.int64).to(device())
    default = torch.get_default_dtype()
    try:
        for dtype in (torch.float32, torch.float64):
            torch.set_default_dtype(dtype)
            kept = make(whole)
            ltc.mark_step()
    finally:
        torch.set_default_dtype(default)
    assert kept.dtype == torch.float64
    assert re.fullmatch(f"dtypes: {pattern}", causes[1].sentence), causes[1]


def test_many_shapes_are_compared_with_the_usual_one(causes: list[Cause]) -> None:
    training = Training()
    for size in (8, 8, 5, 6, 7):
        training.step(size)
    assert [c.nearest for c in causes[1:]] == [causes[0].number] * 3
    assert [c.kind for c in causes[1:]] == ["shapes of the batch"] * 3


def test_a_graph_cut_at_its_limit(causes: list[Cause], monkeypatch: pytest.MonkeyPatch) -> None:
    """What ends a recording is said whatever it is."""
    x = torch.ones(3).to(device())
    for n in (10, 6):
        y = x
        for _ in range(n):
            y = y * 2
        context(0).cut("GraphLimit" if n == 6 else "MarkStep")
    assert y.tolist() == [64.0] * 3
    assert re.match(
        r"cut elsewhere: GraphLimit at .* ends it after 6 ops; program \d+ went on for 4 more",
        causes[1].sentence,
    )


# -- what becomes of causes --------------------------------------------------------------------------


def test_causes_are_counted_and_summed_up(causes: list[Cause]) -> None:
    metrics.clear_all()
    training = Training(make=torch.optim.Adam)
    for size in (5, 5, 5, 3, 2, 5):
        training.step(size)
    assert metrics.counter_value("CompileCause.shapes_of_the_batch") == 2
    assert metrics.counter_value("CompileCause.new_optimizer_state") == 1
    assert metrics.counter_value("UncachedCompile") == len(causes) == 4
    assert (
        "4 new programs in 6 steps, because of: shapes of the batch, 2; first graph, 1; new optimizer state, 1."
        in metrics.summary().splitlines()
    )


def test_a_program_that_is_found_again_has_its_cause(causes: list[Cause]) -> None:
    compiled: list[CompiledGraph] = []
    original = ProgramCache.compile

    def compile(self: ProgramCache, *args: Any) -> CompiledGraph:
        compiled.append(original(self, *args))
        return compiled[-1]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ProgramCache, "compile", compile)
        for _ in range(2):
            kept = torch.ones(3).to(device()) * 2
            ltc.mark_step()
    assert kept.tolist() == [2.0] * 3
    assert compiled[0] is compiled[1] and compiled[0].cause is causes[0] and len(causes) == 1


def test_a_program_whose_trie_was_dropped(
    causes: list[Cause], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(context_module, "_TRIE_STEPS", 3)
    for size in range(1, 7):
        kept = torch.ones(size).to(device()) * 2
        ltc.mark_step()
    assert kept.tolist() == [2.0] * 6
    assert [c.kind for c in causes] == [
        "first graph", *["shapes of the batch"] * 3, "forgotten", "shapes of the batch",
    ]  # fmt: skip
    assert re.fullmatch(
        r"forgotten: so many different ops were recorded that all graphs were dropped \(MarkStep at .*\)",
        causes[4].sentence,
    )


def test_training_goes_on_when_a_cause_cannot_be_told(
    causes: list[Cause], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: object) -> None:
        raise KeyError(7)

    monkeypatch.setattr(explain_module, "compare", fails)
    x = torch.ones(3).to(device())
    kept = x * 2
    ltc.mark_step()
    kept = x * 3 + 1
    with pytest.warns(
        UserWarning, match=r"the cause of a new program cannot be told: KeyError\(7\); report this"
    ):
        ltc.mark_step()
    assert kept.tolist() == [4.0] * 3
    assert [c.kind for c in causes] == ["first graph", "unknown"]
    assert causes[1].sentence == "unknown: KeyError(7)"


def test_printing_follows_the_setting(capsys: pytest.CaptureFixture[str]) -> None:
    cause = Cause(3, "new code", "new code: something", 2)
    explain_module.on_compile(cause)
    assert capsys.readouterr() == ("", "")
    with settings.override(explain=True):
        explain_module.on_compile(cause)
    assert capsys.readouterr() == ("", "[ltc] program 3: new code: something\n")


def test_a_graph_that_goes_on_with_what_the_one_before_made(causes: list[Cause]) -> None:
    x = torch.ones(4).to(device())

    def chain() -> Tensor:
        y = x
        for _ in range(12):
            y = y.cos()
        return y

    made = chain()
    ltc.mark_step()
    made.copy_(chain() + made)
    ltc.mark_step()
    assert causes[-1].kind == "cut elsewhere", causes
    assert "aten::add" in causes[-1].sentence
