"""Ops that run where they are called (`runtime.at_once`, `record/csrc/at_once.h`): when, and what that changes."""

import gc
import time
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from ltc_core import metrics
from ltc_core.record import fast_path
from ltc_core.record.trace import Trace
from ltc_core.runtime import at_once, execution_gate
from ltc_core.runtime.at_once import AtOnce
from ltc_core.runtime.devices import context
from ltc_core.settings import settings
from ltc_core.tensor.buffer import MemoryCounter
from tests.core.beside_eager import beside_eager
from tests.core.child import run

DEVICE = torch.device("ltc")


@pytest.fixture
def running() -> Iterator[AtOnce]:
    """Ops run at once, but for the first call of each."""
    found = context(0).at_once
    with settings.override(at_once="always"):
        (torch.ones(2, device=DEVICE) + 1).sum().item()
        found.end()
        (torch.ones(2, device=DEVICE) * 3).sum().item()
        found._begin(time.perf_counter_ns())
        assert found.is_on
        yield found
    found.end()


def num_ops(of: AtOnce) -> int:
    return int(of._native.num_ops)


def in_python(call: Callable[[], torch.Tensor]) -> torch.Tensor:
    """What a call gives that Python records."""
    was_on = fast_path.enable(False)
    try:
        return call()
    finally:
        fast_path.enable(was_on)


def ready(t: torch.Tensor) -> bool:
    buffer = t._h.value.buffer  # type: ignore[attr-defined]
    return buffer is not None and buffer.data is not None


class TestOneOp:
    def test_it_has_run_when_the_call_returns(self, running: AtOnce) -> None:
        x = torch.ones(2, 3, device=DEVICE)
        for _ in range(2):  # the first call of an op is recorded
            y = x.mul(5).exp()
        assert ready(y)
        torch.testing.assert_close(y.cpu(), torch.ones(2, 3).mul(5).exp())

    def test_an_operand_that_is_only_recorded_is_computed_first(self, running: AtOnce) -> None:
        one = torch.ones(3, device=DEVICE)
        one.mul(2)
        x = in_python(lambda: one + 1)
        assert not ready(x)
        y = x.mul(2)
        assert ready(x) and ready(y) and y.tolist() == [4, 4, 4]

    @pytest.mark.parametrize(
        "write",
        [
            lambda t: t.add_(1),
            lambda t: t[0].zero_(),
            lambda t: t[:, 1].copy_(t[:, 0]),
            lambda t: t.t()[0].mul_(t.t()[1]),
            lambda t: t.view(-1)[2:5].fill_(7),
            lambda t: t.index_put_((torch.tensor([1], device=t.device),), t[0] * 2),
            lambda t: t.add_(t.sum()),
        ],
    )
    def test_a_write_is_seen_by_all_that_share_the_memory_and_by_no_copy(
        self, running: AtOnce, write: Callable[[torch.Tensor], object]
    ) -> None:
        def program(device: torch.device) -> Any:
            x = torch.arange(9.0).reshape(3, 3).to(device)
            part, turned, copy, same = x[1:], x.t(), x.clone(), x.detach()
            for _ in range(3):
                write(x)
            return x, part, turned, copy, same

        beside_eager(program)

    def test_a_value_that_is_recorded_keeps_what_it_was(self, running: AtOnce) -> None:
        x = torch.ones(4, device=DEVICE) * 2
        for _ in range(2):  # the first call of an op is recorded
            x.mul_(1)
        later = in_python(lambda: x + 1)
        x.mul_(10)
        assert ready(x) and not ready(later)
        assert later.tolist() == [3] * 4 and x.tolist() == [20] * 4

    def test_a_tensor_on_the_host_that_was_read_keeps_its_values(self, running: AtOnce) -> None:
        x = torch.ones(4, device=DEVICE) * 2
        seen = x.cpu()
        x.mul_(10)
        assert seen.tolist() == [2] * 4

    def test_an_op_that_fails_raises_at_its_line(self, running: AtOnce) -> None:
        table = torch.ones(3, 2, device=DEVICE)
        good = table.index_select(0, torch.tensor([1], device=DEVICE))
        bad = table.index_select(0, torch.tensor([5], device=DEVICE))
        with pytest.raises(IndexError, match="index out of range") as caught:
            bad.cpu()
        assert "test_at_once.py" in str(caught.value)
        assert good.tolist() == [[1, 1]]

    def test_a_call_that_is_wrong_raises_at_once(self, running: AtOnce) -> None:
        a, b = torch.ones(2, 3, device=DEVICE), torch.ones(2, 3, device=DEVICE)
        with pytest.raises(RuntimeError, match="mat1 and mat2"):
            a @ b

    def test_draws_are_those_of_eager(self, running: AtOnce) -> None:
        def program(device: torch.device) -> Any:
            torch.manual_seed(3)
            x = torch.ones(50).to(device)
            drop = nn.Dropout()
            return [drop(x) for _ in range(3)], [torch.bernoulli(x / 2) for _ in range(3)]

        beside_eager(program)

    def test_its_memory_is_counted_and_given_back(self, running: AtOnce) -> None:
        x = torch.ones(100, device=DEVICE)
        x * 2
        gc.collect()
        before = context(0).memory.used_bytes
        y = x * 2
        assert context(0).memory.used_bytes == before + 400
        del y
        assert context(0).memory.used_bytes == before

    def test_values_decide_the_size_of_a_result(self, running: AtOnce) -> None:
        def program(device: torch.device) -> Any:
            x = torch.tensor([1.0, -1.0, 2.0, 0.0]).to(device)
            found = []
            for _ in range(3):
                found += [x[x > 0], x.nonzero(), torch.unique(x), bool((x > 1).any())]
            return found

        beside_eager(program)

    def test_a_view_of_an_inference_tensor_is_one(self, running: AtOnce) -> None:
        with torch.inference_mode():
            x = torch.ones(3, 2, device=DEVICE) * 2
            inner = x[1:]
        assert inner.is_inference() and x[1:].is_inference()
        assert not (torch.ones(3, device=DEVICE) * 2)[1:].is_inference()


