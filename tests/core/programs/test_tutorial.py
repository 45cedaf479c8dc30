"""Document 002, the tutorial, in our own words: control flow, training, what ran elsewhere, timing.

What it promises is asserted; counts stand where it speaks of syncs and compiles.
"""

import math
import time

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.optim.lr_scheduler import StepLR
from torch.utils.data import DataLoader

import ltc_core.api.verbs as ltm
from ltc_core import metrics
from tests.core.counting import Counting
from tests.core.models import CNN, digits

pytestmark = pytest.mark.usefixtures("marked_steps")


@pytest.fixture
def device() -> torch.device:
    return ltm.lazy_device()


def add_two_maybe(t: torch.Tensor, maybe: torch.Tensor) -> torch.Tensor:
    if maybe:
        return t + 2
    return t


class TestTheTutorial:
    def test_control_flow_on_values_is_safe(self, device: torch.device) -> None:
        t = torch.ones(1)
        for value in (0, 1, 0, 1):
            maybe = torch.BoolTensor([value])
            t_lazy, maybe_lazy = t.to(device), maybe.to(device)
            lazy_result = add_two_maybe(t_lazy, maybe_lazy)
            assert lazy_result.device == device
            assert lazy_result.cpu() == add_two_maybe(t, maybe)
            assert str(lazy_result) == f"tensor([{1 + 2 * value}.], device='{device}')"

    def test_a_condition_in_the_middle_of_a_model(self, device: torch.device) -> None:
        def model(x: torch.Tensor) -> torch.Tensor:
            y = x * 2
            if y.sum() > 4:
                return (y - 1).exp()
            while (y < 10).all():
                y = y + 3
            return y

        for values in ([1.0, 0.5], [3.0, 4.0], [0.0, 0.0]):
            x = torch.tensor(values)
            torch.testing.assert_close(model(x.to(device)).cpu(), model(x))

    def test_other_input_shapes_are_traced_anew(self, device: torch.device) -> None:
        """The cached computation is used only for inputs with the properties it was made for."""

        def run(x: torch.Tensor) -> list[float]:
            result = (x.float() * 2 + 1).sum(-1)
            ltm.mark_step()
            return result.tolist()

        with Counting() as first:
            assert run(torch.ones(2, 3, device=device)) == [9.0, 9.0]
        with Counting() as again:
            assert run(torch.zeros(2, 3, device=device) + 1) == [9.0, 9.0]
            assert run(torch.ones(2, 3, device=device)) == [9.0, 9.0]
        with Counting() as wider:
            assert run(torch.ones(1, 4, device=device)) == [12.0]
        with Counting() as integer:
            assert run(torch.ones(2, 3, device=device, dtype=torch.int64)) == [9.0, 9.0]
        assert (first.compiles, again.compiles) == (1, 1)  # `+ 1` is another graph; `ones` is not
        assert (wider.compiles, integer.compiles) == (1, 1)

    def test_mnist_with_adadelta_and_a_schedule(
        self, device: torch.device, capsys: pytest.CaptureFixture[str]
    ) -> None:
        log_interval, epochs = 4, 3
        train_loader = DataLoader(digits(96), batch_size=8)
        torch.manual_seed(0)
        model = CNN().to(device)
        optimizer = torch.optim.Adadelta(model.parameters(), lr=1)
        scheduler = StepLR(optimizer, step_size=1, gamma=0.7)
        logged: list[float] = []
        metrics.reset()
        with Counting() as counted:
            for epoch in range(1, epochs + 1):
                self._train(log_interval, model, device, train_loader, optimizer, epoch, logged)
                scheduler.step()
        lines = capsys.readouterr().out.splitlines()
        assert lines[0].startswith("Train Epoch: 1 [0/96 (0%)]\tLoss: ") and len(lines) == 9
        assert logged[0] > 1.5 and logged[-1] < 0.3
        # Every iteration is like the one before: the same computation, and nothing but the reads
        # of the loss runs on the CPU. The third program: the schedule makes lr=1 a float.
        assert counted.compiles == 3
        assert counted.fallbacks == {"_local_scalar_dense": 9}
        assert counted.syncs == {"MarkStep": 36}

    @staticmethod
    def _train(
        log_interval: int,
        model: nn.Module,
        device: torch.device,
        train_loader: DataLoader,  # type: ignore[type-arg]
        optimizer: torch.optim.Optimizer,
        epoch: int,
        logged: list[float],
    ) -> None:
        model.train()
        for batch_idx, (data, target) in enumerate(train_loader):
            data, target = data.to(device), target.to(device)
            optimizer.zero_grad(set_to_none=True)
            output = model(data)
            loss = F.nll_loss(output, target)
            loss.backward()
            optimizer.step()
            ltm.mark_step()
            if batch_idx % log_interval == 0:
                logged.append(loss.item())
                seen, total = batch_idx * len(data), len(train_loader.dataset)  # type: ignore[arg-type]
                percent = 100.0 * batch_idx / len(train_loader)
                where = f"Train Epoch: {epoch} [{seen}/{total} ({percent:.0f}%)]"
                print(f"{where}\tLoss: {logged[-1]:.6f}")

    def test_mark_step_does_not_wait(self, device: torch.device) -> None:
        """The step is handed over; its values are pending when mark_step comes back."""
        x = torch.ones(600, 600, device=device)
        ltm.wait_device_ops()
        y = x
        for _ in range(20):
            y = (y @ x) / 600
        ltm.mark_step()
        assert y._h.value.buffer.is_pending
        z = y + 1  # the next step is traced meanwhile
        ltm.wait_device_ops()
        assert not y._h.value.buffer.is_pending
        torch.testing.assert_close(z.cpu(), torch.full((600, 600), 2.0))

    def test_ops_that_ran_elsewhere_are_named(self, device: torch.device) -> None:
        metrics.reset()
        t = torch.tensor([0.0, 1.0, 0.0, 2.0], device=device)
        found = t.nonzero()
        assert found.tolist() == [[1], [3]] and found.device == device
        names = metrics.counter_names()
        assert [n for n in names if n.startswith("aten::")] == ["aten::nonzero"]
        assert metrics.executed_fallback_ops() == ["aten::nonzero"]
        assert metrics.counter_value("aten::nonzero") == 1
        metrics.reset()
        assert metrics.counter_names() == []

    def test_timing_a_model(self, device: torch.device) -> None:
        model = nn.Linear(50, 50).to(device)
        x = torch.ones(10, 50, device=device)
        ltm.wait_device_ops()
        with Counting() as counted:
            start = time.perf_counter()
            y = model(x)
            ltm.wait_device_ops()
            seconds = time.perf_counter() - start
        assert seconds > 0 and not y._h.value.buffer.is_pending
        assert counted.syncs == {"Wait": 1}
        for devices in ([], [device], [str(device)], device, str(device)):
            ltm.wait_device_ops(devices)


