"""`torch_xla.debug.metrics_saver`: the metrics of a step, appended to a file."""

from __future__ import annotations

import os
import sys
import threading

from ltc_core import metrics

__all__ = ["save_metrics"]

_lock = threading.Lock()


class _Local(threading.local):
    step = 0


_local = _Local()


def save_metrics(metrics_file: str | os.PathLike[str] | None = None) -> None:
    """Append the metrics, under a line with the number of this call in its thread.

    Args:
        metrics_file: STDERR, STDOUT or a path; by default that of LTC_METRICS_FILE (XLA_METRICS_FILE), if it is set.
    """
    step = _local.step
    _local.step += 1
    if metrics_file is None:
        metrics.append_step(step)
        return
    text = f"[MetricsData; step={step}]\n{metrics.metrics_report()}"
    if metrics_file in ("STDERR", "STDOUT"):
        print(text, end="", file=sys.stderr if metrics_file == "STDERR" else sys.stdout)
        return
    with _lock, open(metrics_file, "a", encoding="utf-8") as file:
        file.write(text)
