"""Rates, on a clock that the test moves."""

import pytest

import ltc_dist as ltd
from ltc_dist.train import rate


def test_rates(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr(rate.time, "monotonic", lambda: now)
    tracker = ltd.RateTracker(smooth_factor=0.5)
    assert tracker.rate() == tracker.global_rate() == 0.0
    tracker.add(10)
    now += 2
    assert tracker.rate() == tracker.global_rate() == 5.0
    assert tracker.rate() == 5.0  # no time has passed
    tracker.add(30)
    now += 2
    assert tracker.rate() == 10.0  # 15, smoothed with 5
    assert tracker.global_rate() == 10.0


@pytest.mark.parametrize("factor", [-0.1, 1.0])
def test_a_factor_that_makes_no_sense(factor: float) -> None:
    with pytest.raises(ValueError, match="smooth_factor must be from 0 to below 1"):
        ltd.RateTracker(factor)