class TestNoHiddenSyncs:
    """Utilities a loop uses each step and that must not cut it."""

    def test_clip_grad_norm(self, device: torch.device) -> None:
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1)).to(device)
        expected = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1))
        expected.load_state_dict(model.state_dict())
        x = torch.randn(8, 4)
        ltm.mark_step()
        with Counting() as counted:
            model(x.to(device)).square().sum().backward()
            norm = nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            ltm.mark_step()
        assert counted.syncs == {"MarkStep": 1} and not counted.fallbacks
        expected(x).square().sum().backward()
        torch.testing.assert_close(norm.cpu(), nn.utils.clip_grad_norm_(expected.parameters(), 0.5))
        for p, q in zip(model.parameters(), expected.parameters(), strict=True):
            torch.testing.assert_close(p.grad.cpu(), q.grad)

    def test_clip_grad_value_and_running_statistics(self, device: torch.device) -> None:
        model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)).to(device)
        total = torch.zeros((), device=device)
        ltm.mark_step()
        with Counting() as counted:
            for step in range(3):
                loss = model(torch.full((8, 4), float(step), device=device)).square().mean()
                loss.backward()
                nn.utils.clip_grad_value_(model.parameters(), 0.1)
                total += loss.detach()
                ltm.mark_step()
        assert counted.syncs == {"MarkStep": 3} and not counted.fallbacks
        assert math.isfinite(total.item()) and model[1].num_batches_tracked.item() == 3