class TestTraining:
    @pytest.mark.parametrize("optimizer", [torch.optim.SGD, torch.optim.AdamW])
    def test_losses_are_those_of_eager(self, running: AtOnce, optimizer: Any) -> None:
        def program(device: torch.device) -> Any:
            torch.manual_seed(0)
            model = nn.Sequential(
                nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(64, 3)
            ).to(device)
            losses = []
            x, y = torch.randn(8, 1, 6, 6).to(device), torch.arange(8).remainder(3).to(device)
            steps = optimizer(model.parameters(), lr=0.01)
            for _ in range(6):
                loss = nn.functional.cross_entropy(model(x), y)
                steps.zero_grad()
                loss.backward()
                steps.step()
                losses.append(loss.item())
            return losses, list(model.parameters()), list(model.buffers())

        beside_eager(program, 1e-6, 1e-6)
        assert num_ops(running) > 100

    def test_packed_sequences_of_other_lengths_each_time(self, running: AtOnce) -> None:
        def program(device: torch.device) -> Any:
            torch.manual_seed(0)
            model = nn.LSTM(4, 6, batch_first=True).to(device)
            found = []
            for step in range(5):
                lengths = torch.tensor([5 + step, 3, 2])
                x = torch.randn(3, 5 + step, 4).to(device)
                packed = nn.utils.rnn.pack_padded_sequence(x, lengths, batch_first=True)
                y, _ = nn.utils.rnn.pad_packed_sequence(model(packed)[0], batch_first=True)
                loss = y.square().mean()
                loss.backward()
                found.append(loss.detach())
            return found, [p.grad for p in model.parameters()]

        beside_eager(program, 1e-5, 1e-6)


