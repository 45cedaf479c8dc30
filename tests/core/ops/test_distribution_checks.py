"""torch.distributions checks what it is given, and no step waits for it."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch.distributions import Bernoulli, Categorical, Distribution, Normal

import ltc_core as ltc
from ltc_core.settings import settings

pytestmark = pytest.mark.usefixtures("checked_distributions")

SOUND = torch.tensor([[0.1, 2.0], [-1.0, 0.5]])


def _num_reads() -> int:
    return ltc.metrics.counter_value("Sync.Item") or 0


def test_a_step_of_reinforce_reads_its_loss_alone() -> None:
    def losses(device: str) -> list[float]:
        torch.manual_seed(0)
        net = torch.nn.Linear(2, 2).to(device)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        found = []
        actions = torch.tensor([1, 0]).to(device)
        for _ in range(4):
            policy = Categorical(logits=net(SOUND.to(device)))
            loss = -policy.log_prob(actions).mean() - 0.01 * policy.entropy().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            found.append(loss.item())
        return found

    expected = losses("cpu")
    before = _num_reads()
    assert losses("ltc") == expected
    assert _num_reads() - before == 4


CASES: dict[str, tuple[Callable[[torch.Tensor], object], str]] = {
    "a parameter": (
        lambda x: Normal(x, x),
        "Expected parameter scale of distribution Normal to satisfy the",
    ),
    "an event": (
        lambda x: Categorical(logits=x / 0 * 0),
        "Expected parameter logits of distribution Categorical",
    ),
    "a sample": (
        lambda x: Bernoulli(logits=x).log_prob(x),
        "Expected value argument to be within the support (Boolean()) of the distribution Bernoulli",
    ),
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("ends", ["a read", "mark_step"])
def test_what_is_illegal_is_told_at_the_next_read(case: str, ends: str) -> None:
    make, expected = CASES[case]
    x = SOUND.to("ltc")
    kept = make(x)
    with pytest.raises(ValueError, match="found invalid values") as caught:
        if ends == "a read":
            x.sum().item()
        else:
            ltc.mark_step(wait=False)  # which tells it itself where the worker was quick
            ltc.mark_step(wait=True)
    assert expected in str(caught.value)
    assert "test_distribution_checks.py" in str(caught.value)
    assert "LTC_DISTRIBUTION_CHECKS=now" in str(caught.value)
    assert x.sum().item() == SOUND.sum().item()  # told once, and nothing is lost
    del kept


def test_it_is_told_once_the_step_has_run_in_the_background() -> None:
    x = SOUND.to("ltc")
    for _ in range(12):  # so that reads are made by C++
        Normal(x, x.exp()).log_prob(x).sum().item()
    Normal(x, x)
    with pytest.raises(ValueError, match="parameter scale"):
        ltc.mark_step()  # which tells it itself where the worker was quick
        x.sum().item()


def test_checks_at_once_where_the_setting_says_so() -> None:
    x = SOUND.to("ltc")
    with (
        settings.override(distribution_checks="now"),
        pytest.raises(ValueError, match=r"invalid values:\n"),
    ):
        Normal(x, x)


def test_other_callers_get_a_tensor_of_the_device() -> None:
    found = torch._is_all_true(SOUND.to("ltc") > 0)
    assert found.device.type == "ltc" and not found.item()


def test_no_check_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Distribution, "_validate_args", False)
    x = SOUND.to("ltc")
    Normal(x, x)
    assert x.sum().item() == SOUND.sum().item()


def test_values_that_were_checked_do_not_stay() -> None:
    x = torch.full((1 << 16,), 2.0).to("ltc")
    x.sum().item()
    before = ltc.get_memory_info()["bytes_used"]
    Normal(x + 1, x + 2)
    ltc.mark_step(wait=True)
    assert ltc.get_memory_info()["bytes_used"] <= before + 64
