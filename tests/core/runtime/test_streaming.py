"""A step that is waited for runs in parts while it is recorded: with eager's numbers, and where that is quicker."""

import itertools
import os
import re
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest
import torch
from torch import nn

import ltc_core as ltc
from ltc_core import errors, metrics
from ltc_core.debug import explain
from ltc_core.debug.explain import cause_counter
from ltc_core.executors.reference import replay
from ltc_core.program.program import Tier
from ltc_core.runtime import early_run, streaming, switch_interval
from ltc_core.runtime.devices import context
from ltc_core.runtime.run_policy import RunPolicy
from ltc_core.settings import settings

pytestmark = pytest.mark.skipif(replay.extension.load() is None, reason="no C++ compiler")


@pytest.fixture(autouse=True)
def at_once(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Small steps are long enough, and what is measured last is quicker: steps in parts."""
    monkeypatch.setattr(streaming, "_LEAST_NS", 1)
    monkeypatch.setattr(streaming, "_PART_NS", 1)
    monkeypatch.setattr(streaming, "_TRIAL_NS", 0)
    monkeypatch.setattr(streaming, "_UNSETTLED", 3)
    monkeypatch.setattr(streaming, "_MEASURED", 5)
    monkeypatch.setattr(streaming, "_GAIN", 1e9)
    monkeypatch.setattr(streaming, "num_cores", lambda: 2)
    monkeypatch.setattr(streaming, "_TIERS", {Tier.COMPILED, Tier.REPLAY})  # as if compiled
    monkeypatch.setattr(RunPolicy, "is_decided", lambda policy, is_waited: True)  # and quicker
    monkeypatch.setattr(early_run, "_LEAST_NS", 1 << 62)
    device = context(0)
    device.wait()
    device.streaming = streaming.Streaming(device.trace, True)
    with settings.override(
        streaming="auto", replay="always", steps="marked", dynamic_shapes="never"
    ):
        yield
    device.wait()
    device.trace.limit = device.trace.first_limit
    device.streaming = streaming.Streaming(device.trace, True)


def parts() -> int:
    return metrics.counter_value("Sync.Streaming") or 0


widths = itertools.count(
    16
)  # what was measured of a step is known: each test has a step of its own


def trained(
    device: str, steps: int, width: int, before: Callable[[int], None] = lambda k: None
) -> list[float]:
    """Losses of the steps, then sums of what the model has at their end."""
    torch.manual_seed(0)
    layers = (
        nn.Linear(6, width),
        nn.BatchNorm1d(width),
        nn.Tanh(),
        nn.Dropout(0.2),
        nn.Linear(width, 1),
    )
    model = nn.Sequential(*layers).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    x, y = torch.randn(32, 6).to(device), torch.randn(32, 1).to(device)
    losses = []
    torch.manual_seed(1)  # of the device's numbers
    for k in range(steps):
        before(k)
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(x), y)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    weights = [p.detach().cpu().sum().item() for p in model.parameters()]
    return losses + weights + [model[1].running_var.cpu().sum().item()]  # type: ignore[union-attr]


def test_numbers_are_those_of_eager() -> None:
    before, width = parts(), next(widths)
    assert trained("ltc", 40, width) == pytest.approx(trained("cpu", 40, width), rel=1e-4, abs=1e-6)
    assert parts() - before > 30


def test_steps_that_are_quicker_whole_stay_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(streaming, "_GAIN", 0.0)
    tried: list[int] = []
    before = parts()
    trained("ltc", 60, next(widths), lambda k: tried.append(parts() - before))
    assert 0 < tried[30] == tried[-1]


def test_a_step_in_parts_ends_once() -> None:
    """Parts are no steps: neither counted as such, nor made to programs that are compiled."""
    device = context(0)
    counts = []
    trained("ltc", 40, next(widths), lambda k: counts.append((device.num_steps, parts())))
    assert counts[-1][1] > counts[0][1]
    assert counts[-1][0] == counts[0][0]


def test_the_cause_of_a_part_is_told() -> None:
    counter = cause_counter("part of a step")
    before = metrics.counter_value(counter) or 0
    trained("ltc", 30, next(widths))
    assert (metrics.counter_value(counter) or 0) - before >= 4
    assert explain.latest is not None
    assert re.match(
        r"part of a step: it runs while .*; its \d+ ops begin with aten::\w+ at .*test_streaming",
        explain.latest.sentence,
    )


def test_the_interval_of_python_is_as_before() -> None:
    before = sys.getswitchinterval()
    seen = []
    trained("ltc", 30, next(widths), lambda k: seen.append(sys.getswitchinterval()))
    assert set(seen) == {before} and sys.getswitchinterval() == before


def test_another_step_is_whole() -> None:
    """Evaluation after training: nothing of it is cut where training was."""
    trained("ltc", 30, next(widths))
    x = torch.ones(4, 4).to("ltc")
    for _ in range(streaming._MISSES + 2):
        (x @ x).tanh().sum().item()
    before = parts()
    y = torch.ones(4, 4)
    for _ in range(3):
        assert (x @ x).tanh().sum().item() == pytest.approx((y @ y).tanh().sum().item())
    assert parts() == before


def test_another_thread_reads_in_the_middle_of_a_step() -> None:
    """As one that writes a checkpoint: the step is not cut there, where it would end elsewhere each time."""
    kept = torch.ones(3).to("ltc")
    before = parts()
    with ThreadPoolExecutor(1) as other:
        layer = nn.Linear(next(widths), 1).to("ltc")
        optimizer = torch.optim.SGD(layer.parameters(), lr=0.01)
        x = torch.ones(4, layer.in_features).to("ltc")
        programs = None
        for k in range(60):
            loss = layer(x).tanh().square().sum()
            loss.backward()
            assert other.submit(kept.cpu).result()[0] == 1.0
            optimizer.step()
            optimizer.zero_grad()
            loss.item()
            if k == 40:
                programs = metrics.counter_value("UncachedCompile")
    assert parts() > before
    assert metrics.counter_value("UncachedCompile") == programs


def test_a_failed_op_in_a_part_is_raised_once() -> None:
    """By the read, or by an op after it that would take what was lost."""
    torch.manual_seed(0)
    table = torch.randn(6, 4).to("ltc")
    weight = torch.ones(4).to("ltc").requires_grad_()
    index = torch.tensor([1, 2]).to("ltc")
    optimizer = torch.optim.SGD([weight], lr=0.1)
    found: list[object] = []
    for k in range(40):
        index.copy_(torch.tensor([1, 2 if k != 35 else 60]))
        before = weight.detach().cpu()
        try:
            optimizer.zero_grad()
            loss = (table.index_select(0, index) * weight).tanh().square().sum()
            loss.backward()
            optimizer.step()
            found.append(loss.item())
        except errors.LtcError as error:
            found.append(str(error).splitlines()[0])
            assert torch.equal(weight.detach().cpu(), before)
    assert parts() > 0
    assert "index out of range" in str(found[35]) and "test_streaming.py" in str(found[35])
    assert [type(loss) for loss in found[36:]] == [float] * 4


def test_never() -> None:
    before = parts()
    with settings.override(streaming="never"):
        trained("ltc", 30, next(widths))
    assert parts() == before


def test_a_step_that_is_not_read_is_whole() -> None:
    x = torch.ones(4, 4).to("ltc")
    before = parts()
    for _ in range(30):
        x = (x @ x).tanh()
        ltc.mark_step()
    assert parts() == before


def test_what_is_measured_is_the_time_between_reads() -> None:
    trained("ltc", 30, next(widths))
    measured = context(0).streaming._whole_ns
    assert 0 < measured < 60e9


def test_steps_are_whole_until_it_is_known_that_compiled_code_is_quicker(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(RunPolicy, "is_decided", lambda policy, is_waited: False)
    before = parts()
    trained("ltc", 25, next(widths))
    assert parts() == before


def test_steps_are_whole_while_something_is_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    device = context(0)
    is_compiling = True
    device.streaming = streaming.Streaming(device.trace, True, lambda: is_compiling)
    before = parts()
    trained("ltc", 25, next(widths))
    assert parts() == before
    is_compiling = False
    trained("ltc", 25, next(widths))
    assert parts() > before


class TestCompiledParts:
    """Parts are compiled like any program, and their compiled code is used unless steps are slower with it."""

    @staticmethod
    def judged(took_ns: float) -> list[Tier]:
        wanted: list[Tier] = []
        part = SimpleNamespace(program=SimpleNamespace(prefer=wanted.append))
        step = SimpleNamespace(num_parts=3, whole_for=0)
        found = streaming.Streaming(context(0).trace, True)
        found._num_compiled, found._replay_ns = 1, 10e6
        found._judge(step, [part], took_ns)  # type: ignore[arg-type, list-item]
        return wanted

    def test_quicker(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(streaming, "_GAIN", 0.97)
        assert self.judged(9e6) == []

    def test_slower(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(streaming, "_GAIN", 0.97)
        assert self.judged(11e6) == [Tier.REPLAY]

    def test_nobody_waits_for_the_compiler_of_parts(self) -> None:
        before = parts()
        with settings.override(compile="sync"):
            assert not context(0).streaming._may_stream(SimpleNamespace(lines=()))  # type: ignore[arg-type]
        assert parts() == before


def test_two_devices_hurry_python_together() -> None:
    usual = sys.getswitchinterval()
    for more, is_short in ((1, True), (1, True), (-1, True), (-1, False)):
        switch_interval.shorten(more)
        assert (sys.getswitchinterval() < usual) == is_short


def test_a_forked_child_has_pythons_usual_interval() -> None:
    usual = sys.getswitchinterval()
    switch_interval.shorten(1)
    try:
        pid = os.fork()
        if pid == 0:
            os._exit(0 if sys.getswitchinterval() == usual else 1)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    finally:
        switch_interval.shorten(-1)
