"""How fast training goes: `RateTracker`."""

from __future__ import annotations

import time

from ltc_core.settings import settings

__all__ = ["RateTracker"]


class RateTracker:
    """Counts samples, and returns their rate a second: recent and smoothed, or since the beginning.

    Args:
        smooth_factor: weight of the previous rate, 0 to below 1; LTC_RATE_SMOOTHING by default.

    Source: `torch_xla.core.xla_model.RateTracker`.
    """

    def __init__(self, smooth_factor: float | None = None) -> None:
        smooth_factor = settings.rate_smoothing if smooth_factor is None else smooth_factor
        if not 0 <= smooth_factor < 1:
            raise ValueError(f"smooth_factor must be from 0 to below 1, not {smooth_factor}")
        self._smooth_factor = smooth_factor
        self._began = self._asked = time.monotonic()
        self._count = self._count_then = 0.0
        self._rate: float | None = None

    def add(self, count: float) -> None:
        """Add a count, such as the samples of a batch."""
        self._count += count

    def rate(self) -> float:
        """Return the rate since this was asked last, smoothed with those before; 0 if no time has passed."""
        now = time.monotonic()
        if now <= self._asked:
            return self._rate or 0.0
        rate = (self._count - self._count_then) / (now - self._asked)
        if self._rate is not None:
            rate += self._smooth_factor * (self._rate - rate)
        self._asked, self._count_then, self._rate = now, self._count, rate
        return rate

    def global_rate(self) -> float:
        """Return the rate since the beginning; 0 if no time has passed."""
        passed_s = time.monotonic() - self._began
        return self._count / passed_s if passed_s > 0 else 0.0
