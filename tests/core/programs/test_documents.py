"""The snippets of the torch_xla and lazy_tensor_core guides that need one process, in our own words.

One class for each heading. What a document promises is asserted; counts stand where it speaks of
syncs and compiles. Document 002 is in test_tutorial.py.
"""

import sys
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

import ltc_core
import ltc_core.api.verbs as ltm
import ltc_core.serialization as xser
from ltc_core.serialization import plain
from tests import prepared
from tests.core.counting import Counting
from tests.core.models import CNN, digits

ROOT = Path(__file__).parents[3]


@pytest.fixture
def device() -> torch.device:
    return ltm.lazy_device()


class TestCreatingALazyTensor:
    def test_create_and_print(
        self, device: torch.device, capsys: pytest.CaptureFixture[str]
    ) -> None:
        torch.manual_seed(5)
        t = torch.randn(2, 2, device=device)
        print(t.device)
        print(t)
        first, *rest = capsys.readouterr().out.splitlines()
        assert first == str(device) and device.index == 0
        torch.manual_seed(5)
        expected = repr(torch.randn(2, 2))
        assert "\n".join(rest) == f"{expected[:-1]}, device='{device}')"

    def test_the_device_type_is_like_any_other(self, device: torch.device) -> None:
        assert torch.device(device.type, 0) == device
        assert torch.zeros(1, device=device.type).device == device
        assert torch.zeros(1).to(device.type).device == device
        assert ltm.is_lazy_tensor(torch.zeros(1, device=device))
        assert not ltm.is_lazy_tensor(torch.zeros(1))


class TestLazyTensorsArePyTorchTensors:
    def test_add_and_mm(self, device: torch.device) -> None:
        t0 = torch.randn(2, 2, device=device)
        t1 = torch.randn(2, 2, device=device)
        a, b = t0.cpu(), t1.cpu()
        assert (t0 + t1).cpu().equal(a + b)
        assert t0.mm(t1).cpu().equal(a.mm(b))

    def test_modules(self, device: torch.device) -> None:
        l_in = torch.randn(10, device=device)
        linear = torch.nn.Linear(10, 20).to(device)
        l_out = linear(l_in)
        assert l_out.device == device and l_out.shape == (20,)
        torch.testing.assert_close(l_out.detach().cpu(), linear.cpu()(l_in.cpu()).detach())

    def test_devices_do_not_mix(self, device: torch.device) -> None:
        l_in = torch.randn(10, device=device)
        linear = torch.nn.Linear(10, 20)
        with pytest.raises(RuntimeError) as raised:
            linear(l_in)
        first, got, advice = str(raised.value).splitlines()
        assert first.startswith("Input tensor is not a lazy tensor: torch.FloatTensor")
        assert "test_documents.py" in first and "test_devices_do_not_mix" in first
        assert got.startswith("  got: [20") and "cpu" in got and str(device) in got
        assert advice.startswith("  Next: move it first") and ".to(" in advice
        # The other way round, and with another dtype.
        with pytest.raises(RuntimeError, match=r"not a lazy tensor: torch\.FloatTensor"):
            torch.nn.Linear(10, 20).to(device)(torch.randn(10))
        with pytest.raises(RuntimeError, match=r"not a lazy tensor: torch\.LongTensor"):
            torch.zeros(3, device=device) + torch.arange(3)
        # And nothing is broken by it.
        assert torch.nn.Linear(10, 20).to(device)(l_in).shape == (20,)

    def test_the_advice_can_be_followed(self, device: torch.device) -> None:
        """Also while the error is kept, as a notebook does: its traceback holds the operands."""
        l_in, linear = torch.randn(10, device=device), torch.nn.Linear(10, 20)
        with pytest.raises(RuntimeError, match="not a lazy tensor") as kept:
            linear(l_in)
        assert linear.to(device)(l_in).shape == (20,)
        assert kept.value is not None

    def test_a_number_from_the_cpu_is_no_mixing(self, device: torch.device) -> None:
        assert (torch.ones(2, device=device) * torch.tensor(3.0)).tolist() == [3.0, 3.0]


