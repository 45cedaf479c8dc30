"""The loop that forgets to mark its steps: where it begins, and what is done about it.

The plain training loop is in test_endurance.py; here are loops of other shapes, and memory.
"""

import gc
import warnings
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import nn

import ltc_core as ltc
from ltc_core.runtime import devices
from ltc_core.runtime.unbounded_loop import LoopWatch, loop_head
from ltc_core.settings import settings
from tests.core.counting import Counting

SETUP = ["setup:1", "setup:2"]


class TestLoopHead:
    def test_the_line_a_loop_begins_with(self) -> None:
        body = ["loop:5", "loop:6", "loop:6", "loop:7"]
        assert loop_head(SETUP + body * 10).line == "loop:5"
        assert loop_head(body * 2).line == "loop:5"
        assert loop_head(body[2:] + body * 10).line in body

    def test_of_nested_loops_the_outer_one(self) -> None:
        inner = ["inner:3", "inner:4"] * 7
        outer = ["outer:1", *inner, "outer:9"]
        assert loop_head(SETUP + outer * 5).line == "outer:1"

    def test_a_line_that_is_called_from_several_places_is_not_it(self) -> None:
        body = ["loop:5", "helper:1", "loop:6", "helper:1", "loop:7"]
        assert loop_head(SETUP + body * 10).line == "loop:5"

    def test_a_helper_used_twice_before_the_loop_is_not_it(self) -> None:
        """It comes again least often of all, but it never comes again."""
        setup = ["setup:1", "init:8", "setup:2", "init:8", "setup:3"]
        assert loop_head(setup + ["loop:5", "loop:6"] * 20).line == "loop:5"

    def test_a_loop_of_one_line(self) -> None:
        head = loop_head(SETUP + ["loop:5"] * 40)
        assert head.line == "loop:5" and head.repeats
        assert not loop_head(SETUP + ["loop:5", "loop:6"] * 4).repeats

    def test_nothing_comes_again(self) -> None:
        assert loop_head([]).line == "" == loop_head(["a", "b", "c"]).line
        assert loop_head(["", "", ""]).line == ""

    def test_ops_without_a_line_are_passed_over(self) -> None:
        assert loop_head(["", "a", "", "b", "", "a", "", "b"]).line == "a"


@pytest.fixture
def context() -> Iterator[devices.DeviceContext]:
    """A device that may warn anew, with limits of 400 and 2000 values."""
    found = devices.context(ltc.lazy_device().index)

    def renew() -> None:
        ltc.mark_step(wait=True)
        found.trace.forget()
        found.compiler.forget()
        found.watch = LoopWatch(found.trace, lambda: found.cut("GraphLimit"))
        found.trace.limit = found.trace.first_limit

    # Marked: in a process that has marked no step yet, the steps of an optimizer would end the graphs.
    with settings.override(trim_graph_size=400, max_graph_size=2000, steps="marked"):
        renew()
        yield found
    renew()


def told(run: Callable[[], object]) -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        run()
    return [str(w.message) for w in caught if "step boundary" in str(w.message)]


def accumulate(device: torch.device, times: int) -> torch.Tensor:
    x = torch.zeros(4, device=device)
    for i in range(times):
        y = x + float(i)
        y = y * 0.5
        x = y.sin()
    return x


def helper(x: torch.Tensor) -> torch.Tensor:
    return x.cos()


def with_a_helper_before(device: torch.device, times: int) -> torch.Tensor:
    x = helper(torch.zeros(4, device=device))
    x = x + 1
    x = helper(x)
    for _ in range(times):
        x = x * 0.5
        x = x + 1
    return x


