"""A small program that is read at each step runs in the thread that reads, without a launch: with the same results."""

from collections.abc import Callable, Iterator

import pytest
import torch

import ltc_core as ltc
from ltc_core import metrics
from ltc_core.executors.reference import replay
from ltc_core.runtime import run_cost
from ltc_core.runtime.device_context import DeviceContext
from ltc_core.runtime.devices import context
from ltc_core.runtime.launcher import Launcher
from ltc_core.settings import settings

pytestmark = pytest.mark.skipif(replay.extension.load() is None, reason="no C++ compiler")

Read = Callable[[], float]


@pytest.fixture(autouse=True, params=["each cut in Python", "known cuts in C++"])
def runs(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Iterator[list[int]]:
    """How many ops each program had that ran without a launch."""
    found: list[int] = []
    plain = Launcher.finish_in_cpp

    def counted(self: Launcher, compiled, *args) -> None:  # type: ignore[no-untyped-def]
        found.append(len(compiled.graph.nodes))
        plain(self, compiled, *args)

    monkeypatch.setattr(Launcher, "finish_in_cpp", counted)
    if request.param == "each cut in Python":
        monkeypatch.setattr(DeviceContext, "_cut_known", lambda *args: False)
    monkeypatch.setattr(run_cost, "_AWAITED_NS", 1 << 62)  # however busy the machine is
    with settings.override(replay="always", steps="marked"):
        context(0).wait()
        yield found


def repeated(read: Read, times: int = 6) -> list[float]:
    return [read() for _ in range(times)]


def test_a_loop_that_reads_runs_without_launches(runs: list[int]) -> None:
    x = torch.ones(4, device="ltc")
    assert repeated(lambda: (x * 2.0 + 1.0).sum().item()) == [12.0] * 6
    assert runs.count(3) >= 2 and set(runs) <= {3, 4}  # in the first one `x` is filled


def test_values_that_stay_are_those_of_eager(runs: list[int]) -> None:
    weights = {}
    for device in ("cpu", "ltc"):
        w = torch.linspace(-1, 1, 5, device=device).requires_grad_()
        optimizer = torch.optim.Adam([w], lr=0.1)
        for _ in range(6):
            optimizer.zero_grad()
            loss = (w * w).sum()
            loss.backward()
            optimizer.step()
            loss.item()
        weights[device] = w.detach().cpu()
    assert runs
    assert torch.equal(weights["cpu"], weights["ltc"])


@pytest.mark.parametrize(
    "mode",
    [
        torch.inference_mode,
        torch.no_grad,
        lambda: torch.autocast("cpu", dtype=torch.bfloat16),
        lambda: torch.device("cpu"),
        lambda: torch.autograd.detect_anomaly(check_nan=False),
    ],
)
@pytest.mark.filterwarnings("ignore:Anomaly Detection")
def test_modes_of_the_reader_do_not_reach_the_run(mode: Callable[[], object]) -> None:
    x = torch.ones(3, 3, device="ltc")
    is_grad = torch.is_grad_enabled()
    for _ in range(6):
        y = (x @ x).sum()
        with mode():  # type: ignore[attr-defined]
            assert y.item() == 27.0
        assert torch.is_grad_enabled() is is_grad and not torch.is_inference_mode_enabled()


def test_a_failed_op_raises_at_the_read_and_keeps_the_rest(runs: list[int]) -> None:
    x = torch.arange(6.0, device="ltc")
    kept = torch.zeros(1, device="ltc")
    at = torch.tensor([1]).to("ltc")
    found = []
    for index in [1, 2, 3, 4, 50, 5]:
        at.copy_(torch.tensor([index]))
        kept += 1
        picked = x.index_select(0, at).sum()
        try:
            found.append(picked.item())
        except IndexError as error:
            found.append(str(error).splitlines()[0])
    assert found[:4] == [1.0, 2.0, 3.0, 4.0] and found[5] == 5.0
    assert "index out of range" in str(found[4])
    assert kept.item() == 6.0
    assert runs


def test_each_read_is_counted() -> None:
    x = torch.ones(4, device="ltc")
    (x * 3.0).sum().item()
    before = {
        name: metrics.counter_value(name) or 0 for name in ("Sync.Item", "ExecuteComputation")
    }
    runs_before = metrics.metric_data("ExecuteTime")
    repeated(lambda: (x * 3.0).sum().item(), 5)
    after = {name: metrics.counter_value(name) or 0 for name in before}
    assert {name: after[name] - before[name] for name in before} == dict.fromkeys(before, 5)
    assert runs_before is not None
    assert metrics.metric_data("ExecuteTime")[0] - runs_before[0] == 5  # type: ignore[index]


def test_memory_that_is_overwritten_is_counted_once() -> None:
    x = torch.ones(1000, device="ltc")
    for _ in range(4):
        x.mul_(2.0)
        x[0].item()
    used = context(0).memory.used_bytes
    x.mul_(2.0)
    assert x[0].item() == 32.0
    assert context(0).memory.used_bytes == used


@pytest.mark.parametrize(
    "dtype",
    [
        torch.float32,
        torch.float64,
        torch.bfloat16,
        torch.int64,
        torch.int8,
        torch.bool,
        torch.complex64,
    ],
)
def test_numbers_have_the_type_that_eager_gives(dtype: torch.dtype) -> None:
    there = torch.tensor([1], dtype=dtype)
    for _ in range(4):
        here = there.to("ltc").reshape(()).item()
        assert (type(here), here) == (type(there.item()), there.item())
    ltc.mark_step()
