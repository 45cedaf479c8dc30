"""Numbers that C++ reads where a read cuts what it has cut before: eager's numbers, and what Python would have done."""

import itertools
import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

import ltc_core as ltc
from ltc_core import metrics
from ltc_core.executors.reference import replay
from ltc_core.executors.reference.program import ReferenceProgram
from ltc_core.record import fast_path
from ltc_core.runtime import known_reads
from ltc_core.runtime.devices import context
from ltc_core.runtime.early_run import EarlyRuns
from ltc_core.settings import settings
from tests.core.runtime.left_to_python import left_to_python

pytestmark = pytest.mark.skipif(
    replay.extension.load() is None or fast_path.extension.load() is None, reason="no C++ compiler"
)


@pytest.fixture(autouse=True)
def in_python() -> Iterator[list[str]]:
    """The reasons of the reads that Python makes."""
    with left_to_python("value_data", lambda cell, reason, *_: reason, steps="marked") as found:
        yield found


def repeated(read: Callable[[], Any], times: int) -> list[Any]:
    return [read() for _ in range(times)]


def test_a_loop_that_reads_needs_no_python(in_python: list[str]) -> None:
    x = torch.ones(4, device="ltc")
    assert repeated(lambda: (x * 2.5).sum().item(), 60) == [10.0] * 60
    assert len(in_python) < 20


def test_each_program_is_pythons_again_after_some_runs(
    in_python: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(known_reads, "_MOST_RUNS", 5)
    x = torch.ones(5, device="ltc")
    repeated(lambda: (x * 3.5).sum().item(), 60)
    assert 15 <= len(in_python) < 40


def test_compiled_code_may_come_at_any_time(monkeypatch: pytest.MonkeyPatch) -> None:
    plain, asked = ReferenceProgram.native, itertools.count()
    now_and_then = property(lambda self: None if next(asked) % 3 == 0 else plain.fget(self))  # type: ignore[attr-defined]
    monkeypatch.setattr(ReferenceProgram, "native", now_and_then)
    monkeypatch.setattr(known_reads, "_MOST_RUNS", 2)
    x = torch.ones(6, device="ltc")
    assert repeated(lambda: (x * 4.5).sum().item(), 60) == [27.0] * 60


def train(device: str) -> list[float]:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(3, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))
    x, y = torch.randn(16, 3).to(device), torch.randn(16, 1).to(device)
    model.to(device)
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=5, line_search_fn="strong_wolfe")

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = torch.nn.functional.mse_loss(model(x), y)
        loss.backward()
        return loss

    return [optimizer.step(closure).item() for _ in range(6)]


def test_lbfgs_is_that_of_eager(in_python: list[str]) -> None:
    of_ltc = train("ltc")
    num_reads = metrics.counter_value("aten::_local_scalar_dense") or 0
    assert of_ltc == pytest.approx(train("cpu"), rel=1e-4)
    assert len(in_python) < num_reads / 2


@pytest.mark.parametrize(
    "dtype", [torch.float64, torch.int64, torch.int32, torch.bool, torch.bfloat16]
)
def test_numbers_of_each_dtype(dtype: torch.dtype) -> None:
    for k in range(12):
        of_ltc = torch.full((2,), k, device="ltc").to(dtype)[0:1].max().item()
        of_cpu = torch.full((2,), k).to(dtype)[0:1].max().item()
        assert of_ltc == of_cpu and type(of_ltc) is type(of_cpu)


def test_what_is_written_between_two_reads() -> None:
    found = {}
    for device in ("cpu", "ltc"):
        x = torch.zeros(3, device=device)
        y = torch.ones(3, device=device)
        found[device] = []
        for k in range(40):
            x.add_(y, alpha=0.25 * (k % 3))
            y = x - y
            found[device] += [x.mean().item(), bool((x > 5).any()), int(y.argmax())]
            x[0] = k
    assert found["cpu"] == found["ltc"]


def test_numbers_that_change_are_inputs(in_python: list[str]) -> None:
    x = torch.ones(4, device="ltc")
    assert [(x * k).sum().item() for k in range(40)] == [4.0 * k for k in range(40)]
    assert len(in_python) < 20
    assert [(x.long() + k).sum().item() for k in [1, 2, True, 1 << 40]] == [8, 12, 8, 4 + (1 << 42)]