class TestWhen:
    """A device whose calls take what a test says."""

    class Device:
        def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
            self.now_ns = 1_000_000_000
            self.calls = self.python = 0
            self.is_in_parts = False
            self.state: Any = None
            monkeypatch.setattr(at_once.time, "perf_counter_ns", lambda: self.now_ns)
            stand_in = SimpleNamespace(
                install=lambda: True,
                num_calls=lambda: (self.calls, self.python),
                run_at_once=self._begin,
                record_again=lambda _: None,
            )
            monkeypatch.setattr(at_once, "fast_path", stand_in)
            executor: Any = SimpleNamespace(keeps_host_tensors=True)
            self.at_once = AtOnce(
                Trace(DEVICE, MemoryCounter()),
                MemoryCounter(),
                executor,
                lambda: None,
                lambda: True,
                lambda: self.is_in_parts,
            )

        def _begin(self, *_: Any) -> Any:
            self.state = SimpleNamespace(next_look=0, form=0, num_ops=0)
            return self.state

        def step(
            self,
            num_calls: int,
            us_a_call: float,
            in_python: float,
            num_cuts: int = 1,
            form: int = 0,
        ) -> None:
            """A step of the script: ends with a cut, or, where ops run at once, with a look."""
            self.calls += num_calls
            self.python += int(num_calls * in_python)
            self.now_ns += int(num_calls * us_a_call * 1000)
            if self.at_once.is_on:
                self.state.form = form
                self.at_once.end_step()
                self.at_once._look()
            else:
                self.at_once.follow(self.now_ns, num_cuts)

        def run(
            self,
            seconds: float,
            recorded: tuple[float, float],
            at_once_us: float,
            num_cuts: int = 1,
            form: int = 0,
        ) -> float:
            """Run steps for so long; the share of the time for which their ops ran at once."""
            began_ns, at_once_ns = self.now_ns, 0
            while self.now_ns < began_ns + seconds * 1e9:
                before_ns, was_on = self.now_ns, self.at_once.is_on
                if was_on:
                    self.step(500, at_once_us, 0.0, form=form)
                else:
                    self.step(500, *recorded, num_cuts)
                at_once_ns += (self.now_ns - before_ns) * was_on
            return at_once_ns / (self.now_ns - began_ns)

    @pytest.fixture
    def device(self, monkeypatch: pytest.MonkeyPatch) -> Iterator["TestWhen.Device"]:
        monkeypatch.setattr(metrics, "count", lambda *_: None)
        with settings.override(at_once="auto"):
            yield self.Device(monkeypatch)

    def test_where_python_records_much_ops_run_at_once(self, device: "TestWhen.Device") -> None:
        assert device.run(20, recorded=(60, 0.5), at_once_us=10) > 0.8

    def test_recording_is_tried_again_more_and_more_rarely(self, device: "TestWhen.Device") -> None:
        device.run(300, recorded=(60, 0.5), at_once_us=10)
        assert device.run(300, recorded=(60, 0.5), at_once_us=10) > 0.98

    def test_steps_that_cpp_records_are_left_alone(self, device: "TestWhen.Device") -> None:
        assert device.run(20, recorded=(20, 0.0), at_once_us=10) == 0

    def test_where_it_is_no_quicker_ops_are_recorded(self, device: "TestWhen.Device") -> None:
        device.run(30, recorded=(60, 0.5), at_once_us=60)
        assert device.run(100, recorded=(60, 0.5), at_once_us=60) < 0.02

    def test_once_steps_repeat_they_are_recorded(self, device: "TestWhen.Device") -> None:
        device.run(10, recorded=(60, 0.5), at_once_us=10)
        assert device.at_once.is_on
        for _ in range(40):
            if device.at_once.is_on:
                device.step(500, 60, 0.0, form=17)
        assert not device.at_once.is_on
        assert device.run(20, recorded=(5, 0.0), at_once_us=10) == 0

    def test_where_values_are_read_every_few_ops(self, device: "TestWhen.Device") -> None:
        def run(seconds: float) -> float:
            return device.run(seconds, recorded=(20, 0.0), at_once_us=10, num_cuts=100, form=17)

        run(5)
        assert run(300) > 0.95

    @pytest.mark.parametrize("at_once_us", [10, 19])
    def test_where_reads_cut_steps_into_parts(
        self, device: "TestWhen.Device", at_once_us: float
    ) -> None:
        device.is_in_parts = True
        recorded = (20.0, 0.0)
        assert (
            device.run(15, recorded, at_once_us, num_cuts=3, form=17) == 0
        )  # compiled code may come
        device.run(10, recorded, at_once_us, num_cuts=3, form=17)
        share = device.run(300, recorded, at_once_us, num_cuts=3, form=17)
        assert share > 0.95 if at_once_us == 10 else share < 0.01

    def test_a_script_that_changes_is_judged_anew(self, device: "TestWhen.Device") -> None:
        device.is_in_parts = True
        device.run(300, recorded=(20, 0.0), at_once_us=19, num_cuts=3, form=17)
        device.run(2, recorded=(60, 0.5), at_once_us=10)
        assert device.run(20, recorded=(60, 0.5), at_once_us=10) > 0.8

    @pytest.mark.parametrize(
        "changed",
        [{"at_once": "never"}, {"debug": 1}, {"explain": True}, {"compile": "sync"}],
        ids=str,
    )
    def test_never_if_settings_say_so(
        self, device: "TestWhen.Device", changed: dict[str, Any]
    ) -> None:
        with settings.override(**changed):
            assert device.run(5, recorded=(60, 0.5), at_once_us=10) == 0

    def test_not_where_a_block_is_to_be_one_graph(self, device: "TestWhen.Device") -> None:
        device.run(5, recorded=(60, 0.5), at_once_us=10)
        assert device.at_once.is_on
        execution_gate.close()
        try:
            assert not device.at_once.is_on
            assert device.run(5, recorded=(60, 0.5), at_once_us=10) == 0
        finally:
            execution_gate.open()


