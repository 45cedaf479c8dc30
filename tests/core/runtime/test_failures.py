"""Wrong calls, and what fails in the background.

A wrong call raises where it is made, with eager's exception type and our four parts. What fails
while it runs surfaces at the next sync, with the user's line, and nothing is lost that the op did
not write.
"""

import contextlib
import inspect
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import ltc_core as ltc
from ltc_core.errors import LtcError
from tests.core.beside_eager import assert_same, beside_eager
from tests.core.counting import Counting


@pytest.fixture
def device() -> torch.device:
    return ltc.lazy_device()


WRONG: dict[str, Callable[[torch.device], Any]] = {
    "shapes": lambda d: torch.ones(2, 3, device=d) + torch.ones(4, device=d),
    "matmul": lambda d: torch.ones(2, 3, device=d) @ torch.ones(2, 3, device=d),
    "mm_of_a_vector": lambda d: torch.ones(2, 3, device=d).mm(torch.ones(3, device=d)),
    "view": lambda d: torch.ones(2, 3, device=d).view(4),
    "cat": lambda d: torch.cat([torch.ones(2, 3, device=d), torch.ones(2, 2, device=d)]),
    "stack": lambda d: torch.stack([torch.ones(2, device=d), torch.ones(3, device=d)]),
    "dim": lambda d: torch.ones(2, device=d).sum(3),
    "index": lambda d: torch.ones(2, device=d)[5],
    "too_many_indices": lambda d: torch.ones(2, device=d)[0, 0],
    "select": lambda d: torch.ones(2, 2, device=d).select(1, 4),
    "integer_mean": lambda d: torch.arange(3, device=d).mean(),
    "dtypes_of_mm": lambda d: torch.ones(2, 2, device=d).mm(torch.ones(2, 2, device=d).long()),
    "in_place_dtype": lambda d: torch.arange(3, device=d).add_(0.5),
    "in_place_shape": lambda d: torch.ones(2, device=d).add_(torch.ones(3, 2, device=d)),
    "bool_minus": lambda d: torch.ones(2, device=d, dtype=torch.bool) - True,
    "index_put_dtype": lambda d: torch.arange(3, device=d).__setitem__(
        [0], torch.ones(1, device=d)
    ),
    "index_put_shape": lambda d: torch.ones(3, device=d).__setitem__(
        [0, 1], torch.ones(3, device=d)
    ),
    "index_float": lambda d: torch.ones(3, device=d)[torch.ones(1, device=d)],
    "embedding": lambda d: F.embedding(torch.ones(2, device=d), torch.ones(4, 2, device=d)),
    "conv_channels": lambda d: F.conv2d(
        torch.ones(1, 2, 5, 5, device=d), torch.ones(3, 4, 3, 3, device=d)
    ),
    "conv_kernel": lambda d: F.conv2d(
        torch.ones(1, 1, 2, 2, device=d), torch.ones(1, 1, 3, 3, device=d)
    ),
    "linear": lambda d: nn.Linear(3, 2).to(d)(torch.ones(4, 5, device=d)),
    "cross_entropy": lambda d: F.cross_entropy(
        torch.ones(2, 3, device=d), torch.ones(5, device=d).long()
    ),
    "batch_norm": lambda d: nn.BatchNorm1d(3).to(d)(torch.ones(2, 4, device=d)),
    "empty_max": lambda d: torch.ones(0, device=d).max(),
    "expand": lambda d: torch.ones(2, device=d).expand(3),
    "gather_dtype": lambda d: torch.ones(3, device=d).gather(0, torch.zeros(1, device=d)),
    "scatter_dims": lambda d: torch.ones(3, device=d).scatter(
        0, torch.zeros(1, 1, device=d).long(), 1.0
    ),
    "copy": lambda d: torch.ones(3, device=d).copy_(torch.ones(2, device=d)),
    "item": lambda d: torch.ones(3, device=d).item(),
    "complex_order": lambda d: torch.ones(2, device=d, dtype=torch.complex64) > 0,
    "randint": lambda d: torch.randint(5, 2, (3,), device=d),
    "negative_size": lambda d: torch.zeros(-1, device=d),
    "out_dtype": lambda d: torch.add(
        torch.ones(1, device=d), 1, out=torch.zeros(1, device=d, dtype=torch.int64)
    ),
}


# Wrong because of their values, which nobody knows at the call.
WRONG_VALUES: dict[str, Callable[[torch.device], Any]] = {
    "cholesky": lambda d: torch.linalg.cholesky(-torch.eye(3, device=d)),
    "inverse": lambda d: torch.linalg.inv(torch.zeros(2, 2, device=d)),
    "multinomial": lambda d: torch.multinomial(torch.tensor([-1.0, 2.0], device=d), 1),
    "gather": lambda d: torch.ones(3, device=d).gather(0, torch.tensor([5], device=d)),
    "index": lambda d: torch.ones(3, device=d)[torch.tensor([5], device=d)],
    "class": lambda d: F.cross_entropy(torch.ones(1, 3, device=d), torch.tensor([7], device=d)),
    "integer_division": lambda d: torch.ones(2, device=d).long() // torch.zeros(2, device=d).long(),
}


