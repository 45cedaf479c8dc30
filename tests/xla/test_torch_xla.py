"""Training on torch_xla's PJRT, here its CPU client: eager's losses, what is compiled and what is transferred."""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import ltc_core as ltc
from ltc_core.errors import DeviceError
from ltc_core.executors.torch_xla import executor, library
from ltc_core.settings import settings
from tests.core.counting import Counting
from tests.xla.library_counts import compiled_by_xla, transfers

ROOT = Path(__file__).parents[2]


def device() -> torch.device:
    return ltc.lazy_device()


class Loop:
    """A model, an optimizer and a step."""

    def __init__(self, model: nn.Module, **options: Any) -> None:
        self.model = model.to(device())
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2, **options)

    def step(self, *batch: torch.Tensor) -> torch.Tensor:
        x, y = (t.to(device()) for t in batch)
        self.optimizer.zero_grad()
        loss = nn.functional.cross_entropy(self.model(x), y)
        loss.backward()
        self.optimizer.step()
        ltc.mark_step()
        return loss.detach()


def mlp(dropout: float = 0.0) -> nn.Module:
    return nn.Sequential(
        nn.Linear(8, 16), nn.LayerNorm(16), nn.ReLU(), nn.Dropout(dropout), nn.Linear(16, 4)
    )


def batch() -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(32, 8), torch.randint(0, 4, (32,))


class TestSteps:
    def test_a_step_is_one_program_its_batch_and_its_numbers(self) -> None:
        loop = Loop(mlp(dropout=0.5))
        with settings.override(random="device"):
            for _ in range(3):
                loop.step(*batch())
            ltc.wait_device_ops()
        sent, fetched = transfers()
        compiled = compiled_by_xla()
        for _ in range(5):
            loop.step(*batch())
        ltc.wait_device_ops()
        now_sent, now_fetched = transfers()
        assert compiled_by_xla() == compiled
        # Two tensors of the batch; the numbers of the optimizer and the keys of the dropout go together.
        assert (now_sent - sent, now_fetched - fetched) == (5 * 3, 0)

    @pytest.mark.parametrize(
        ("kind", "options"),
        [
            (torch.optim.SGD, {"momentum": 0.9}),
            (torch.optim.SGD, {"momentum": 0.9, "nesterov": True, "fused": True}),
            (torch.optim.Adagrad, {"fused": True}),
            (torch.optim.AdamW, {}),
            (torch.optim.AdamW, {"fused": True}),
        ],
        ids=["momentum", "fused nesterov", "fused adagrad", "adamw", "fused adamw"],
    )
    def test_a_loop_is_one_program(self, kind: Any, options: dict[str, Any]) -> None:
        """Also its first step, which makes the optimizer's state, and with a learning rate that changes."""
        loop = Loop(mlp())
        loop.optimizer = kind(loop.model.parameters(), lr=0.1, **options)
        ltc.wait_device_ops()
        compiled = compiled_by_xla()
        with Counting() as counted:
            for step in range(6):
                loop.optimizer.param_groups[0]["lr"] = 0.1 / (step + 1)
                loop.step(*batch())
            ltc.wait_device_ops()
        assert compiled_by_xla() - compiled == 1
        assert not counted.fallbacks

    def test_numbers_are_sent_when_they_change(self) -> None:
        weight = nn.Parameter(torch.ones(4, device=device()))
        optimizer = torch.optim.SGD([weight], lr=0.5)
        counts = []
        for rate in (0.5, 0.5, 0.5, 0.25, 0.25):
            optimizer.param_groups[0]["lr"] = rate
            weight.grad = torch.ones_like(weight)
            before, _ = transfers()
            optimizer.step()
            ltc.mark_step(wait=True)
            counts.append(transfers()[0] - before)
        assert counts[2:] == [0, 1, 0]  # the first two are programs of their own
        assert weight.tolist() == [-1.0] * 4

    def test_a_loader_sends_a_batch_in_one_transfer(self) -> None:
        from ltc_dist.data.batch import to_device

        ltc.wait_device_ops()
        sent, _ = transfers()
        x, (y, z) = to_device((torch.ones(3), [torch.zeros(2), torch.ones(1).bool()]), device())
        assert transfers()[0] - sent == 1
        assert [t.tolist() for t in (x, y, z)] == [[1.0] * 3, [0.0] * 2, [True]]

    def test_a_learning_rate_is_an_input(self) -> None:
        loop = Loop(mlp())
        for _ in range(3):
            loop.step(*batch())
        ltc.wait_device_ops()
        compiled = compiled_by_xla()
        for step in range(5):
            loop.optimizer.param_groups[0]["lr"] = 0.1 / (step + 1)
            loop.step(*batch())
        ltc.wait_device_ops()
        assert compiled_by_xla() == compiled

    def test_a_number_that_is_a_constant_is_compiled_for_again(self) -> None:
        x = torch.full((3,), 2.0).to(device())
        results = [x.clone().pow(p).cpu() for p in (1.5, 2.5, 1.5)]
        for p, result in zip((1.5, 2.5, 1.5), results, strict=True):
            torch.testing.assert_close(result, torch.full((3,), 2.0**p))

    def test_a_smaller_last_batch_while_steps_are_under_way(self) -> None:
        """A program is traced on tensors that are still being computed."""
        losses = []
        for size in range(1, 7):
            loop = Loop(mlp())
            for n in (size, size, 32 + size):
                x, y = batch()
                losses.append(loop.step(x[:n], y[:n]))
        assert torch.stack(losses).isfinite().all()

    def test_parameters_are_written_in_their_own_memory(self) -> None:
        loop = Loop(mlp())
        loop.step(*batch())
        loop.step(*batch())
        ltc.wait_device_ops()
        old = loop.model[0].weight._h.value.buffer.take()
        loop.step(*batch())
        ltc.wait_device_ops()
        with pytest.raises(RuntimeError, match="donated|HasValue"):
            library.load()._xla_get_cpu_tensors([old])
        assert loop.model[0].weight.isfinite().all()

    def test_a_kept_value_is_not_overwritten(self) -> None:
        loop = Loop(mlp())
        loop.step(*batch())
        before = loop.model[0].weight.detach().clone()
        kept = before.cpu()
        loop.step(*batch())
        assert before.cpu().equal(kept) and not loop.model[0].weight.cpu().equal(kept)


