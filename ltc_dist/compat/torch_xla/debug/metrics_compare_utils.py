"""`torch_xla.debug.metrics_compare_utils`: numbers of metrics reports, and how a report differs from earlier ones."""

from __future__ import annotations

import itertools
import re
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

__all__ = ["compare_metrics", "get_data_points_from_metrics_reports", "parse_metrics_report"]

_METRIC = re.compile(
    r"Metric: (?P<name>\S+)\s+TotalSamples: (?P<TotalSamples>\d+)\s+Accumulator: (?P<Accumulator>\S+)"
    r"(?:\s+(?:Rate|ValueRate): [^\n]*)*\s+Percentiles: (?P<percentiles>[^\n]*)"
)
_PERCENTILE = re.compile(r"(\d+)%=([^\s;]+)")
_COUNTER = re.compile(r"Counter: (\S+)\s+Value: (\d+)")

# Unit of a text -> what it is worth in the unit of the numbers.
_SECONDS = {"d": 86400.0, "h": 3600.0, "m": 60.0, "s": 1.0, "ms": 1e-3, "us": 1e-6}
_MEGABYTES = {"PB": 1e9, "TB": 1e6, "GB": 1e3, "MB": 1.0, "KB": 1e-3, "B": 1e-6}
_PART = re.compile(r"([\d.]+)([A-Za-z]+)")

_CONFIG = {"base_expression": "v <= v_mean + (v_stddev * 2.0)"}


def _number(text: str) -> tuple[float, str]:
    """The number of a text, and its unit: 'sec' for '01m02s003ms', 'mb' for '1.54KB', '' for a number alone."""
    if re.fullmatch(r"[\d.]+", text):
        return float(text), ""
    parts = _PART.findall(text)
    for unit, worth in (("sec", _SECONDS), ("mb", _MEGABYTES)):
        if parts and "".join(map("".join, parts)) == text and all(u in worth for _, u in parts):
            return sum(float(number) * worth[u] for number, u in parts), unit
    raise ValueError(f"Unknown metric_str format: {text}")


def parse_metrics_report(report: str, dehumanize: bool = True) -> dict[str, Any]:
    """The numbers of a report, such as {'CompileTime__Accumulator_sec': 50.0, 'Uploads__Value': 20}.

    Args:
        report: what `metrics_report` returned.
        dehumanize: False for pairs of the number and its text, of metrics.

    Raises:
        ValueError: a number has an unknown unit.
    """
    found: dict[str, Any] = {}
    for metric in _METRIC.finditer(report):
        texts = {key: metric[key] for key in ("TotalSamples", "Accumulator")}
        texts |= {f"Percentile_{p}": text for p, text in _PERCENTILE.findall(metric["percentiles"])}
        for key, text in texts.items():
            number, unit = _number(text)
            name = f"{metric['name']}__{key}{'_' if unit else ''}{unit}"
            found[name] = number if dehumanize else (number, text)
    found |= {f"{name}__Value": int(value) for name, value in _COUNTER.findall(report)}
    return found


def get_data_points_from_metrics_reports(metrics_reports: Sequence[str]) -> dict[str, list[Any]]:
    """Name of each number -> its value in each report, None where a report has no such number."""
    parsed = [parse_metrics_report(report) for report in metrics_reports]
    return {
        name: [numbers.get(name) for numbers in parsed]
        for name in dict.fromkeys(itertools.chain.from_iterable(parsed))
    }


def compare_metrics(
    data_points: Mapping[str, Sequence[Any]],
    metrics_report: str,
    config: Mapping[str, str] = _CONFIG,
) -> str:
    """A line for each number of a report that differs from earlier reports, and for each new 'aten::' counter.

    Args:
        data_points: of the earlier reports, from `get_data_points_from_metrics_reports`.
        config: an expression of Python for each name, as 'NAME_expression', and 'base_expression' for the others; of
            `v`, and of `v_mean` and `v_stddev` in the earlier reports. A number differs where it is false.

    Source: `torch_xla.debug.metrics_compare_utils.compare_metrics`.
    """
    lines = []
    for name, v in sorted(parse_metrics_report(metrics_report).items()):
        before = [value for value in data_points.get(name, ()) if value is not None]
        if not before:
            if name.startswith("aten::"):
                lines.append(f"Found new aten counter: {name}: {v}\n")
            continue
        mean, deviation = float(statistics.fmean(before)), float(statistics.pstdev(before))
        expression = config.get(f"{name}_expression") or config["base_expression"]
        if not eval(expression, {}, {"v": v, "v_mean": mean, "v_stddev": deviation}):
            lines.append(
                f"{name} failed its expression check. Expression: {expression}.  Mean: {mean}.  "
                f"Stddev: {deviation}.  Actual Value: {v}\n"
            )
    return "".join(lines)