class TestRunningOnASingleDevice:
    def test_the_loop_trains(self, device: torch.device) -> None:
        lr, momentum = 0.05, 0.9
        train_loader = DataLoader(digits(128), batch_size=16)
        torch.manual_seed(0)
        model = CNN().train().to(device)
        loss_fn = nn.NLLLoss()
        optimizer = torch.optim.SGD(model.parameters(), lr=lr, momentum=momentum)
        losses = []
        with Counting() as counted:
            for _epoch in range(3):
                for data, target in train_loader:
                    optimizer.zero_grad()
                    data = data.to(device)
                    target = target.to(device)
                    output = model(data)
                    loss = loss_fn(output, target)
                    loss.backward()
                    optimizer.step()
                    ltm.mark_step()
                    losses.append(loss)
        assert counted.syncs == {"MarkStep": 24} and not counted.fallbacks
        assert counted.compiles == 2
        values = [loss.item() for loss in losses]
        assert values[0] > 1.5 and sum(values[-4:]) / 4 < 0.5

    def test_only_two_lines_differ_from_the_cpu(self, device: torch.device) -> None:
        """The same loop on both devices gives the same model."""
        trained = []
        for on in ("cpu", device):
            torch.manual_seed(0)
            model = CNN(channels=4).train().to(on)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
            torch.manual_seed(1)
            # A loader draws a seed from the CPU's generator if it is given none.
            for data, target in DataLoader(digits(32), batch_size=8, generator=torch.Generator()):
                optimizer.zero_grad()
                nn.NLLLoss()(model(data.to(on)), target.to(on)).backward()
                optimizer.step()
                if on != "cpu":
                    ltm.mark_step()
            trained.append({k: v.cpu() for k, v in model.state_dict().items()})
        torch.testing.assert_close(trained[1], trained[0])

    def test_evaluation_needs_no_mark_step(self, device: torch.device) -> None:
        model = CNN().to(device).eval()
        correct = 0
        with torch.no_grad():
            for data, target in DataLoader(digits(32), batch_size=8):
                predicted = model(data.to(device)).argmax(dim=1)
                correct += predicted.eq(target.to(device)).sum().item()
        assert 0 <= correct <= 32


class TestLazyEvaluation:
    def test_ops_are_recorded_until_a_value_is_needed(self, device: torch.device) -> None:
        ltm.mark_step(wait=True)
        with Counting() as recording:
            t = torch.ones(3, device=device)
            for _ in range(10):
                t = t * 2
            assert t.shape == (3,) and t.dtype == torch.float32  # known without running
        assert recording.syncs == {} and recording.compiles == 0
        with Counting() as reading:
            assert t.tolist() == [1024.0] * 3
        assert sum(reading.syncs.values()) == 1 and reading.ops == {"ones": 1, "mul": 10}

    def test_copying_to_the_cpu_and_back_synchronises_by_itself(self, device: torch.device) -> None:
        t = torch.arange(4.0, device=device)
        for _ in range(3):
            t = (t + 1).cpu().to(device)
        assert t.cpu().tolist() == [3.0, 4.0, 5.0, 6.0]

    def test_the_pending_graph_can_be_seen(self, device: torch.device) -> None:
        ltm.mark_step()
        t = torch.ones(3, device=device).exp()
        text = ltm.dump_ir([t])
        assert "aten.exp" in text and "aten.ones" in text and "float32[3]" in text