def test_a_search_in_a_script() -> None:
    """Greedy choice of boxes: each iteration has other sizes, and reads a number."""
    code = """
    import torch, ltc_core as ltc

    def chosen(device):
        generator, found = torch.Generator().manual_seed(0), []
        for _ in range(60):
            scores = torch.rand(40, generator=generator).to(device)
            order = scores.argsort(descending=True)
            while order.numel() > 1:
                best, order = order[0], order[1:]
                found.append(best.item())
                order = order[scores[order] * 1.1 < scores[best]]
        return found

    assert chosen("ltc") == chosen("cpu")
    print(ltc.metrics.counter_value("AtOnceOps") > 100)
    print("ops ran where they were called" in ltc.metrics.summary())
    """
    assert run(code, LTC_AT_ONCE="always")[0].split() == ["True", "True"]


def test_a_forked_child_goes_on() -> None:
    code = """
    import os, torch, ltc_core
    x = torch.ones(3, device="ltc")
    for _ in range(3):
        y = (x * 2).sum().item()
    from ltc_core.runtime.devices import context
    assert context(0).at_once.is_on
    pid = os.fork()
    if pid == 0:
        os._exit(int((x * 2 + 1).sum().item()))
    print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
    """
    assert run(code, LTC_AT_ONCE="always")[0].split() == ["9"]


def test_calls_are_counted() -> None:
    fast_path.install()
    x = torch.ones(2, device=DEVICE)
    x.cos()
    before = fast_path.num_calls()
    x.cos()
    x.cos()
    calls, python = fast_path.num_calls()
    assert calls == before[0] + 2 and before[1] <= python <= before[1] + 2
