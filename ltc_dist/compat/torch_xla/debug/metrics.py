"""`met`: `torch_xla.debug.metrics`, and the names of lazy_tensor_core and torch._lazy for the same."""

from ltc_core.metrics import (
    clear_all,
    clear_counters,
    clear_metrics,
    counter_names,
    counter_value,
    executed_fallback_ops,
    metric_data,
    metric_names,
    metrics_report,
    short_metrics_report,
)

__all__ = [
    "clear_all",
    "clear_counters",
    "clear_metrics",
    "counter_names",
    "counter_value",
    "executed_fallback_ops",
    "metric_data",
    "metric_names",
    "metrics_report",
    "reset",
    "reset_metrics",
    "short_metrics_report",
]

reset = reset_metrics = clear_all