def test_an_op_that_fails_raises_in_its_read_and_the_next_ones_go_on(in_python: list[str]) -> None:
    table = torch.arange(6.0, device="ltc")

    def read(index: int) -> float:
        at = torch.full((1,), index, device="ltc")
        return table.index_select(0, at).sum().item()

    for _ in range(3):
        assert [read(k % 6) for k in range(30)] == [float(k % 6) for k in range(30)]
        del in_python[:]
        read(1)
        assert not in_python
        with pytest.raises(IndexError, match="out of range") as failed:
            read(50)
        assert "test_known_reads.py" in str(failed.value)
    assert (table + 1.0).sum().item() == 21.0


def test_counters_are_those_of_python(monkeypatch: pytest.MonkeyPatch) -> None:
    names = (
        "aten::_local_scalar_dense", "CachedCompile", "ExecuteComputation", "Sync.Item", "Sync.ToCpu", "ReplayedRun",
        "OpByOpRun", "ltc::mul", "ltc::sum",
    )  # fmt: skip
    x = torch.ones(4, device="ltc")

    def read() -> None:
        (x * 4.5).sum().item()
        (x * 4.5).sum(0, keepdim=True).cpu()

    def counts() -> list[int]:
        repeated(read, 10)
        before = [metrics.counter_value(name) or 0 for name in names]
        samples = metrics.metric_data("ExecuteTime")
        repeated(read, 50)
        after = [metrics.counter_value(name) or 0 for name in names]
        more = metrics.metric_data("ExecuteTime")
        assert samples is not None and more is not None and more[1] > samples[1]
        return [b - a for a, b in zip(before, after, strict=True)] + [more[0] - samples[0]]

    in_cpp = counts()
    monkeypatch.setattr(known_reads.KnownReads, "resume", lambda self: None)
    context(0).wait()
    assert in_cpp == counts() == [50, 100, 100, 50, 50, 100, 100, 100, 100, 100]


def test_a_value_that_is_there_is_read_again(in_python: list[str]) -> None:
    x = torch.ones(4, device="ltc")
    for _ in range(20):
        total = (x * 6.5).sum()
        assert total.item() == total.item() == 26.0
    assert len(in_python) < 20


def test_tensors_are_read_without_python(in_python: list[str]) -> None:
    x = torch.arange(4.0, device="ltc")
    for k in range(60):
        copied = (x * 2 + k).cpu()
        assert copied.tolist() == [k, k + 2.0, k + 4.0, k + 6.0]
    assert len(in_python) < 20
    assert repeated(lambda: (x * 3).tolist(), 60) == [[0.0, 3.0, 6.0, 9.0]] * 60
    assert len(in_python) < 30


PARTS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "an element": lambda x: x[1, 2],
    "a row": lambda x: x[1],
    "a column": lambda x: x[:, 1],
    "transposed": lambda x: x.t(),
    "of the transposed": lambda x: x.t()[1],
    "of other sizes": lambda x: x.view(3, 2)[2],
    "every second": lambda x: x.flatten()[::2],
    "the diagonal": lambda x: x[:, :2].diagonal(),
    "expanded": lambda x: x[0].expand(4, 3),
    "windows": lambda x: x.unfold(1, 2, 1)[1],
    "at an offset": lambda x: x.as_strided((2,), (3,), 2),
    "negated": lambda x: torch._neg_view(x)[1],
    "other bits": lambda x: x.view(torch.int32)[1],
    "halves": lambda x: x.view(torch.int16)[0, 2:5],
    "of another layout": lambda x: x.t().contiguous().t()[1],
    "without elements": lambda x: x[:, :0],
}


@pytest.mark.parametrize("kind", PARTS)
@pytest.mark.parametrize("is_new", [True, False], ids=["of a new value", "of memory"])
def test_parts_are_those_of_eager(kind: str, is_new: bool) -> None:
    def read(x: torch.Tensor) -> Any:
        part = PARTS[kind](x + 1 if is_new else x)
        number = part.max().item() if part.numel() > 1 else part.sum().item()
        elements = [e.item() for e in part.flatten().unbind()] if part.numel() else []
        return part.cpu().tolist(), part.tolist(), number, elements

    x = torch.arange(6.0).view(2, 3)
    expected, on_device = read(x), x.to("ltc")
    assert repeated(lambda: read(on_device), 24) == [expected] * 24


