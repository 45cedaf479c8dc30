"""A step that is waited for begins to run while it is recorded: with eager's numbers, whatever comes of it."""

import itertools
import os
import random
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import ltc_core as ltc
from ltc_core import errors, metrics
from ltc_core.executors import core_sharing
from ltc_core.executors.reference import replay
from ltc_core.runtime import early_run, habit
from ltc_core.runtime.devices import context
from ltc_core.runtime.family import Families
from ltc_core.runtime.launch import Launch
from ltc_core.runtime.launcher import Launcher
from ltc_core.runtime.placement import Placement
from ltc_core.runtime.run_policy import RunPolicy
from ltc_core.runtime.worker import Job
from ltc_core.settings import settings
from tests.core import child

pytestmark = pytest.mark.skipif(replay.extension.load() is None, reason="no C++ compiler")


@pytest.fixture(autouse=True)
def at_once(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Small steps are long enough, and steps that run early are quicker.

    One thread computes: the statistics of a batch are summed in as many parts as there are threads, and each thread of
    Python's that cuts may have another number.
    """
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    monkeypatch.setattr(early_run, "_LEAST_NS", 1)
    monkeypatch.setattr(early_run, "_PART_NS", 1)
    monkeypatch.setattr(habit, "_GAIN", 1e9)
    monkeypatch.setattr(habit, "_CLEAR", 1e9)
    monkeypatch.setattr(early_run, "num_cores", lambda: 2)
    device = context(0)
    device.wait()
    device._follow_steps()
    monkeypatch.setattr(device.compiler, "_families", Families())  # nothing was measured yet
    with settings.override(
        streaming="auto", replay="always", steps="marked", dynamic_shapes="never"
    ):
        yield
    device.wait()
    device.trace.limit = device.trace.first_limit
    device._follow_steps()
    torch.set_num_threads(num_threads)


def early() -> int:
    return metrics.counter_value("EarlyRun") or 0


# A program that is known is not made anew: each test has a width of its own. With most of them a difference of one
# rounding in the first step becomes one of a hundredth in 60 steps; with the first one it does not.
_STABLE = 16
widths = itertools.count(_STABLE + 1)


def trained(
    device: str,
    steps: int,
    width: int,
    before: Callable[[int], object] = lambda k: None,
    between: Callable[[int, torch.Tensor], torch.Tensor] = lambda k, x: x,
) -> list[float]:
    """Losses of the steps, then sums of what the model has at their end.

    Args:
        between: may change the activations in the middle of a step.
    """
    torch.manual_seed(0)
    first = nn.Sequential(
        nn.Linear(8, width), nn.BatchNorm1d(width), nn.Tanh(), nn.Dropout(0.2)
    ).to(device)
    second = nn.Linear(width, 1).to(device)
    parameters = [*first.parameters(), *second.parameters()]
    optimizer = torch.optim.AdamW(parameters, lr=0.01)
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    torch.manual_seed(1)  # of the device's numbers
    losses = []
    for k in range(steps):
        before(k)
        # Rows that differ: the norm of equal ones is rounding, and an optimizer's steps follow its sign.
        x = torch.linspace(-1, 1, 256).view(32, 8) + 0.1 * k
        x, y = x.to(device), torch.ones(32, 1).to(device)
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(second(between(k, first(x))), y)
        loss.backward()
        optimizer.step()
        schedule.step()
        losses.append(loss.item())
    ends = [*parameters, first[1].running_var, first[1].num_batches_tracked]
    return losses + [t.detach().cpu().double().sum().item() for t in ends]  # type: ignore[union-attr]


def whole(steps: int, width: int, **hooks: Any) -> list[float]:
    """The same of steps that do not begin to run early."""
    with settings.override(streaming="never"):
        return trained("ltc", steps, width, **hooks)


def test_numbers_are_those_of_eager() -> None:
    before = early()
    eager = trained("cpu", 40, _STABLE)
    assert trained("ltc", 40, _STABLE) == pytest.approx(eager, rel=1e-4, abs=1e-6)
    assert early() - before > 15


def test_numbers_are_those_of_whole_steps_to_the_bit() -> None:
    width = next(widths)
    expected = whole(40, width)
    before = early()
    assert trained("ltc", 40, width) == expected
    assert early() > before


def test_python_begins_a_step_and_c_gives_the_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a step in eight parts, Python is called for the first one."""
    counts, starts = list[int](), list[int]()
    counted = early_run.EarlyRuns.run_more

    def run_more(self: early_run.EarlyRuns) -> None:
        counts.append(context(0).trace.count)
        counted(self)

    def before(k: int) -> None:
        starts.append(early())
        if k == 20:
            monkeypatch.setattr(early_run.EarlyRuns, "run_more", run_more)

    trained("ltc", 40, next(widths), before=before)
    num_early = early() - starts[20]
    assert 10 < num_early <= len(counts) < 2 * num_early


def test_a_step_that_nobody_reads_and_a_value_of_the_next_one() -> None:
    """As where a router is read in the middle of each step, and losses are not: two cuts between two reads."""
    found = {}
    before = early()
    for device in ("ltc", "cpu"):
        torch.manual_seed(0)
        router, expert = (nn.Linear(8, 8).to(device) for _ in range(2))
        optimizer = torch.optim.SGD([*router.parameters(), *expert.parameters()], lr=0.1)
        rows, losses = [], []
        for k in range(40):
            x = (torch.linspace(-1, 1, 64).view(8, 8) + 0.01 * k).to(device)
            scores = router(x).tanh()
            rows.append((scores.sum(1) > 0).sum().item())
            loss = (expert(x) * scores).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            ltc.mark_step()
            losses.append(loss.detach())
        found[device] = rows + [loss.item() for loss in losses]
    assert found["ltc"] == pytest.approx(found["cpu"], rel=1e-4)
    assert early() - before > 15


def test_a_branch_leaves_the_path() -> None:
    def between(k: int, x: torch.Tensor) -> torch.Tensor:
        return (x * 2).tanh() if k % 7 == 6 else x

    before, width = early(), next(widths)
    found = trained("ltc", 60, width, between=between)
    assert found == whole(60, width, between=between)
    assert early() - before > 20


def test_a_value_that_is_kept_now_and_then() -> None:
    """It is an output of another program: what has run early has freed it."""
    kept: dict[str, list[torch.Tensor]] = {"ltc": [], "cpu": []}
    width = next(widths)
    before = early()
    for device, values in kept.items():

        def between(k: int, x: torch.Tensor, values: list[torch.Tensor] = values) -> torch.Tensor:
            y = x.detach() * 3
            if k % 5 == 4:
                values.append(y)
            return x + y

        trained(device, 60, width, between=between)
    assert early() - before > 10
    for ours, eager in zip(kept["ltc"], kept["cpu"], strict=True):
        torch.testing.assert_close(ours.cpu(), eager)


@pytest.mark.parametrize("size", [4, 400_000])
def test_what_the_step_writes_is_read_before_and_after(size: int) -> None:
    """A small tensor is copied by what runs early, a large one waits for the cut."""
    found = {}
    before = early()
    for device in ("ltc", "cpu"):
        state = torch.zeros(size).to(device)
        other = torch.ones(size).to(device)
        sums = []
        for _ in range(30):
            first = (state * 2 + other).sum()
            state.add_(other).mul_(0.9)
            view = state[1:]
            view.sub_(0.01)
            sums.append((first + (state * other).tanh().sum() + view.sum()).item())
        found[device] = [*sums, state.cpu().double().sum().item()]
    assert found["ltc"] == pytest.approx(found["cpu"], rel=1e-4)
    assert early() > before


def test_a_step_is_given_up_in_its_middle() -> None:
    """An exception of the script: what was recorded is run by the next read, or never."""
    x = torch.ones(4, next(widths)).to("ltc")
    found = []
    for k in range(60):
        y = (x * 2).tanh().exp()
        z = y.sum() + y.mean()
        if k % 9 == 8:
            continue  # the loss is not made
        w = (y * z).sum().sqrt()
        found.append(w.item())
    assert len(set(found)) == 1 and early() > 0


def test_a_failed_op_in_an_early_part_is_raised_once() -> None:
    torch.manual_seed(0)
    table = torch.randn(7, 4).to("ltc")
    weight = torch.ones(4).to("ltc").requires_grad_()
    optimizer = torch.optim.SGD([weight], lr=0.1)
    found: list[object] = []
    before = early()
    for k in range(40):
        index = torch.tensor([1, 2 if k != 35 else 60]).to("ltc")
        kept = weight.detach().cpu()
        try:
            optimizer.zero_grad()
            loss = (table.index_select(0, index) * weight).sigmoid().square().sum()
            loss.backward()
            optimizer.step()
            found.append(loss.item())
        except errors.LtcError as error:
            found.append(str(error).splitlines()[0])
            assert torch.equal(weight.detach().cpu(), kept)
    assert early() > before
    assert "index out of range" in str(found[35]) and "test_early_run.py" in str(found[35])
    assert [type(loss) for loss in found[36:]] == [float] * 4


def test_another_thread_reads_in_the_middle_of_a_step() -> None:
    kept = torch.ones(3).to("ltc")
    other_kept = torch.ones(3).to("ltc")
    before, width = early(), next(widths)
    with ThreadPoolExecutor(1) as other:

        def between(k: int, x: torch.Tensor) -> torch.Tensor:
            assert other.submit(kept.cpu).result()[0] == 1.0
            if k % 11 == 10:  # it cuts what is recorded
                assert other.submit((other_kept * k).cpu).result()[0] == k
            return x

        found = trained("ltc", 60, width, between=between)
    assert found == whole(60, width)
    assert early() > before


def test_a_fork_in_the_middle_of_a_step() -> None:
    def between(k: int, x: torch.Tensor) -> torch.Tensor:
        if k != 35 or x.device.type == "cpu":
            return x
        pid = os.fork()
        if pid == 0:
            code = 1
            try:
                y = torch.ones(3).to("ltc")
                code = 0 if (y * 2).sum().item() == 6 else 2
            finally:
                os._exit(code)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
        return x

    width = next(widths)
    assert trained("ltc", 40, width, between=between) == whole(40, width)


def test_who_waits_for_the_worker_ends_what_follows_the_recording() -> None:
    """The job waits for what is recorded next, and the recording for the job."""

    def between(k: int, x: torch.Tensor) -> torch.Tensor:
        if k % 3 == 2 and x.device.type != "cpu":
            context(0).worker.drain()
            assert context(0).worker.is_idle
        return x

    before, width = early(), next(widths)
    assert trained("ltc", 40, width, between=between) == whole(40, width, between=between)
    assert early() > before


EXIT = """
import sys
from ltc_core.runtime import early_run, habit
from ltc_core.runtime.devices import context
from ltc_core.runtime.launch import Launch
from ltc_core.runtime.launcher import Launcher
from ltc_core.runtime.placement import Placement
from ltc_core.runtime.run_policy import RunPolicy

early_run._LEAST_NS = early_run._PART_NS = 1
early_run.num_cores = lambda: 2
habit._GAIN = habit._CLEAR = 1e9
x = torch.ones(4, 4, device=device)
for step in range(40):
    y = ((x * 2).tanh() @ x).exp()
    if step == 39:
        print(context(0).early.has_begun, flush=True)
        sys.exit(3)
    z = y.sum() + y.mean()
    z.item()
"""


def test_a_script_ends_in_the_middle_of_a_step() -> None:
    settings_of_child = {"LTC_COMPILE": "off", "LTC_STREAMING": "auto", "LTC_REPLAY": "always"}
    out, err = child.run(EXIT, returncode=3, timeout_s=60, **settings_of_child)
    assert (out.strip(), err) == ("True", "")


def test_steps_that_are_quicker_whole_stay_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(habit, "_GAIN", 0.0)
    counts: list[int] = []
    before = early()
    trained("ltc", 60, next(widths), lambda k: counts.append(early() - before))
    assert 0 < counts[30] == counts[-1]


def ways(monkeypatch: pytest.MonkeyPatch) -> set[tuple[Placement | None, Placement | None]]:
    """Of the steps that are measured: where they run early, and where the rest of them was to be launched."""
    seen = set()
    launch = Launcher.launch

    def note(
        self: Launcher, compiled: Any, *args: Any, given: Placement | None, **more: Any
    ) -> Any:
        choice = compiled.family.choice
        if compiled.habit.path and not choice.is_known:
            seen.add((choice.early, given))
        return launch(self, compiled, *args, given=given, **more)

    monkeypatch.setattr(Launcher, "launch", note)
    monkeypatch.setattr(RunPolicy, "runs_here", lambda *_: False)  # in C++
    trained("ltc", 40, next(widths))
    return seen


def test_whole_steps_that_are_measured_run_where_they_are_cut(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As they would if they stay whole: in the worker they would overlap with nothing."""
    assert ways(monkeypatch) == {(Placement.WORKER, Placement.WORKER), (None, Placement.HERE)}


def test_a_whole_step_that_is_measured_does_not_queue_behind_the_one_before(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It would run in the worker, and overlap as one that runs early does."""
    is_idle = []
    launch, device = Launcher.launch, context(0)

    def note(self: Launcher, *args: Any, given: Placement | None, **more: Any) -> Any:
        if given is Placement.HERE:
            is_idle.append(device.worker.is_idle)
        return launch(self, *args, given=given, **more)

    monkeypatch.setattr(Launcher, "launch", note)
    monkeypatch.setattr(RunPolicy, "runs_here", lambda *_: False)  # in C++
    monkeypatch.setattr(RunPolicy, "is_here", False)  # as if the steps before had run early
    monkeypatch.setattr(RunPolicy, "is_quicker_here", lambda *_: False)
    device.worker.start()
    trained("ltc", 12, next(widths), lambda k: device.worker.submit(Job(lambda: time.sleep(0.01))))
    assert is_idle and all(is_idle)


def test_a_loss_that_is_there_when_the_step_ends_is_not_waited_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    num_published = 0
    publish = Launch.publish

    def note(self: Launch, *args: Any) -> None:
        nonlocal num_published
        num_published += 1
        publish(self, *args)

    def losses(device: str) -> list[float]:
        x = torch.linspace(0, 1, 64).to(device)
        w = torch.ones_like(x)
        found = []
        for _ in range(60):
            loss = ((w - x) ** 2).mean()
            step = (w - x) * 0.1
            for _ in range(6):  # the loss is in the first part of the step
                step = step * 1.01 - 0.001
            w = w - step
            time.sleep(0.001)  # the worker has run that part
            ltc.mark_step()
            found.append(loss.item())
        return found

    expected = losses("cpu")
    monkeypatch.setattr(Launch, "publish", note)
    assert losses("ltc") == pytest.approx(expected, rel=1e-5)
    assert num_published > 10


def test_steps_that_are_not_waited_for_are_not_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    """A script may stop waiting while its whole steps are measured, and read no value for long."""
    places = []
    launch, device = Launcher.launch, context(0)

    def note(self: Launcher, *args: Any, given: Placement | None, **more: Any) -> Any:
        places.append(given)
        return launch(self, *args, given=given, **more)

    monkeypatch.setattr(Launcher, "launch", note)
    monkeypatch.setattr(RunPolicy, "runs_here", lambda *_: False)  # in C++
    x = torch.ones(4, next(widths)).to("ltc")
    w = torch.ones_like(x)
    while len(places) < 3 or places[-1] is not Placement.HERE:
        w = w * 0.9 + x
        total = w.sum()
        ltc.mark_step()
        total.item()
        assert len(places) < 60
    places.clear()
    for _ in range(6):
        w = w * 0.9 + x
        total = w.sum()
        ltc.mark_step()
    device.wait()
    assert places[2:] == [None] * (len(places) - 2) and len(places) == 6


def test_with_a_thread_on_each_core_one_less_is_measured_too(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    threads = set()
    follow = early_run.EarlyRun._follow

    def note(self: early_run.EarlyRun) -> None:
        follow(self)
        threads.add((self.place, torch.get_num_threads()))

    monkeypatch.setattr(early_run.EarlyRun, "_follow", note)
    monkeypatch.setattr(core_sharing, "may_share", lambda num_threads: num_threads > 1)
    torch.set_num_threads(2)
    seen = ways(monkeypatch)
    assert {early for early, _ in seen} == {None, Placement.SPARING, Placement.WORKER}
    assert all(given is (early or Placement.HERE) for early, given in seen)
    assert threads == {(Placement.SPARING, 1), (Placement.WORKER, 2)}


def test_programs_that_take_turns() -> None:
    """As the two steps of a GAN."""
    x = torch.ones(4, next(widths)).to("ltc")
    found = []
    before = early()
    for k in range(60):
        y = (x * 2).tanh().exp() if k % 2 else (x * 3).exp().tanh()
        found.append((y * y).sum().sqrt().item())
    assert len(set(found)) == 2 and early() - before > 20


def in_any_order(count: int, same: int, steps: int) -> float:
    """The share of steps that ran early, of programs that begin with the same ops and come in any order."""
    x = torch.ones(4, next(widths)).to("ltc")
    choose = random.Random(0)
    found = {}
    begun = 0
    for k in range(steps):
        kind = choose.randrange(count)
        y = x
        for n in range(24):
            y = y.sin() if n < same or (n + kind) % 3 else y.cos()
        if k >= steps // 2:
            begun += context(0).early.has_begun
        assert found.setdefault(kind, value := y.sum().item()) == value
    assert len(set(found.values())) == count
    return begun / (steps - steps // 2)


def test_programs_in_any_order() -> None:
    """As batches of several lengths: which one comes is known by the first op."""
    assert in_any_order(3, 0, 300) > 0.8


def test_programs_in_any_order_with_the_same_beginning() -> None:
    """Which one comes is known after the ops that they have in common."""
    assert in_any_order(3, 6, 300) > 0.6


def grown(device: str, steps: int) -> list[float]:
    """As tokens that are generated: what is kept of them grows in each step."""
    torch.manual_seed(0)
    weight, kept = torch.randn(8, 8).to(device), torch.randn(1, 8).to(device)
    found = []
    for _ in range(steps):
        row = (kept[-1:] @ weight).tanh()
        scores = (row @ kept.t()).softmax(-1)
        kept = torch.cat([kept, (scores @ kept).sin() + row])
        found.append(kept[-1].sum().item())
    return found


def test_steps_of_any_size() -> None:
    before = early()
    with settings.override(dynamic_shapes="auto"):
        assert grown("ltc", 80) == pytest.approx(grown("cpu", 80), rel=1e-4, abs=1e-5)
    assert early() - before > 40


def mixed(device: str, steps: int, experts: int) -> list[float]:
    """A mixture of experts: each reads the rows that are its own, and the last step of all depends on them."""
    torch.manual_seed(0)
    nets = [nn.Linear(6, 6).to(device) for _ in range(experts)]
    parameters = [p for net in nets for p in net.parameters()]
    optimizer = torch.optim.SGD(parameters, lr=0.1)
    data = torch.randn(steps, 16, 6, generator=torch.Generator().manual_seed(1))
    found = []
    for x in data:
        x = x.to(device)
        chosen = (x.sum(1).abs() * 10).long() % experts
        out = torch.zeros_like(x)
        for k, net in enumerate(nets):
            rows = chosen == k
            out[rows] = net(x[rows]).tanh()
        loss = (out - x).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        found.append(loss.item())
    return found + [p.detach().cpu().sum().item() for p in parameters]


def test_a_program_that_comes_several_times_before_another() -> None:
    before = early()
    with settings.override(dynamic_shapes="auto"):
        assert mixed("ltc", 60, 3) == pytest.approx(mixed("cpu", 60, 3), rel=1e-3, abs=1e-5)
    assert early() - before > 20


def test_a_script_that_always_ends_otherwise_is_left_alone() -> None:
    """The same beginning, and an end that numbers choose: what runs early is of no use."""
    x = torch.ones(4, next(widths)).to("ltc")
    ends = [torch.Tensor.sqrt, torch.Tensor.exp, torch.Tensor.abs]
    choose = random.Random(0)
    begun = 0
    for _ in range(400):
        y = (x * 2).tanh().exp().sum().mul(2).add(1)
        begun += context(0).early.has_begun
        assert choose.choice(ends)(y).item() > 0
    assert begun < 100


def test_never() -> None:
    before = early()
    with settings.override(streaming="never"):
        trained("ltc", 30, next(widths))
    assert early() == before


def test_a_step_that_is_not_read_is_whole() -> None:
    x = torch.ones(4, 4).to("ltc")
    before = early()
    for _ in range(30):
        x = (x @ x).tanh()
        ltc.mark_step()
    assert early() == before


def test_the_interval_of_python_is_as_before() -> None:
    before = sys.getswitchinterval()
    seen = []
    trained("ltc", 30, next(widths), lambda k: seen.append(sys.getswitchinterval()))
    assert set(seen) == {before} and sys.getswitchinterval() == before


def test_what_has_run_early_is_freed() -> None:
    width = next(widths)
    trained("ltc", 30, width)
    context(0).wait()
    assert context(0).early._follower is None


HANDLER = """
import random, signal
from ltc_core import metrics
from ltc_core.runtime import early_run, habit

early_run._LEAST_NS = early_run._PART_NS = 1
early_run.num_cores = lambda: 2
habit._GAIN = 1e9
habit._CLEAR = 1e9
weight, calls = torch.eye(4).to(device) + 0, []

def handler(number, frame):
    calls.append((weight * 2).sum().item())
    signal.setitimer(signal.ITIMER_REAL, random.uniform(0.002, 0.03))

def steps(x, weight):
    found, state = [], x * 0
    for step in range(60):
        state = state.detach() * 0.5
        for k in range(20):
            x = torch.tanh(x @ weight) + k
            part = x.view(-1)[1:5]
            part.mul_(0.5)
            state.add_(x)
        found.append((x.sum() + part.sum() + state.sum()).item())
    return torch.tensor(found)

wanted = steps(torch.ones(4, 4), torch.eye(4))
steps(torch.ones(4, 4, device=device), weight)
signal.signal(signal.SIGALRM, handler)
signal.setitimer(signal.ITIMER_REAL, 0.003)
equal = []
while len(calls) < 30 or len(equal) < 4:
    equal.append(torch.allclose(steps(torch.ones(4, 4, device=device), weight), wanted))
signal.setitimer(signal.ITIMER_REAL, 0)
print(all(equal), set(calls), metrics.counter_value("EarlyRun") > 40)
"""


def test_a_signal_handler_reads_values() -> None:
    settings_of_child = {"LTC_COMPILE": "off", "LTC_STREAMING": "auto", "LTC_REPLAY": "always"}
    out, err = child.run(HANDLER, timeout_s=100, **settings_of_child)
    assert (out.strip(), err) == ("True {8.0} True", "")


class TestTheBeginningOfARun:
    """`begin` of the C++ part, and `run` after it."""

    @staticmethod
    def program() -> tuple[Any, list[torch.Tensor]]:
        x = torch.ones(3, next(widths)).to("ltc")
        found: list[object] = []
        for _ in range(4):
            found.append(((x * 2).exp().sum() * 3).item())
        step = context(0).early._last
        assert step is not None
        assert step.program.native is not None
        return step.program.native, [x.cpu()]

    @staticmethod
    def begun(native: Any) -> Any:
        """Of a trace with one input, the row 0, whose values are that and one for each of four instructions.

        That of the second one is watched.
        """
        return native.begin({"on the path"}, (0,), [2, 3, 4, 5], 1, 6, 1, 1, [2], 2)

    @staticmethod
    def give(begun: Any, x: object, scalars: list[int], num: int, **other: Any) -> int | None:
        """Let the first `num` instructions run."""
        buffer = SimpleNamespace(data=x, error=other.get("error"))
        where = other.get("cursor", "on the path"), other.get("epoch", 1)
        limit = other.get("limit", begun.due)
        due: int | None = begun.give(*where, limit, 1 + num, [(0, None, buffer, None)], scalars)
        return due

    @classmethod
    def begin(cls, native: Any, x: torch.Tensor) -> Any:
        """Run the first two instructions, which need `x` and the first scalar."""
        begun = cls.begun(native)
        assert cls.give(begun, x, [2], 2) == 4
        with ThreadPoolExecutor(1) as other:
            done = other.submit(native.follow, begun)
            while begun.num_run() < 2:
                time.sleep(0.001)
            begun.close()
            assert done.result() > 0
        return begun

    def test_the_values_are_used_for_the_same_inputs_only(self) -> None:
        native, (x,) = self.program()
        expected = native.run([x], [2, 3])[0]
        other = torch.zeros_like(x)
        for given, same in ((x, True), (other, False)):
            self.begin(native, x)
            x_before = x.clone()
            x.zero_()  # shows whether it is read again
            result = native.run([given], [2, 3])[0]
            x.copy_(x_before)
            if same:
                torch.testing.assert_close(result, expected)
            else:
                assert result.item() == pytest.approx(3.0 * x.numel())

    def test_watched_values_are_there_once_they_are_computed(self) -> None:
        native, (x,) = self.program()
        assert self.begun(native).outputs([x], [2, 3]) == []
        begun = self.begin(native, x)
        assert begun.outputs([torch.zeros_like(x)], [2, 3]) == []  # of other inputs
        assert begun.outputs([x], [0, 3]) == begun.outputs([x], []) == []  # of other scalars
        (value,) = begun.outputs([x], [2, 3])
        torch.testing.assert_close(value, (x * 2).exp())
        torch.testing.assert_close(native.run([x], [2, 3])[0], value.sum() * 3)

    def test_other_scalars_begin_anew(self) -> None:
        native, (x,) = self.program()
        self.begin(native, x)
        result = native.run([x], [0, 3])[0]
        assert result.item() == pytest.approx(3.0 * x.numel())

    def test_dropped(self) -> None:
        native, (x,) = self.program()
        expected = native.run([x], [2, 3])[0]
        self.begin(native, x)
        native.drop()
        torch.testing.assert_close(native.run([x], [2, 3])[0], expected)

    def test_nothing_is_given_after_the_end(self) -> None:
        native, (x,) = self.program()
        assert self.give(self.begin(native, x), x, [2, 3], 3) == 0

    def test_it_waits_for_what_is_given(self) -> None:
        native, (x,) = self.program()
        expected = native.run([x], [2, 3])[0]
        begun = self.begun(native)
        with ThreadPoolExecutor(1) as other:
            done = other.submit(native.follow, begun)
            assert [self.give(begun, x, [2], 1), self.give(begun, x, [2], 2)] == [3, 4]
            assert not done.done()
            assert self.give(begun, x, [2, 3], 4) == 0  # there is no more
            begun.close()
            done.result()
        torch.testing.assert_close(native.run([x], [2, 3])[0], expected)

    def test_inputs_that_were_given_last_are_there_for_the_rest(self) -> None:
        native, (x,) = self.program()
        expected = native.run([x], [2, 3])[0]
        begun = self.begun(native)
        self.give(begun, x, [2], 2)
        begun.close()
        assert native.follow(begun) >= 0
        torch.testing.assert_close(native.run([x], [2, 3])[0], expected)

    def test_inputs_that_are_not_there_yet_come_later(self) -> None:
        native, (x,) = self.program()
        expected = native.run([x], [2, 3])[0]
        begun = self.begun(native)
        assert self.give(begun, None, [2], 2) == 4
        begun.close()
        native.follow(begun)
        assert begun.num_run() == 0
        torch.testing.assert_close(native.run([x], [2, 3])[0], expected)

    @pytest.mark.parametrize(
        ("other", "answer"),
        [
            ({"cursor": "another"}, -1),
            ({"epoch": 2}, -1),
            ({"error": ValueError("no value")}, -1),
            ({"limit": 0}, None),
        ],
    )
    def test_it_is_not_given(self, other: dict[str, Any], answer: int | None) -> None:
        native, (x,) = self.program()
        begun = self.begun(native)
        assert self.give(begun, x, [2], 2, **other) == answer
        begun.close()
        native.follow(begun)
        assert begun.num_run() == 0