USE_BF16 = """
import torch, ltc_core as ltc
d = ltc.lazy_device()
t = torch.full((1,), 1.0, device=d)
for dtype in (torch.float32, torch.float64):
    x = t.to(dtype) + 1 / 256      # bfloat16 has 8 bits: 1 + 1/256 is 1
    assert x.dtype == dtype and x.cpu().dtype == dtype, (x.dtype, x.cpu().dtype)
    print((x - 1).item())
uploaded = torch.tensor([1 + 1 / 256]).to(d)
assert uploaded.cpu().dtype == torch.float32
print(uploaded.item() - 1)
model = torch.nn.Linear(3, 1).to(d)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
losses = []
for _ in range(5):
    loss = (model(torch.ones(4, 3, device=d)) - 2).square().mean()
    optimizer.zero_grad(); loss.backward(); optimizer.step(); ltc.mark_step()
    losses.append(loss.item())
assert losses[-1] < losses[0] / 4, losses
assert model.weight.dtype == torch.float32
assert torch.ones(1, dtype=torch.bfloat16, device=d).cpu().dtype == torch.bfloat16
"""
DOWNCAST_BF16 = """
import torch, ltc_core as ltc
d = ltc.lazy_device()
for dtype in (torch.float32, torch.float64):
    x = torch.full((1,), 1.0, device=d, dtype=dtype) + 1 / 256 + 2**-40
    assert x.dtype == dtype and x.cpu().dtype == dtype
    print((x - 1).item())
"""
SINGLE = 1 / 256


class TestLazyTensorsAndBfloat16:
    """What a tensor is stored and computed as; it reports its PyTorch dtype in any case."""

    def run(self, code: str, **env: str) -> list[float]:
        child = prepared.run(
            [sys.executable, "-W", "error", "-c", code],
            cwd=ROOT,
            env={"PATH": "/usr/bin:/bin", "PYTHONPATH": str(ROOT), "HOME": str(Path.home()), **env},
            capture_output=True,
            text=True,
        )
        assert child.returncode == 0, child.stderr
        return [float(line) for line in child.stdout.splitlines()]

    def test_by_default_dtypes_are_what_they_say(self) -> None:
        single, double = self.run(DOWNCAST_BF16)
        assert single == SINGLE and SINGLE < double < SINGLE + 2**-39

    @pytest.mark.parametrize("name", ["LTC_USE_BF16", "XLA_USE_BF16"])
    def test_use_bf16_makes_both_bfloat16(self, name: str) -> None:
        assert self.run(USE_BF16, **{name: "1"}) == [0.0, 0.0, 0.0]

    @pytest.mark.parametrize("name", ["LTC_DOWNCAST_BF16", "XLA_DOWNCAST_BF16"])
    def test_downcast_bf16_makes_float_bfloat16_and_double_float(self, name: str) -> None:
        assert self.run(DOWNCAST_BF16, **{name: "1"}) == [0.0, SINGLE]

    def test_bfloat16_is_bfloat16(self, device: torch.device) -> None:
        t = torch.ones(1, dtype=torch.bfloat16, device=device) + 1 / 256
        assert t.dtype == torch.bfloat16 and t.cpu().dtype == torch.bfloat16
        assert t.item() == 1.0


class TestMemoryLayout:
    def test_tensors_always_appear_contiguous(self, device: torch.device) -> None:
        t = torch.arange(24.0, device=device).view(2, 3, 4)
        for view in (
            t.permute(2, 0, 1),
            t.transpose(0, 1),
            t[:, ::2],
            t[..., 1],
            t.expand(5, 2, 3, 4),
        ):
            packed = torch.empty(view.shape)
            assert view.is_contiguous() and view.stride() == packed.stride()
            assert view.as_strided(view.size(), view.stride()).tolist() == view.tolist()
            assert view.storage_offset() == (view.data_ptr() - t.data_ptr()) // t.itemsize
        assert torch.ones(2, 3, device=device).t_().is_contiguous()
        assert torch.arange(6, device=device).view(2, 3).t().view(-1).tolist() == [0, 3, 1, 4, 2, 5]

    def test_the_storage_is_not_exposed(self, device: torch.device) -> None:
        """An address tells who shares memory, as some libraries ask; there is nothing behind it."""
        t = torch.ones(3, device=device)
        assert t.data_ptr() == t.view(3, 1).data_ptr() != (t + 0).data_ptr()
        assert t.data_ptr() == t.untyped_storage().data_ptr()
        first, second = torch.zeros(9, device=device), torch.zeros(9, device=device)
        of_first, of_second = ({row.data_ptr() for row in x} for x in (first, second))
        assert len(of_first | of_second) == 18
        assert not isinstance(t.untyped_storage(), torch.UntypedStorage)
        with pytest.raises(NotImplementedError, match="have no storage"):
            torch.ones(1, device=device).set_(torch.ones(3).untyped_storage())


