"""Ops that run on real values: counted, with eager's answer, by what LTC_FALLBACK and LTC_FORCE_FALLBACK say."""

import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

import ltc_core as ltc
from ltc_core import metrics
from ltc_core.errors import LtcError, UnsupportedOpError
from ltc_core.ops import fallback
from ltc_core.settings import settings
from tests.core import child
from tests.core.beside_eager import beside_eager
from tests.core.counting import Counting
from tests.core.custom_ops import kept, no_meta, scale_


@pytest.fixture
def device() -> torch.device:
    ltc.mark_step()
    return ltc.lazy_device()


@pytest.fixture
def nobody_warned(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(fallback, "_warned", set())
    yield


class TestCounting:
    def test_a_call_is_counted_by_name_and_cuts_with_its_reason(self, device: torch.device) -> None:
        x = torch.ones(3, device=device) * 2
        with Counting() as counted:
            y = no_meta(x, 3.0)
        assert y.tolist() == [6.0] * 3
        assert counted.syncs == {"no_meta": 1} and counted.ops == {"ones": 1, "mul": 1}
        assert metrics.counter_value("ltc_probe::no_meta")
        with Counting() as again:
            no_meta(y, 3.0)
        assert not again.syncs  # what it needs is there

    def test_shapes_that_depend_on_values(self, device: torch.device) -> None:
        x = torch.tensor([3, 0, 1, 0], device=device)
        given = torch.tensor([3.0, 0.0, 1.0, 0.0], device=device)

        # Of integers alone it might be computed without a cut (`runtime.probe`).
        def made() -> Tensor:
            return (given + 0).long()

        calls: list[tuple[str, Callable[[], Any]]] = [
            ("nonzero", lambda: made().nonzero()),
            ("nonzero", lambda: x[made() > 0]),
            ("masked_select", lambda: torch.masked_select(made(), x > 0)),
            ("_unique2", lambda: torch.unique(made())),
            ("repeat_interleave", lambda: torch.repeat_interleave(made())),
            ("bincount", lambda: torch.bincount(made())),
        ]
        for name, call in calls:
            with Counting() as counted:
                call()
            assert counted.fallbacks == {name: 1} and counted.syncs == {name: 1}, name

    def test_reading_a_number_is_a_read_not_a_fallback(self, device: torch.device) -> None:
        with Counting() as counted:
            assert (torch.ones(3, device=device).sum() > 2).item() is True
            assert torch.ones(2, device=device).equal(torch.ones(2, device=device))
        assert counted.syncs == {"Item": 1, "equal": 1}
        assert counted.fallbacks == {"_local_scalar_dense": 1, "equal": 1}

    def test_they_are_named_in_the_report(self, device: torch.device) -> None:
        torch.ones(2, device=device).nonzero()
        assert "aten::nonzero" in metrics.executed_fallback_ops()
        assert "Counter: aten::nonzero" in ltc.metrics.metrics_report()


class TestTheSetting:
    def test_allow_says_nothing(self, device: torch.device) -> None:
        assert settings.fallback == "allow"
        no_meta(torch.ones(1, device=device), 2.0)  # a warning would be an error here

    @pytest.mark.usefixtures("nobody_warned")
    def test_warn_says_so_once_an_op(self, device: torch.device) -> None:
        x = torch.ones(1, device=device)
        with (
            settings.override(fallback="warn"),
            warnings.catch_warnings(record=True) as caught,
        ):
            warnings.simplefilter("always")
            for _ in range(3):
                no_meta(x, 2.0)
                scale_(x, 2.0)
        texts = [str(w.message) for w in caught]
        assert len(texts) == 2 and "ltc_probe::no_meta" in texts[0] and "scale_" in texts[1]
        assert "custom_ops.py:" in texts[0] and "Next: " in texts[0]
        assert f"device {settings.device_name}" in texts[0]
        assert x.tolist() == [8.0]

    def test_error_raises_with_the_four_parts_and_does_nothing(self, device: torch.device) -> None:
        x = torch.ones(1, device=device)
        with settings.override(fallback="error"):
            with pytest.raises(
                NotImplementedError, match="ltc_probe::scale_ has no rule"
            ) as raised:
                scale_(x, 2.0)
            assert isinstance(raised.value, UnsupportedOpError)
            text = str(raised.value)
            assert "custom_ops.py:" in text and "in scale_" in text.splitlines()[0]
            assert "  got: ltc_probe::scale_(Tensor(a!) x" in text
            assert "  Next: LTC_FALLBACK=warn" in text
            assert x.tolist() == [1.0]
            (x + 1).tolist()  # and the device works
        scale_(x, 2.0)
        assert x.tolist() == [2.0]

    def test_error_is_not_for_what_needs_values_by_its_nature(self, device: torch.device) -> None:
        x = torch.tensor([1.0, 0.0], device=device)
        with settings.override(fallback="error"):
            assert x.nonzero().tolist() == [[0]] and x[x > 0].tolist() == [1.0]
            assert x.sum().item() == 1.0 and bool(x[0]) and x.unique().tolist() == [0.0, 1.0]
            assert torch.linalg.inv(torch.eye(2, device=device)).tolist() == [[1, 0], [0, 1]]

    def test_a_wrong_call_is_told_as_such(self, device: torch.device) -> None:
        with settings.override(fallback="error"), pytest.raises(RuntimeError) as raised:
            torch.ones(2, 3, device=device) @ torch.ones(2, 3, device=device)
        assert "cannot be multiplied" in str(raised.value)

    def test_the_words_are_checked(self) -> None:
        with pytest.raises(ValueError, match="error, warn, allow"):
            settings.fallback = "never"


class TestWrites:
    def test_an_op_that_writes_its_operand(self) -> None:
        def program(device: torch.device) -> Any:
            x = torch.arange(6.0, device=device).view(2, 3)
            row, column = x[1], x[:, 2]
            sums = [scale_(x, 2.0), scale_(column, 10.0), scale_(x.t()[0], 3.0)]
            return x, row, column, sums

        beside_eager(program)

    def test_one_memory_written_twice(self, device: torch.device) -> None:
        x = torch.ones(4, device=device)
        alias = x.detach()
        scale_(x, 2.0)
        scale_(alias, 2.0)
        assert x.tolist() == alias.tolist() == [4.0] * 4

    def test_a_result_that_is_the_operand_is_a_copy(self, device: torch.device) -> None:
        """Memory on the device must not change through an alias nobody knows of."""
        x = torch.ones(2, device=device)
        y = kept(x)
        x.add_(1)
        ltc.mark_step(wait=True)
        assert y.tolist() == [1.0] * 2 and x.tolist() == [2.0] * 2

    def test_out_is_written_and_resized(self) -> None:
        def program(device: torch.device) -> Any:
            x = torch.tensor([0, 2, 3], device=device)
            empty = torch.empty(0, dtype=torch.int64, device=device)
            found = torch.nonzero(x, out=empty)
            values = torch.empty(2, dtype=torch.int64, device=device)
            torch.masked_select(x, x > 0, out=values)
            memory = torch.zeros(4, dtype=torch.int64, device=device)
            torch.masked_select(x, x > 0, out=memory[1:3])
            return found is empty, found, values, memory

        beside_eager(program)

    def test_an_alias_of_a_resized_out_keeps_what_it_had(self) -> None:
        def program(device: torch.device) -> Any:
            out = torch.empty(0, 1, dtype=torch.int64, device=device)
            alias = out.detach()
            torch.nonzero(torch.tensor([1, 0, 2], device=device), out=out)
            return out, alias, alias + 1, (alias.shape, out.shape)

        beside_eager(program)

    def test_a_resized_out_of_an_unwritten_tensor_warns_as_eager_does(
        self, device: torch.device
    ) -> None:
        out = torch.zeros(5, device=device)
        with pytest.warns(UserWarning, match="was resized"):
            torch.add(torch.ones(2, device=device), 1, out=out)
        assert out.tolist() == [2.0, 2.0]


class TestRandomOps:
    def test_the_state_goes_on_from_where_the_op_left_it(self) -> None:
        """`binomial` has no rule; what is drawn after it depends on what it drew."""

        def program(device: torch.device) -> Any:
            torch.manual_seed(4)
            before = torch.rand(2, device=device)
            count, chance = (
                torch.full((5,), 9.0, device=device),
                torch.full((5,), 0.3, device=device),
            )
            drawn = [torch.binomial(count, chance) for _ in range(2)]
            generator = torch.Generator(device).manual_seed(5)
            other = torch.binomial(count, chance, generator=generator)
            return before, drawn, other, torch.rand(2, device=device)

        beside_eager(program)

    def test_a_wrong_call_draws_nothing(self, device: torch.device) -> None:
        torch.manual_seed(4)
        state = ltc.get_rng_state().cpu()
        with pytest.raises(LtcError):
            torch.multinomial(torch.ones(2, 2, 2, device=device), 1)
        assert ltc.get_rng_state().cpu().equal(state)


class TestResults:
    def test_structure_is_kept(self) -> None:
        def program(device: torch.device) -> Any:
            x = torch.tensor([[3.0, 1.0], [2.0, 1.0]], device=device)
            pieces = torch.unique(x, return_inverse=True, return_counts=True)
            hist = torch.histogram(x.flatten(), bins=2)
            return pieces, tuple(hist), hist.bin_edges

        beside_eager(program)

    def test_a_layout_the_device_cannot_hold(self, device: torch.device) -> None:
        with pytest.raises(NotImplementedError, match="sparse_coo.*cannot hold") as raised:
            torch.eye(2, device=device).to_sparse()
        assert "test_fallback.py" in str(raised.value) and "  Next: " in str(raised.value)
        for made in (
            lambda: torch.nested.nested_tensor(
                [torch.ones(2, 3)], layout=torch.jagged, device=device
            ),
            lambda: torch.nested.as_nested_tensor(
                [torch.ones(2, 3, device=device)], layout=torch.jagged
            ),
        ):
            with pytest.raises(
                NotImplementedError, match=r"takes a nested.*cannot hold[\s\S]*pad_sequence"
            ):
                made()

    def test_autograd_goes_through(self) -> None:
        def program(device: torch.device) -> Any:
            x = torch.tensor([1.0, -2.0, 3.0], device=device, requires_grad=True)
            (x[x > 0] ** 2).sum().backward()
            y = torch.tensor([1.0, 2.0], device=device, requires_grad=True)
            torch.repeat_interleave(y, torch.tensor([1, 3], device=device)).sum().backward()
            return x.grad, y.grad

        beside_eager(program)


class TestErrors:
    WRONG: dict[str, Callable[[torch.device], Tensor]] = {
        "shapes": lambda d: torch.ones(2, 3, device=d) + torch.ones(4, device=d),
        "dim": lambda d: torch.ones(2, device=d).sum(3),
        "dtype": lambda d: torch.ones(2, device=d).bitwise_and(torch.ones(2, device=d)),
        "singular": lambda d: torch.linalg.inv(torch.zeros(2, 2, device=d)),
        "not positive": lambda d: torch.linalg.cholesky(-torch.eye(2, device=d)),
        "negative count": lambda d: torch.bincount(torch.tensor([-1], device=d)),
    }

    @pytest.mark.parametrize("name", WRONG)
    def test_it_is_eagers_and_ours(self, name: str, device: torch.device) -> None:
        call = self.WRONG[name]
        with pytest.raises(Exception) as eager:
            call(torch.device("cpu"))
        with pytest.raises(LtcError) as raised:
            call(device)
        assert isinstance(raised.value, type(eager.value))
        text = str(raised.value)
        assert str(eager.value) in text
        assert f"test_fallback.py:{call.__code__.co_firstlineno}" in text
        of_values = isinstance(raised.value, torch.linalg.LinAlgError)
        assert ("  got: " in text) is not of_values
        assert ("the matrix's values" if of_values else "eager PyTorch") in text.split("  Next: ")[
            1
        ]

    def test_no_kernel_on_the_cpu_either(self, device: torch.device) -> None:
        with pytest.raises(NotImplementedError) as raised:
            torch.ops.aten._cudnn_init_dropout_state(0.5, True, 1, dtype=torch.uint8, device=device)
        assert isinstance(raised.value, LtcError)
        what, got, advice = str(raised.value).splitlines()  # without the list of the op's kernels
        assert "Could not run 'aten::_cudnn_init_dropout_state'" in what and "got: 0.5" in got
        assert (
            advice
            == "  Next: eager PyTorch cannot do this on the CPU either; write it with other ops"
        )

    def test_assertions_on_values_are_made(self, device: torch.device) -> None:
        torch._assert_async(torch.ones((), device=device))
        with pytest.raises(
            RuntimeError, match="Expected Tensor with single nonzero value|not zero"
        ):
            torch._assert_async(torch.zeros((), device=device))
            ltc.wait_device_ops()


def test_forced_ops_run_on_the_cpu_and_give_the_same() -> None:
    """Writes, views and random ops among them; a bare name is an op of ATen."""
    out, err = child.run(
        """
        from ltc_core import metrics
        import torch.nn.functional as F

        def program(device):
            torch.manual_seed(0)
            model = torch.nn.Sequential(torch.nn.Linear(6, 6), torch.nn.ReLU(), torch.nn.Linear(6, 2)).to(device)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
            torch.manual_seed(1)
            for _ in range(3):
                optimizer.zero_grad()
                x = F.dropout(torch.ones(4, 2, 3, device=device), 0.5).view(4, 6)
                x = x + x.new_zeros(6).normal_()
                model(x).square().mean().backward()
                optimizer.step()
                if device != "cpu":
                    ltc.mark_step()
            y = torch.arange(6.0, device=device)
            y.view(2, 3)[0].add_(1)
            return [p.detach().cpu() for p in model.parameters()] + [y.cpu()]

        torch.testing.assert_close(program(device), program("cpu"))
        print(*metrics.executed_fallback_ops())
        """,
        LTC_FORCE_FALLBACK="add_,aten::addmm, relu,bernoulli_,normal_,_foreach_add_,view",
        LTC_FALLBACK="error",
    )
    ran = out.split()
    assert {"aten::addmm", "aten::relu", "aten::bernoulli_", "aten::normal_"} <= set(ran)
    assert "aten::mul" not in ran and err == ""


def test_the_error_of_a_matrix_speaks_of_its_values() -> None:
    matrix = torch.ones(3, 3, device=ltc.lazy_device())
    with pytest.raises(torch.linalg.LinAlgError) as caught:
        torch.linalg.cholesky(matrix - 2)
    text = str(caught.value)
    assert (
        "not positive-definite" in text
        and "look at the matrix's values" in text
        and __file__.split("/")[-1] in text
    )
    assert "_linalg_check_errors" not in text and "int32" not in text
    assert torch.linalg.cholesky(matrix + torch.eye(3, device=ltc.lazy_device())).isfinite().all()


def test_sound_matrices_are_checked_without_python() -> None:
    """Solvers and factorizations look at the codes of their errors: a read of a few integers."""
    code = """
    import sys, torch, ltc_core

    def losses(device):
        w = torch.nn.Parameter((torch.arange(16.0).reshape(4, 4) / 16).to(device))
        optimizer, found = torch.optim.SGD([w], 0.1), []
        eye = torch.eye(4).to(device)
        for _ in range(40):
            solved = torch.linalg.solve(w @ w.T + eye, eye)
            low = torch.linalg.cholesky(torch.stack([solved @ solved.T + eye] * 2))
            loss = (torch.linalg.inv(low) ** 2).mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            found.append(loss.item())
        return found

    on_cpu, here = losses("cpu"), losses("ltc")
    print(max(abs(a - b) for a, b in zip(on_cpu, here)) < 1e-6)
    print(ltc_core.metrics.counter_value("aten::_linalg_check_errors"))
    seen = []
    sys.setprofile(lambda frame, *_: seen.append(frame.f_code.co_name))
    losses("ltc")
    sys.setprofile(None)
    print(seen.count("run_real"))
    try:
        torch.linalg.inv(torch.zeros(4, 4).to("ltc") * 2)
    except torch.linalg.LinAlgError as error:
        print("singular" in str(error))
    """
    out, err = child.run(code)
    same, checks, in_python, is_told = out.split()
    assert same == is_told == "True" and checks == "120" and int(in_python) < 30 and err == ""