def test_a_view_that_eager_refuses_has_the_elements_in_order() -> None:
    x = torch.arange(6.0, device="ltc").view(2, 3)

    def read() -> Any:
        flat = (x + 1).t().view(-1)  # ltc: a lazy tensor looks contiguous
        return flat.cpu().tolist(), flat[1].item(), flat.view(3, 2)[2].tolist()

    assert repeated(read, 24) == [([1.0, 4.0, 2.0, 5.0, 3.0, 6.0], 4.0, [3.0, 6.0])] * 24


def test_elements_are_read_without_python(in_python: list[str]) -> None:
    x = torch.arange(6.0, device="ltc").view(2, 3)
    found = [(x.sum(1)[1].item(), x[1, 2].item(), x[0].tolist()) for _ in range(60)]
    assert found == [(12.0, 5.0, [0.0, 1.0, 2.0])] * 60
    assert len(in_python) < 40


def test_a_sample_is_read_without_python(in_python: list[str]) -> None:
    """It is transposed and reshaped, so Python has to see once that its elements stay where they are."""
    sampled = torch.arange(5, device="ltc").view(5, 1)
    for k in range(60):
        assert (sampled + k).permute(1, 0).view(5).cpu().tolist() == [k, k + 1, k + 2, k + 3, k + 4]
    assert len(in_python) < 20
    in_python.clear()
    turned = torch.arange(6, device="ltc").view(2, 3)
    for k in range(30):  # here they do not
        flat = (turned + k).t().view(-1)
        assert flat.cpu().tolist() == [k, k + 3, k + 1, k + 4, k + 2, k + 5]
        assert flat.view(6)[1].item() == k + 3


def test_a_part_that_was_written_is_read(in_python: list[str]) -> None:
    x = torch.zeros(4, device="ltc")
    part = x[2:]
    for k in range(30):
        part += 1
        x[3] = -k
        assert (part[0].item(), part[1].item(), x[1].item()) == (k + 1.0, -k, 0.0)
    assert len(in_python) < 45


def test_a_value_of_constants_is_read_without_python(in_python: list[str]) -> None:
    """A probe could compute it, but the script waits anyway."""
    assert repeated(lambda: torch.zeros(4, device="ltc").sum().item(), 60) == [0.0] * 60
    assert len(in_python) < 20


@pytest.mark.usefixtures("checked_distributions")
def test_distributions_are_read_without_python_and_checked(in_python: list[str]) -> None:
    rate = torch.tensor(2.0, device="ltc")

    def read(at: float) -> float:
        waiting = torch.distributions.Exponential(rate)  # type: ignore[no-untyped-call]
        return waiting.log_prob(torch.full((), at, device="ltc")).exp().item()  # type: ignore[no-any-return, no-untyped-call]

    for _ in range(3):
        assert repeated(lambda: read(0.0), 40) == [2.0] * 40
        del in_python[:]
        repeated(lambda: read(0.0), 10)
        assert not in_python
        with pytest.raises(ValueError, match="Expected value argument to be within the support"):
            read(-1.0)
    assert (rate + 1.0).item() == 3.0


def test_a_copy_is_the_callers_own() -> None:
    x = torch.zeros(3, device="ltc")
    for k in range(40):
        x += 1
        first = x.cpu()
        first.fill_(100)
        second = x.to("cpu")
        assert second.tolist() == [k + 1.0] * 3
        assert first.data_ptr() != second.data_ptr()


MADE: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "transposed": lambda x: (x * 2).t(),
    "in another order": lambda x: torch.empty_like(x.t()).copy_(x.t()) * 2,
    "a part": lambda x: (x + 1)[1:],
    "nothing": lambda x: (x + 1)[:0] * 2,
    "bool": lambda x: x > 3,
    "bfloat16": lambda x: (x / 3).bfloat16(),
    "int8": lambda x: (x * 2).to(torch.int8),
    "complex": lambda x: torch.complex(x, x + 1),
    "conjugate": lambda x: torch.complex(x, x + 1).conj(),
    "with a gradient": lambda x: x.clone().requires_grad_() * 2,
    "large": lambda x: x.sum() + torch.ones(300, 300, device=x.device),
    "without dims": lambda x: x.sum() * 2,
}