class TestMovingToAndFromTheCpu:
    def test_a_moved_view_is_a_copy(self, device: torch.device) -> None:
        whole = torch.zeros(2, 3, device=device)
        row = whole[0]
        moved_row, moved_whole = row.cpu(), whole.cpu()
        moved_row += 1
        assert moved_whole.sum() == 0 and whole.sum().item() == 0
        row += 5
        assert whole.tolist() == [[5.0] * 3, [0.0] * 3]  # on the device it still is a view
        assert moved_row.tolist() == [1.0] * 3

    def test_there_and_back_has_no_relation(self, device: torch.device) -> None:
        host = torch.zeros(4)
        there = host.to(device)
        host += 1
        assert there.tolist() == [0.0] * 4
        again = there.cpu().to(device)
        again += 2
        assert there.tolist() == [0.0] * 4
        part, whole = host[:2].to(device), host.to(device)
        part.zero_()
        assert whole.tolist() == [1.0] * 4

    def test_moving_to_where_it_is_gives_the_tensor_itself(self, device: torch.device) -> None:
        t = torch.zeros(1, device=device)
        assert t.to(device) is t and t.to(device.type) is t
        assert t.to(device, copy=True) is not t


class TestSavingAndLoading:
    def test_cpu_copies(self, device: torch.device, tmp_path: Path) -> None:
        t0 = torch.randn(2, 2, device=device)
        t1 = torch.randn(2, 2, device=device)
        tensors = (t0.cpu(), t1.cpu())
        torch.save(tensors, tmp_path / "tensors.pt")
        loaded = torch.load(tmp_path / "tensors.pt")
        assert [t.device.type for t in loaded] == ["cpu", "cpu"]
        back0, back1 = loaded[0].to(device), loaded[1].to(device)
        assert back0.equal(t0) and back1.equal(t1)

    def test_save_moves_to_the_cpu_first(self, device: torch.device, tmp_path: Path) -> None:
        model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4)).to(device)
        plain.save(model.state_dict(), tmp_path / "model.pt")
        state = torch.load(tmp_path / "model.pt")
        assert {t.device.type for t in state.values()} == {"cpu"}
        assert state.keys() == model.state_dict().keys()
        again = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
        again.load_state_dict(state)
        assert again[0].weight.equal(model[0].weight.cpu())

    def test_save_is_one_of_the_verbs(self) -> None:
        assert ltc_core.save is plain.save

    def test_streaming(self, device: torch.device, tmp_path: Path) -> None:
        model = nn.Linear(3, 4).to(device)
        xser.save(model.state_dict(), tmp_path / "model")
        other = nn.Linear(3, 4).to(device)
        other.load_state_dict(xser.load(tmp_path / "model"))
        assert other.weight.equal(model.weight) and other.weight.device == device

    def test_saved_directly_it_comes_back_to_its_device(
        self, device: torch.device, tmp_path: Path
    ) -> None:
        t = torch.randn(2, 2, device=device)
        torch.save((t, t + 1), tmp_path / "tensors.pt")
        first, second = torch.load(tmp_path / "tensors.pt")
        assert first.device == second.device == device
        assert first.equal(t) and second.equal(t + 1)