def nested(device: torch.device, times: int) -> torch.Tensor:
    x = torch.zeros(4, device=device)
    for _ in range(times // 5):
        x = x * 0.5
        for _ in range(5):
            x = x + 1
            x = x.tanh()
    return x


def one_line(device: torch.device, times: int) -> torch.Tensor:
    x = torch.zeros(4, device=device)
    for _ in range(times):
        x = x * 0.5 + 1
    return x


def with_a_model(device: torch.device, times: int) -> torch.Tensor:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 1)).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    for _ in range(times // 10):
        loss = model(torch.ones(2, 4, device=device)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return loss.detach()


LOOPS = [accumulate, with_a_helper_before, nested, one_line, with_a_model]


@pytest.mark.parametrize("loop", LOOPS, ids=lambda f: f.__name__)
def test_each_kind_of_loop(
    loop: Callable[[torch.device, int], torch.Tensor], context: devices.DeviceContext
) -> None:
    """Cut again and again, told once, few programs, eager's answer."""
    results: list[torch.Tensor] = []
    with Counting() as counted:
        texts = told(lambda: results.append(loop(context.device, 2500)))
    assert len(texts) == 1, texts
    assert (
        "test_unbounded_loop.py" in texts[0]
        and "Next: if this is the training loop, call mark_step()" in texts[0]
    )
    assert counted.syncs["GraphLimit"] >= 3 and set(counted.syncs) == {"GraphLimit"}
    assert counted.compiles <= 5, counted.compiles
    assert context.trace.count <= 2000 + 100
    torch.testing.assert_close(results[0].cpu(), loop(torch.device("cpu"), 2500))


def test_the_warning_names_the_loop_and_points_to_it(context: devices.DeviceContext) -> None:
    [text] = told(lambda: accumulate(context.device, 1000))
    assert f"in {accumulate.__name__}" in text
    assert str(context.device) in text
    assert "recorded 4" in text  # hundreds of values


def test_a_loop_that_marks_its_steps_is_left_alone(context: devices.DeviceContext) -> None:
    def loop() -> None:
        for _ in range(40):
            accumulate(context.device, 20)
            ltc.mark_step()

    with Counting() as counted:
        assert told(loop) == []
    assert "GraphLimit" not in counted.syncs


def test_a_graph_that_is_long_but_no_loop_is_cut_at_the_hard_limit(
    context: devices.DeviceContext,
) -> None:
    def lines(count: int) -> str:
        return "\n".join(f"x = x + {i}" for i in range(count))

    scope = {"x": torch.zeros(2, device=context.device)}
    program = compile(lines(2600), "generated.py", "exec")
    with Counting() as counted:
        texts = told(lambda: exec(program, scope))
    assert len(texts) == 1 and "the program up to " in texts[0] and "generated.py:" in texts[0]
    assert counted.syncs == {"GraphLimit": 1}
    assert scope["x"].tolist() == [float(sum(range(2600)))] * 2


def test_memory_is_flat(context: devices.DeviceContext) -> None:
    """What a piece made is freed with it: a longer loop holds no more."""

    def cut_and_wait() -> None:  # so that no piece is in flight when the next one is recorded
        context.cut("GraphLimit")
        context.worker.drain()

    context.watch = LoopWatch(context.trace, cut_and_wait)
    with settings.override(replay="never"):
        told(lambda: accumulate(context.device, 1000))
        ltc.mark_step(wait=True)
        gc.collect()  # what earlier tests left
        held = context.memory.used_bytes
        context.memory.reset_peak()
        told(lambda: accumulate(context.device, 1000))
        ltc.mark_step(wait=True)
        short = context.memory.peak_bytes
        told(lambda: accumulate(context.device, 6000))
        ltc.mark_step(wait=True)
    assert context.memory.used_bytes == held
    assert context.memory.peak_bytes <= short + 64


def test_the_second_loop_of_a_program_is_cut_at_its_own_head(
    context: devices.DeviceContext,
) -> None:
    def both() -> None:
        accumulate(context.device, 600)
        nested(context.device, 600)
        accumulate(context.device, 600)

    with Counting() as counted:
        assert len(told(both)) == 1
    assert counted.compiles <= 8


def test_a_loop_that_follows_the_one_whose_head_was_found(context: devices.DeviceContext) -> None:
    """The first loop is over when the trace is too long, and only its line has been seen."""

    def both() -> torch.Tensor:
        x = torch.zeros(4, device=context.device)
        for _ in range(190):
            x = x * 0.5 + 1
        for _ in range(1500):
            x = x + 0.5
        return x

    with Counting() as counted:
        told(both)
    assert counted.syncs["GraphLimit"] >= 3
    assert context.trace.count < 1000


def test_a_gradient_may_cross_the_cuts(context: devices.DeviceContext) -> None:
    def program(device: torch.device) -> torch.Tensor:
        w = torch.full((3,), 0.5, device=device, requires_grad=True)
        x = torch.zeros(3, device=device)
        for _ in range(500):
            x = x * 0.9
            x = x + w
        x.sum().backward()
        assert w.grad is not None
        return w.grad

    results: list[torch.Tensor] = []
    told(lambda: results.append(program(context.device)))
    torch.testing.assert_close(results[0].cpu(), program(torch.device("cpu")))


def long_step(cell: nn.Module, x: torch.Tensor, optimizer: torch.optim.Optimizer) -> float:
    """A training step of more than 400 values: a loop over time in Python, ended by a read."""
    h = torch.zeros(2, 4, device=x.device)
    hidden = []
    for row in x:
        h = cell(row, h)
        hidden.append(h)
    loss = torch.stack(hidden).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return loss.item()


@pytest.mark.parametrize("steps", ["marked", "auto"])
def test_a_step_longer_than_a_graph_is_cut_at_the_same_places_each_time(
    steps: str, context: devices.DeviceContext
) -> None:
    """Also where the read that ends it is of a value that an earlier part has computed."""

    def losses(device: torch.device) -> list[float]:
        torch.manual_seed(0)
        cell = nn.GRUCell(3, 4).to(device)
        optimizer = torch.optim.SGD(cell.parameters(), lr=0.1)
        x = torch.randn(60, 2, 3).to(device)
        return [long_step(cell, x, optimizer) for _ in range(4)]

    with settings.override(steps=steps):
        told(lambda: losses(context.device))
        with Counting() as counted:
            found = losses(context.device)
    assert found == losses(torch.device("cpu"))
    assert counted.syncs["GraphLimit"] >= 4 * 3
    assert counted.compiles == 0, counted.compiles