class TestWrongCalls:
    @pytest.mark.parametrize("name", WRONG)
    def test_raised_at_the_call_as_eager_does(self, name: str, device: torch.device) -> None:
        with pytest.raises(Exception) as expected:
            WRONG[name](torch.device("cpu"))
        builtin = type(expected.value)
        with pytest.raises(builtin) as raised:
            WRONG[name](device)
        error = raised.value
        if isinstance(error, LtcError):
            first, *rest = str(error).split("\n")
            line = inspect.getsourcelines(WRONG[name])[1]
            assert f"test_failures.py:{line}" in first, "the user's line"
            assert any(r.startswith("  got: ") for r in rest), str(error)
            assert any(r.startswith("  Next: ") for r in rest), str(error)
        # Whatever else is said, it says what eager says.
        assert str(expected.value).split("\n")[0][:30] in str(error)
        assert (torch.ones(2, device=device) + 1).tolist() == [2.0, 2.0]

    @pytest.mark.parametrize("name", WRONG_VALUES)
    def test_wrong_values_raise_at_the_sync(self, name: str, device: torch.device) -> None:
        with pytest.raises(Exception) as expected:
            WRONG_VALUES[name](torch.device("cpu"))
        with pytest.raises(type(expected.value)) as raised:
            print(WRONG_VALUES[name](device))
        assert str(expected.value).split("\n")[0][:30] in str(raised.value)
        assert "test_failures.py" in str(raised.value) and "  Next: " in str(raised.value)
        ltc.wait_device_ops()

    def test_the_trace_is_as_it_was(self, device: torch.device) -> None:
        """A refused call leaves nothing in the graph, and what was recorded before it stays."""
        x = torch.ones(3, device=device)
        ltc.mark_step()
        with Counting() as counted:
            y = x * 2
            for _ in range(3):
                with pytest.raises(RuntimeError):
                    y + torch.ones(4, device=device)
                with pytest.raises(RuntimeError):
                    x.add_(torch.ones(2, 2, device=device))
            z = y + 1
            ltc.mark_step()
        assert z.tolist() == [3.0] * 3 and x.tolist() == [1.0] * 3
        assert counted.ops.get("add", 0) == 1 and "add_" not in counted.ops

    def test_a_module_error_names_the_users_line(self, device: torch.device) -> None:
        class Model(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.fc = nn.Linear(3, 2)

            def forward(self, x: Tensor) -> Tensor:
                return self.fc(x)  # this line

        model = Model().to(device)
        with pytest.raises(RuntimeError) as raised:
            model(torch.ones(4, 5, device=device))
        source, start = inspect.getsourcelines(Model)
        line = start + next(i for i, text in enumerate(source) if "this line" in text)
        assert f"test_failures.py:{line} in forward" in str(raised.value)


class TestBackgroundFailures:
    """An index that is out of range is found when the op runs, not when it is recorded."""

    @pytest.fixture(autouse=True)
    def nothing_is_left(self) -> Iterator[None]:
        yield
        ltc.wait_device_ops()

    def bad_lookup(self, table: Tensor) -> Tensor:
        return F.embedding(torch.tensor([1, 99], device=table.device), table)

    @pytest.mark.parametrize("sync", ["mark_step", "wait", "item", "print", "cpu", "exception"])
    def test_it_surfaces_at_the_next_sync(self, sync: str, device: torch.device) -> None:
        table = torch.ones(4, 2, device=device)
        out = self.bad_lookup(table)
        calls: dict[str, Callable[[], Any]] = {
            "mark_step": lambda: ltc.mark_step(wait=True),
            "wait": ltc.wait_device_ops,
            "item": lambda: out.sum().item(),
            "print": lambda: str(out),
            "cpu": lambda: out.cpu(),
            "exception": lambda: bool(out[0, 0] > 0),
        }
        with pytest.raises(IndexError, match="index out of range") as raised:
            calls[sync]()
        text = str(raised.value)
        line = inspect.getsourcelines(self.bad_lookup)[1] + 1
        assert f"test_failures.py:{line} in bad_lookup" in text
        assert "aten.embedding" in text and "  got: " in text and "  Next: " in text
        assert isinstance(raised.value, LtcError)
        # Told once; then all goes on.
        ltc.wait_device_ops()
        assert (table + 1).sum().item() == 16

    def test_what_depends_on_it_cannot_be_read(self, device: torch.device) -> None:
        table = torch.ones(4, 2, device=device)
        lost, fine = self.bad_lookup(table) + 1, table * 3
        with pytest.raises(IndexError):
            ltc.mark_step(wait=True)
        for _ in range(2):
            with pytest.raises(IndexError, match="bad_lookup"):
                lost.tolist()
        with pytest.raises(IndexError, match="bad_lookup"):
            (lost * 2).tolist()
        assert table.tolist() == [[1.0, 1.0]] * 4
        del lost
        fine = table * 3
        assert fine.sum().item() == 24

    def test_parameters_are_intact_and_training_goes_on(self) -> None:
        """A step with a bad batch is lost as a whole; the others go on as if it had not been."""

        def program(device: torch.device) -> Any:
            torch.manual_seed(0)
            model = nn.Sequential(nn.Embedding(5, 3), nn.Linear(3, 2)).to(device)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
            for batch in ([0, 1], [2, 99], [3, 4], [4, 0]):
                try:
                    loss = model(torch.tensor(batch, device=device)).square().mean()
                    optimizer.zero_grad()
                    loss.backward()
                    optimizer.step()
                    if device.type != "cpu":
                        ltc.mark_step(wait=True)
                except IndexError:
                    assert batch == [2, 99]
                    optimizer.zero_grad()
            return model.state_dict()

        beside_eager(program, rtol=1e-5, atol=1e-7)

    def test_an_optimizer_that_counts_its_steps_goes_on_too(self, device: torch.device) -> None:
        model = nn.Embedding(5, 3).to(device)
        optimizer = torch.optim.Adam(model.parameters(), lr=0.1)

        def step(index: int) -> None:
            optimizer.zero_grad()
            model(torch.tensor([index], device=device)).square().sum().backward()
            optimizer.step()
            ltc.mark_step(wait=True)

        step(0)
        before = ltc.to_cpu((model.state_dict(), optimizer.state_dict()["state"][0]["exp_avg"]))
        with pytest.raises(IndexError):
            step(99)
        after = ltc.to_cpu((model.state_dict(), optimizer.state_dict()["state"][0]["exp_avg"]))
        assert_same(after, before)
        step(1)
        assert not model.weight[1].equal(before[0]["weight"][1].to(device))
        assert model.weight.isfinite().all()

    def test_the_steps_after_it_that_were_recorded_already(self, device: torch.device) -> None:
        """Nobody waits: the error comes a few steps later, and then training goes on."""
        table = nn.Embedding(4, 2).to(device)
        optimizer = torch.optim.SGD(table.parameters(), lr=0.1)
        before = table.weight.detach().cpu()
        raised = 0
        for step in range(8):
            index = 99 if step == 2 else step % 4
            try:
                optimizer.zero_grad()
                table(torch.tensor([index], device=device)).sum().backward()
                optimizer.step()
                ltc.mark_step()
            except IndexError as error:
                assert "test_failures.py" in str(error)
                raised += 1
        try:
            ltc.wait_device_ops()
        except IndexError:
            raised += 1
        assert raised >= 1
        after = table.weight.detach().cpu()
        assert after.isfinite().all() and (after <= before).all() and (after < before).any()

    def test_several_failures_are_told_of_once(self, device: torch.device) -> None:
        table = torch.ones(4, 2, device=device)
        kept = []
        for _ in range(3):
            kept.append(self.bad_lookup(table))
            with contextlib.suppress(IndexError):
                ltc.mark_step()
        with contextlib.suppress(IndexError):
            ltc.wait_device_ops()
        ltc.wait_device_ops()
        for lost in kept:
            with pytest.raises(IndexError, match="bad_lookup"):
                lost.cpu()

    def test_a_custom_op_that_raises(self, device: torch.device) -> None:
        calls: list[int] = []

        @torch.library.custom_op("ltc_tests::moody", mutates_args=())
        def moody(x: Tensor, limit: int) -> Tensor:
            calls.append(limit)
            if x.sum() > limit:
                raise KeyError("too much")
            return x * 2

        @moody.register_fake
        def _(x: Tensor, limit: int) -> Tensor:
            return torch.empty_like(x)

        x = torch.ones(4, device=device)
        assert moody(x, 10).tolist() == [2.0] * 4
        out = moody(x, 1)
        with pytest.raises(KeyError, match="too much") as raised:
            ltc.wait_device_ops()
        assert "moody" in str(raised.value) and "test_failures.py" in str(raised.value)
        with pytest.raises(KeyError):
            out.tolist()
        assert moody(x, 10).sum().item() == 8 and calls == [10, 1, 10]

    def test_an_error_nobody_reads_does_not_stay_for_ever(self, device: torch.device) -> None:
        """It is told at the next mark_step that finds it; then never again."""
        table = torch.ones(4, 2, device=device)
        self.bad_lookup(table).sum()
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            ltc.mark_step()  # nothing that is alive needs the lookup: it is not run at all
        ltc.wait_device_ops()
        assert_same(table, torch.ones(4, 2))