@pytest.mark.parametrize("kind", MADE)
def test_copies_are_those_of_eager(kind: str) -> None:
    make = MADE[kind]
    expected = make(torch.arange(6.0).view(2, 3))
    x = torch.arange(6.0).view(2, 3).to("ltc")
    for k in range(24):
        copied = make(x).cpu()
        assert torch.equal(copied, expected) and copied.dtype is expected.dtype
        assert copied.stride() == torch.empty_like(expected).stride()
        assert copied.requires_grad == expected.requires_grad
        if not expected.requires_grad:
            wide = make(x).to("cpu", torch.complex128, non_blocking=bool(k % 2))
            assert torch.equal(wide, expected.to(torch.complex128))
        with torch.inference_mode(k % 3 == 0):
            assert make(x).cpu().is_inference() == (k % 3 == 0)


def test_an_op_that_fails_raises_in_the_read_of_a_tensor(in_python: list[str]) -> None:
    table = torch.arange(6.0, device="ltc")

    def read(index: int) -> list[float]:
        at = torch.full((1,), index, device="ltc")
        return table.index_select(0, at).cpu().tolist()  # type: ignore[no-any-return]

    for _ in range(3):
        assert [read(k % 6) for k in range(30)] == [[float(k % 6)] for k in range(30)]
        with pytest.raises(IndexError, match="out of range"):
            read(50)
    assert (table + 1.0).cpu().sum() == 21.0


class Noted(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(func.__name__)
        return func(*args, **(kwargs or {}))


class Seen(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


def test_modes_of_the_user_see_a_read(in_python: list[str]) -> None:
    x = torch.ones(4, device="ltc")
    repeated(lambda: (x * 7.5).sum().item(), 30)
    with Noted() as noted:
        assert (x * 7.5).sum().item() == 30.0
    assert "_local_scalar_dense.default" in noted.names
    repeated(lambda: (x * 7.5).sum().item(), 30)
    del in_python[:]
    with Seen():
        assert (x * 7.5).sum().item() == 30.0
    assert in_python


def test_a_timeline_and_a_changed_setting_end_it(in_python: list[str], tmp_path: Path) -> None:
    x = torch.ones(4, device="ltc")
    repeated(lambda: (x * 8.5).sum().item(), 30)
    del in_python[:]
    with ltc.profiler.timeline(tmp_path / "run.json"):
        repeated(lambda: (x * 8.5).sum().item(), 3)
    assert len(in_python) == 3
    repeated(lambda: (x * 8.5).sum().item(), 30)
    del in_python[:]
    with settings.override(replay="never"):
        (x * 8.5).sum().item()
    assert in_python
    repeated(lambda: (x * 8.5).sum().item(), 30)
    del in_python[:]
    with torch.profiler.profile() as profile:
        (x * 8.5).sum().item()
    assert in_python and any("ltc::" in event.name for event in profile.events())


def test_not_where_the_step_after_it_runs_early(
    in_python: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """That step is expected by Python, from the read before it on."""
    monkeypatch.setattr(EarlyRuns, "may_gain", lambda self, step: True)
    monkeypatch.setattr(EarlyRuns, "_learn", lambda self, step: False)
    x = torch.ones(6, device="ltc")
    repeated(lambda: (x * 9.5).sum().item(), 30)
    del in_python[:]
    repeated(lambda: (x * 9.5).sum().item(), 30)
    assert len(in_python) == 30


def test_a_script_that_does_not_wait_is_pythons(in_python: list[str]) -> None:
    x = torch.ones(4, device="ltc")
    for k in range(40):
        x = x * 1.0 + 0.0
        ltc.mark_step()
        if k % 10 == 9:
            del in_python[:]
            assert x.sum().item() == 4.0
            assert in_python


def test_another_thread_reads_between() -> None:
    x = torch.ones(4, device="ltc")
    found: list[float] = []

    def read() -> None:
        found.extend(repeated(lambda: (x * 10.5).sum().item(), 50))

    for _ in range(4):
        read()
        thread = threading.Thread(target=read)
        thread.start()
        read()
        thread.join()
    assert found == [42.0] * 600


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork")
@pytest.mark.filterwarnings("ignore:This process")
def test_in_a_forked_child() -> None:
    x = torch.ones(4, device="ltc")
    repeated(lambda: (x * 11.5).sum().item(), 30)
    child = os.fork()
    if child == 0:
        is_right = repeated(lambda: (x * 11.5).sum().item(), 20) == [46.0] * 20
        os._exit(0 if is_right else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert (x * 11.5).sum().item() == 46.0
