"""`torch_xla.test.test_utils`: what upstream's training scripts print and write to TensorBoard."""

from __future__ import annotations

import functools
import importlib
import multiprocessing
import os
import re
import sys
import time
import unittest
from collections.abc import Callable, Mapping
from datetime import datetime
from typing import Any

import ltc_dist as ltd
from ltc_core import metrics
from ltc_core.api.verbs import DeviceLike

__all__ = [
    "add_scalar_to_summary",
    "close_summary_writer",
    "get_summary_writer",
    "mp_test",
    "now",
    "print_test_update",
    "print_training_update",
    "write_to_summary",
]

# Either has a SummaryWriter, with the same methods.
_WRITERS = ("tensorboardX", "torch.utils.tensorboard")

_SECONDS = {"d": 86400, "h": 3600, "m": 60, "s": 1, "ms": 1e-3, "us": 1e-6}
_MEGABYTES = {"B": 1e-6, "KB": 1e-3, "MB": 1, "GB": 1e3, "TB": 1e6, "PB": 1e9}


def mp_test(func: Callable[..., Any]) -> Callable[..., int | None]:
    """Run a method of a `unittest.TestCase` in a forked process, and fail if that fails.

    For another function it returns the exit code; a test method that returns a value is deprecated.
    """

    @functools.wraps(func)
    def call(*args: Any, **kwargs: Any) -> int | None:
        # Forked: by its name, the function that is given to another process is this one.
        process = multiprocessing.get_context("fork").Process(target=func, args=args, kwargs=kwargs)
        process.start()
        process.join()
        if args and isinstance(args[0], unittest.TestCase):
            args[0].assertEqual(process.exitcode, 0)
            return None
        return process.exitcode

    return call


# -- lines ---------------------------------------------------------------------------------------


def now(format: str = "%H:%M:%S") -> str:
    """Return the time of day."""
    return datetime.now().strftime(format)


def print_training_update(
    device: DeviceLike,
    step: int,
    loss: Any,
    rate: float,
    global_rate: float,
    epoch: int | None = None,
    summary_writer: Any = None,
) -> None:
    """Print where training is, in one line.

    Args:
        rate, global_rate: samples a second, of late and since the beginning; also written to `summary_writer`.

    Cost: waits for the step, if the loss is a tensor of the device.
    """
    parts = {
        "Epoch": epoch,
        "Step": step,
        "Loss": f"{loss:.5f}",
        "Rate": f"{rate:.2f}",
        "GlobalRate": f"{global_rate:.2f}",
    }
    _print_update("Training", device, parts)
    rates = {"examples/sec": rate, "average_examples/sec": global_rate}
    write_to_summary(summary_writer, dict_to_write=rates)


def print_test_update(
    device: DeviceLike, accuracy: Any, epoch: int | None = None, step: int | None = None
) -> None:
    """Print how good the model is, in one line."""
    shown = None if accuracy is None else f"{accuracy:.2f}"
    _print_update("Test", device, {"Step": step, "Epoch": epoch, "Accuracy": shown})


def _print_update(kind: str, device: DeviceLike, parts: Mapping[str, Any]) -> None:
    parts = {"Device": f"{device}/{ltd.get_ordinal()}", **parts, "Time": now()}
    shown = " ".join(f"{name}={value}" for name, value in parts.items() if value is not None)
    sys.stdout.write(f"| {kind} {shown}\n")  # in one call: other processes write lines, too
    sys.stdout.flush()


# -- TensorBoard ---------------------------------------------------------------------------------


def get_summary_writer(logdir: str | os.PathLike[str] | None) -> Any:
    """Return a TensorBoard writer for a directory; None without a directory, and in all processes but the first.

    None as well if no library for it is installed, which is said on stderr.
    """
    if not logdir or not ltd.is_master_ordinal(local=False):
        return None
    for name in _WRITERS:
        try:
            library = importlib.import_module(name)
        except ImportError:
            continue
        writer = library.SummaryWriter(log_dir=os.fspath(logdir))
        write_to_summary(writer, 0, {"TensorboardStartTimestamp": time.time()})
        return writer
    print(
        f"ltc: nothing is written to {os.fspath(logdir)}: neither tensorboardX nor tensorboard is installed.",
        file=sys.stderr,
        flush=True,
    )
    return None


def add_scalar_to_summary(
    summary_writer: Any, metric_name: str, metric_value: float, global_step: int | None
) -> None:
    """Write one number to TensorBoard, as scripts up to 1.5 do; nothing if there is no writer."""
    write_to_summary(summary_writer, global_step, {metric_name: metric_value})


def write_to_summary(
    summary_writer: Any,
    global_step: int | None = None,
    dict_to_write: Mapping[str, Any] | None = None,
    write_xla_metrics: bool = False,
) -> None:
    """Write numbers to TensorBoard; nothing if there is no writer.

    Args:
        dict_to_write: name -> number.
        write_xla_metrics: write what `metrics_report` says too, as 'CompileTime__Accumulator_sec' and so on.
    """
    if summary_writer is None:
        return
    rows = dict(dict_to_write or {})
    if write_xla_metrics:
        found = _numbers_of(metrics.metrics_report())
        rows.update(found)
        rows["aten_ops_sum"] = sum(v for name, v in found.items() if name.startswith("aten::"))
    for name, value in rows.items():
        summary_writer.add_scalar(name, value, global_step)


def close_summary_writer(summary_writer: Any) -> None:
    """Write what is left and close a writer; nothing if there is none."""
    if summary_writer is not None:
        summary_writer.flush()
        summary_writer.close()


def _numbers_of(report: str) -> dict[str, float]:
    """Read a report: times in seconds (_sec), sizes in megabytes (_mb)."""
    numbers: dict[str, float] = {}
    name = ""
    for line in report.splitlines():
        key, _, text = line.strip().partition(": ")
        if key in ("Metric", "Counter"):
            name = text
        elif key == "Percentiles":
            for part in text.split("; "):
                percent, _, shown = part.partition("%=")
                _add(numbers, f"{name}__Percentile_{percent}", shown)
        elif key in ("TotalSamples", "Accumulator", "Value"):
            _add(numbers, f"{name}__{key}", text)
    return numbers


def _add(numbers: dict[str, float], name: str, text: str) -> None:
    parts = re.findall(r"([\d.]+)([A-Za-z]*)", text)
    unit = parts[-1][1]
    for scale, suffix in ((_SECONDS, "_sec"), (_MEGABYTES, "_mb")):
        if unit in scale:
            numbers[name + suffix] = sum(float(n) * scale[u] for n, u in parts)
            return
    numbers[name] = float(text)
