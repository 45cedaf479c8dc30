"""A graph with an op that fails keeps its other outputs, and the op raises eager's error where it is read."""

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import ltc_core as ltc
from tests.core.beside_eager import Raised, attempt, run_beside_eager
from tests.core.custom_ops import Gate
from tests.nets.tiers import tier

TIERS = ("ops", "lowered")


@pytest.fixture
def device() -> torch.device:
    return ltc.lazy_device()


def numbers(device: torch.device, *shape: int) -> torch.Tensor:
    n = torch.Size(shape).numel()
    return (torch.arange(float(n)) * 37 % 23 / 7 - 1.5).view(shape).to(device)


def whole(device: torch.device, *values: int) -> torch.Tensor:
    return torch.tensor(values, device=device)


# Wrong because of their values. Each is one of a kind: indices, classes, ranges, draws, divisors, matrices.
WRONG: dict[str, Callable[[torch.device], Any]] = {
    "bce": lambda d: F.binary_cross_entropy(numbers(d, 3), numbers(d, 3).sigmoid()),
    "bce_target": lambda d: F.binary_cross_entropy(numbers(d, 3).sigmoid(), numbers(d, 3) + 3),
    "bce_nan": lambda d: F.binary_cross_entropy((numbers(d, 3) / 0).sigmoid() * 0 / 0, whole(d, 1, 0, 1).float()),
    "division": lambda d: whole(d, 1, 2) // whole(d, 0, 1),
    "remainder": lambda d: 5 % whole(d, 0, 1),
    "index": lambda d: numbers(d, 3)[whole(d, 1) * 7],
    "embedding": lambda d: F.embedding(whole(d, 0, 3), numbers(d, 3, 2)),
    "embedding_bag": lambda d: F.embedding_bag(whole(d, 0, 5), numbers(d, 3, 2), whole(d, 0)),
    "one_hot": lambda d: F.one_hot(whole(d, 0, 5), 4),
    "classes": lambda d: F.cross_entropy(numbers(d, 2, 3), whole(d, 0, 3), numbers(d, 3).abs(), label_smoothing=0.1),
    "margin": lambda d: F.multi_margin_loss(numbers(d, 3, 4), whole(d, 0, 4, 1)),
    "multilabel": lambda d: F.multilabel_margin_loss(numbers(d, 1, 3), whole(d, 0, 5, 1)[None]),
    "ctc": lambda d: F.ctc_loss(numbers(d, 4, 1, 3).log_softmax(-1), whole(d, 1, 2)[None], [9], [2]),
    "multinomial": lambda d: torch.multinomial(numbers(d, 4), 1),
    "poisson": lambda d: torch.poisson(numbers(d, 4)),
    "std": lambda d: torch.normal(0.0, numbers(d, 3)),
    "bincount": lambda d: torch.bincount(whole(d, 1, -1)),
    "repeats": lambda d: torch.repeat_interleave(whole(d, 1, 2), whole(d, 1, -1)),
    "histc": lambda d: torch.histc(numbers(d, 4) / 0),
    "quantile": lambda d: torch.quantile(numbers(d, 4), torch.tensor([0.5, 2.0], device=d)),
    "nanquantile": lambda d: torch.nanquantile(numbers(d, 4), torch.tensor([-2.0], device=d)),
    "unpool": lambda d: F.max_unpool1d(numbers(d, 1, 1, 2), whole(d, 0, 99)[None, None], 2),
    "masked_scatter": lambda d: numbers(d, 4).masked_scatter(numbers(d, 4) > -9, numbers(d, 2)),
    "cholesky": lambda d: torch.linalg.cholesky(-torch.eye(2, device=d)),
    "inverse": lambda d: torch.linalg.inv(torch.zeros(2, 2, device=d)),
    "svd": lambda d: torch.linalg.svd(numbers(d, 2, 2) / 0 * 0)[1],
}  # fmt: skip


def beside(wrong: Callable[[torch.device], Any]) -> Callable[[torch.device], Any]:
    def program(device: torch.device) -> Any:
        x = numbers(device, 3)
        before = x + 1
        try:
            found = wrong(device)
        except Exception as error:
            found = Raised(error)
        after, state = x * 2, torch.zeros(3, device=device)
        state[1] = 5.0
        if device.type != "cpu":
            ltc.mark_step()
        first = attempt(lambda: before)
        if not isinstance(found, Raised):
            found = attempt(lambda: found)
        return first, found, after, state, x

    return program


# Run on real values in each tier.
_ON_REAL_VALUES = {"bincount", "repeats", "cholesky", "inverse"}


@pytest.mark.parametrize("chosen", TIERS)
def test_wrong_values_raise_where_they_are_read_and_nowhere_else(chosen: str) -> None:
    differ = {}
    with tier(chosen):
        for name, wrong in WRONG.items():
            if chosen == "lowered" and name in _ON_REAL_VALUES:
                continue
            try:
                run_beside_eager(beside(wrong), rounds=2 if chosen == "ops" else 1)
            except AssertionError as error:
                differ[name] = str(error)[:300]
    assert differ == {}