class TestFailures:
    def test_a_failed_launch_loses_what_it_was_to_write_and_no_more(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        loop = Loop(mlp())
        x, y = (t.to(device()) for t in batch())
        for _ in range(3):
            loop.step(x, y)
        ltc.wait_device_ops()

        def fail(*args: Any) -> Any:
            raise RuntimeError("RESOURCE_EXHAUSTED: out of memory")

        with monkeypatch.context() as patch:
            patch.setattr(executor.Launch, "run", fail)
            with pytest.raises(RuntimeError, match="a compiled program failed(?s:.*)out of memory"):
                loop.step(x, y)
                ltc.wait_device_ops()
        assert x.isfinite().all() and y.max().item() < 4
        with pytest.raises(RuntimeError, match="out of memory"):
            loop.model[0].weight.detach().cpu()

    def test_an_op_that_fails_on_the_host_is_named_and_takes_nothing_with_it(self) -> None:
        weight, bad = torch.ones(3, 3).to(device()), torch.full((3, 3), torch.nan).to(device())
        weight.add_(1)
        result = torch.linalg.eig(bad * 2)
        words = (
            r"linalg_eig.default failed(?s:.*)infs or NaNs. \(first recorded at .*test_torch_xla"
        )
        with pytest.raises(RuntimeError, match=words):
            ltc.mark_step(wait=True)
        del result
        weight.mul_(3)
        assert weight.tolist() == [[6.0] * 3] * 3

    @pytest.mark.parametrize("made", ["moved", "made there"])
    def test_a_type_that_xla_does_not_have(self, made: str) -> None:
        dtype = torch.float8_e4m3fnuz
        words = "float8_e4m3fnuz cannot be on .*: XLA has no such type(?s:.*)Next: convert it"
        with pytest.raises(DeviceError, match=words):
            if made == "moved":
                torch.zeros(4).to(dtype).to(device())
            else:
                torch.zeros(4, dtype=dtype, device=device()).cpu()
        assert (torch.ones(2, device=device()) + 1).tolist() == [2.0] * 2


class TestValues:
    def test_outputs_that_are_one_value_are_two_tensors(self) -> None:
        x = torch.ones(4).to(device())
        a, b = x + 1, x + 1
        ltc.mark_step()
        a.add_(1)
        ltc.mark_step()
        assert (a.tolist(), b.tolist()) == ([3.0] * 4, [2.0] * 4)

    def test_an_input_that_is_an_output_too(self) -> None:
        x = torch.ones(4).to(device())
        y = x.clone()
        z = x * 2
        ltc.mark_step()
        x.mul_(5)
        ltc.mark_step()
        assert (x.tolist(), y.tolist(), z.tolist()) == ([5.0] * 4, [1.0] * 4, [2.0] * 4)

    def test_programs_that_differ_in_which_input_they_take_alone(self) -> None:
        x, y = torch.full((3,), 2.0).to(device()), torch.full((3,), 3.0).to(device())
        first = [(x * y).tolist(), (-x).tolist()]
        one, two = x * y, -x
        ltc.mark_step()
        three, four = x * y, -y
        ltc.mark_step()
        assert [one.tolist(), two.tolist()] == first
        assert [three.tolist(), four.tolist()] == [[6.0] * 3, [-3.0] * 3]

    def test_float64_is_stored_as_float32(self) -> None:
        x = torch.full((2,), 1 + 2**-40, dtype=torch.float64).to(device())
        assert x.dtype is torch.float64 and (x * 2).dtype is torch.float64
        assert (x * 2).cpu().tolist() == [2.0, 2.0]

    def test_an_op_that_is_not_lowered_runs_on_the_host_and_is_counted(self) -> None:
        x = torch.rand(4, 4)
        for _ in range(2):
            with Counting() as counted:
                ours = (torch.special.bessel_j0(x.to(device()) * 2) + 1).cpu()
            torch.testing.assert_close(ours, torch.special.bessel_j0(x * 2) + 1)
            assert counted.fallbacks == {"special_bessel_j0": 1}


class TestRandomNumbers:
    def draw(self, size: int = 1000) -> torch.Tensor:
        return torch.rand(size, device=device()).cpu()

    def test_a_seed_makes_them_and_a_state_brings_them_back(self) -> None:
        with settings.override(random="device"):
            torch.manual_seed(3)
            first, state = self.draw(), ltc.get_rng_state()
            second = self.draw()
            ltc.set_rng_state(state)
            again = self.draw()
            torch.manual_seed(3)
            assert self.draw().equal(first) and again.equal(second) and not first.equal(second)
        assert 0.45 < first.mean() < 0.55 and 0 <= first.min() and first.max() < 1

    def test_those_of_the_host_are_eagers(self) -> None:
        with settings.override(random="host"):
            torch.manual_seed(3)
            ours = self.draw(999)
        torch.manual_seed(3)
        assert ours.equal(torch.rand(999))

    def test_a_recomputed_dropout_is_the_same(self) -> None:
        def gradient(run: Callable[..., Any]) -> torch.Tensor:
            torch.manual_seed(0)
            x = torch.ones(64, 64, device=device(), requires_grad=True)
            run(lambda t: nn.functional.dropout(t * 2, 0.5).square(), x).sum().backward()
            assert x.grad is not None
            return x.grad.cpu()

        with settings.override(random="device"):
            plain = gradient(lambda f, x: f(x))
            recomputed = gradient(lambda f, x: checkpoint(f, x, use_reentrant=False))
        assert plain.equal(recomputed) and 0 < (plain == 0).float().mean() < 1


def run_script(code: str, **environ: str) -> str:
    """Run a program of its own: settings, and the number of devices, are those of a process."""
    inherited = {**os.environ, "PYTHONPATH": str(ROOT), **environ}
    done = subprocess.run(
        [sys.executable, "-c", code], env=inherited, capture_output=True, text=True, timeout=280
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


NARROW = """
import torch, ltc_core as ltc
from torch import nn
from ltc_core.runtime.devices import context

def losses(device):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.LayerNorm(64), nn.Linear(64, 4)).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x, y = torch.randn(64, 16).to(device), torch.randint(0, 4, (64,)).to(device)
    found = []
    for _ in range(8):
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        ltc.mark_step()
        found.append(loss.item())
    return torch.tensor(found), model[0].weight

ours, weight = losses("ltc")
eagers, _ = losses("cpu")
wide = torch.ones(2, dtype=torch.float64, device="ltc") * 3
stored = [str(t._h.value.buffer.take().dtype) for t in (weight.detach(), wide) if ltc.wait_device_ops() is None]
assert weight.dtype is torch.float32 and wide.dtype is torch.float64
print(*stored, (ours - eagers).abs().max().item() < 0.03, ours[-1].item() < ours[0].item())
"""


@pytest.mark.parametrize(
    ("name", "stored"),
    [
        ("LTC_USE_BF16", "torch.bfloat16 torch.bfloat16"),
        ("LTC_DOWNCAST_BF16", "torch.bfloat16 torch.float32"),
        ("XLA_USE_BF16", "torch.bfloat16 torch.bfloat16"),
        ("LTC_EXPLAIN", "torch.float32 torch.float32"),
    ],
)
@pytest.mark.timeout(300)
def test_what_is_stored_narrow_stays_within_its_rounding(name: str, stored: str) -> None:
    assert run_script(NARROW, **{name: "1"}).strip() == f"{stored} True True"


TWO_DEVICES = """
import torch, ltc_core as ltc, ltc_dist as ltd
from ltc_dist import data_parallel as dp
from ltc_core import metrics

data = [(torch.randn(16, 8), torch.randint(0, 4, (16,))) for _ in range(8)]

def loop(model, loader, device, context):
    optimizer = context.getattr_or("optimizer", lambda: torch.optim.SGD(model.parameters(), lr=0.1))
    found = []
    for _, (x, y) in loader:
        optimizer.zero_grad()
        loss = torch.nn.functional.cross_entropy(model(x), y)
        loss.backward()
        ltd.optimizer_step(optimizer)
        gathered = ltd.all_gather(loss.detach())
        found.append((loss.detach(), gathered))
    return [(a.item(), b.tolist()) for a, b in found]

def net():
    torch.manual_seed(1)
    return torch.nn.Linear(8, 4)

model = dp.DataParallel(net)
first, second = model(loop, data)
again = model(loop, data)
alone = net()
optimizer = torch.optim.SGD(alone.parameters(), lr=0.1)
for k in range(0, 8, 2):  # what the two see together
    (x, y), (x2, y2) = data[k : k + 2]
    optimizer.zero_grad()
    pair = [torch.nn.functional.cross_entropy(alone(a), b) for a, b in ((x, y), (x2, y2))]
    (sum(pair) / 2).backward()
    optimizer.step()
    for mine, other, got in zip(pair, reversed(pair), (first[k // 2], second[k // 2])):
        assert abs(mine.item() - got[0]) < 1e-5
        assert torch.allclose(torch.stack(pair).detach(), torch.tensor(got[1]), atol=1e-5)
a, b = ([p.detach().cpu() for p in m.parameters()] for m in model.models)
assert all(x.equal(y) for x, y in zip(a, b))
print(len(again[0]), metrics.counter_value("CompiledProgram"), len(ltc.get_lazy_supported_devices()))
"""


@pytest.mark.timeout(300)
def test_two_devices_reduce_within_their_programs() -> None:
    environ = {"LTC_NUM_DEVICES": "2"}
    # One program for each device; the second run compiles nothing.
    assert run_script(TWO_DEVICES, **environ).strip() == "4 2 2"


MANY_DEVICES = """
import torch, ltc_dist as ltd
from ltc_dist import data_parallel as dp

def loop(model, loader, device, context):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _, (x, y) in loader:
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(model(x), y).backward()
        ltd.optimizer_step(optimizer)

def net():
    torch.manual_seed(0)
    return torch.nn.Linear(8, 4)

data = [(torch.randn(16, 8), torch.randint(0, 4, (16,))) for _ in range(800)]
model = dp.DataParallel(net)
model(loop, data)
weights = [m.weight.detach().cpu() for m in model.models]
print(len(weights), all(w.equal(weights[0]) for w in weights))
"""


@pytest.mark.timeout(300)
def test_more_devices_than_cores_wait_for_nothing_but_each_other() -> None:
    """Launches that share a thread of the client would wait for each other for ever."""
    count = (os.cpu_count() or 1) + 2
    assert run_script(MANY_DEVICES, LTC_NUM_DEVICES=str(count)).strip() == f"{count} True"


EACH_COLLECTIVE = """
import torch, ltc_core as ltc, ltc_dist as ltd
from ltc_dist import data_parallel as dp
from ltc_core import metrics

def loop(model, loader, device, context):
    k = device.index
    x = (torch.arange(8.0).reshape(4, 2) + 10 * k).to(device)
    flags = torch.tensor([k == 1, True]).to(device)
    whole = torch.tensor([3, 5 + k]).to(device)
    found = {kind: ltd.all_reduce(kind, x, scale=0.5) for kind in ("sum", "mul", "min", "max")}
    found |= {kind: ltd.all_reduce(kind, whole) for kind in ("and", "or")}
    found["gathered"] = ltd.all_gather(x, dim=1)
    found["flags"] = ltd.all_gather(flags)
    found["scattered"] = ltd.reduce_scatter("sum", x, 0.5, 0, 2)
    found["to all"] = ltd.all_to_all(x, 0, 1, 2)
    found["permuted"] = ltd.collective_permute(x, [[0, 1], [1, 0]])
    parts = [x.clone(), flags.clone(), whole.clone()]
    ltd.collective_broadcast(parts, root_ordinal=1)
    found["broadcast"] = parts
    ltc.mark_step()
    return {name: [v.tolist() for v in (t if isinstance(t, list) else [t])] for name, t in found.items()}

data = [(torch.ones(1), torch.ones(1))] * 2
first, second = dp.DataParallel(lambda: torch.nn.Linear(1, 1))(loop, data)
for name in first:
    print(name, first[name], second[name])
"""


@pytest.mark.timeout(300)
def test_each_collective_of_two_devices_gives_what_it_gives_on_the_cpu() -> None:
    ours = run_script(EACH_COLLECTIVE, LTC_NUM_DEVICES="2")
    assert ours == run_script(EACH_COLLECTIVE, LTC_NUM_DEVICES="2", LTC_DEVICE="cpu")
    assert ours.count("\n") == 12


DIFFERENT = """
import torch, ltc_core as ltc, ltc_dist as ltd
from ltc_dist import data_parallel as dp

def loop(model, loader, device, context):
    for number, (x, _) in loader:
        size = 3 if device.index else 4
        ltd.all_reduce("sum", [torch.ones(size).to(device)])
        ltc.mark_step()

data = [(torch.randn(2, 2), torch.zeros(2)) for _ in range(4)]
try:
    dp.DataParallel(lambda: torch.nn.Linear(2, 2))(loop, data)
except RuntimeError as error:
    print(type(error).__mro__[1].__name__, "different collectives" in str(error))
"""


@pytest.mark.timeout(300)
def test_devices_at_different_collectives_are_told_and_do_not_hang() -> None:
    environ = {"LTC_NUM_DEVICES": "2"}
    assert run_script(DIFFERENT, **environ).split()[-1] == "True"
