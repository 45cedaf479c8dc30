"""What was too frequent in a whole run; reported at its end if LTC_DEBUG asks for reports.

The lines are those of torch_xla's automatic metrics analysis, under the prefix that its users search for.
"""

from __future__ import annotations

from collections.abc import Iterator

from ltc_core import metrics
from ltc_core.debug.report import say
from ltc_core.metrics_report import STEPS
from ltc_core.settings import settings

__all__ = ["findings"]

_WARM_UP = 10  # steps in which new graphs and transfers are normal
_SHARE = 0.5  # of the steps
_LONGEST_S = {"CompileTime": 300, "ExecuteTime": 30}


def findings() -> list[str]:
    """A sentence for each event that was too frequent or too long, and for each op that ran on the CPU instead."""
    return [*_too_frequent(), *_too_long(), *_not_lowered()]


def _too_frequent() -> Iterator[str]:
    steps = sum(metrics.counter_value(name) or 0 for name in STEPS)
    for name in ("CompileTime", "TransferFromDeviceTime"):
        data = metrics.metric_data(name)
        if data is not None and steps > _WARM_UP and data[0] >= _SHARE * steps:
            yield f"{name} too frequent: {data[0]} counts during {steps} steps"


def _too_long() -> Iterator[str]:
    for name, most_s in _LONGEST_S.items():
        data = metrics.metric_data(name)
        longest_s = max((value for _, value in data[2]), default=0) / 1e9 if data else 0
        if longest_s > most_s:
            yield f"{name} too long: longest instance took {longest_s:.0f}s"


def _not_lowered() -> Iterator[str]:
    ops = [op for op in metrics.executed_fallback_ops() if op != "aten::_local_scalar_dense"]
    if ops:
        yield f"Op(s) not lowered: {', '.join(ops)}; they ran on the CPU"


def at_exit() -> None:
    if not settings.debug:
        return
    say("pt-xla-profiler" if settings.compat else "ltc-profiler", findings() or ["nothing to say"])
    say("Summary", metrics.summary().splitlines())