@pytest.mark.parametrize("chosen", TIERS)
def test_each_failure_is_raised_by_what_is_lost_to_it(chosen: str, device: torch.device) -> None:
    with tier(chosen):
        for _ in range(2):
            x = whole(device, 1, 2)
            table = numbers(device, 2, 2)
            one, fine, two = x // 0, x + 1, F.embedding(x, table)
            both = two.sum() + one
            ltc.mark_step()
            assert fine.tolist() == [2, 3]
            with pytest.raises(IndexError, match="index out of range"):
                two * 2
            with pytest.raises(IndexError, match="index out of range"):
                two.cpu()
            for lost in (one, both):
                with pytest.raises(RuntimeError, match="ZeroDivisionError"):
                    lost.cpu()
            ltc.wait_device_ops()


@pytest.mark.parametrize("chosen", TIERS)
def test_a_failure_that_keeps_state_back_is_raised_at_the_next_sync(
    chosen: str, device: torch.device
) -> None:
    """Parameters have not got their update: a program that goes on reading other values must learn of it."""
    with tier(chosen):
        state = torch.ones(2, device=device)
        ltc.mark_step(wait=True)
        x = whole(device, 1, 2)
        lost, fine = x // 0, x + 1
        state.add_(lost)
        with pytest.raises(RuntimeError, match="ZeroDivisionError"):
            fine.cpu()
        assert fine.tolist() == [2, 3] and state.tolist() == [1.0, 1.0]
        ltc.wait_device_ops()


def test_a_failure_whose_values_are_gone_is_raised_at_the_next_sync(device: torch.device) -> None:
    x = whole(device, 1, 2)
    lost, fine = x // 0, x + 1
    with pytest.raises(RuntimeError, match="ZeroDivisionError"):
        ltc.mark_step()
        del lost
        ltc.mark_step(wait=True)
    assert fine.tolist() == [2, 3]


def test_ends_of_linspace_may_be_tensors(device: torch.device) -> None:
    def program(device: torch.device) -> Any:
        a, b = torch.tensor(0.0, device=device), torch.tensor(2.0, device=device)
        x = numbers(device, 4)
        return (
            torch.linspace(a, b, 5), torch.linspace(a, 4, 3), torch.logspace(0, b, 3),
            torch.quantile(x, torch.tensor([0.2, 0.7], device=device)), torch.nanquantile(x, 0.5),
        )  # fmt: skip

    run_beside_eager(program, rounds=1)


@dataclasses.dataclass
class TooLarge(Exception):
    """An exception without a hash."""

    limit: float


@torch.library.custom_op("ltc_probe::bounded", mutates_args=())
def bounded(x: torch.Tensor, limit: float) -> torch.Tensor:
    if float(x.max()) > limit:
        raise TooLarge(limit)
    return x.clone()


bounded.register_fake(lambda x, limit: torch.empty_like(x))


def test_exceptions_of_ones_own(device: torch.device) -> None:
    x = numbers(device, 3)
    values = [bounded(x, limit) for limit in (-100.0, 100.0, -200.0)]
    kept = x + 1
    with pytest.raises(ltc.errors.LtcError, match="ltc_probe.bounded"):
        ltc.mark_step(wait=True)
    assert torch.equal(values[1].cpu(), x.cpu()) and torch.equal(kept.cpu(), x.cpu() + 1)
    for value in (values[0], values[2]):
        with pytest.raises(ltc.errors.LtcError, match="ltc_probe.bounded"):
            value.cpu()


def test_draws_after_a_failure_do_not_come_again(device: torch.device) -> None:
    lost = F.embedding(whole(device, 9), numbers(device, 3, 2))
    first = torch.randn(3, device=device)
    with pytest.raises(IndexError):
        ltc.mark_step(wait=True)
    second, third = torch.randn(3, device=device), torch.randn(3, device=device)
    ltc.mark_step(wait=True)
    found = [t.cpu() for t in (first, second, third)]
    assert not torch.equal(found[0], found[1]) and not torch.equal(found[1], found[2])
    del lost


def test_state_that_a_lost_value_keeps_back_is_told_of(device: torch.device) -> None:
    """The failing op has not run yet when the ops that need its result are recorded."""
    state, other = numbers(device, 2), numbers(device, 2)
    ltc.mark_step(wait=True)
    before = [state.cpu(), other.cpu()]
    with Gate() as gate:
        lost = F.embedding(whole(device, 9), gate(numbers(device, 3, 2)))[0]
        ltc.mark_step()
        state.add_(lost)
        other.add_(1)
        ltc.mark_step()
    with pytest.raises(IndexError, match="embedding"):
        ltc.mark_step(wait=True)
    assert [t.tolist() for t in (state, other)] == [t.tolist() for t in before]
