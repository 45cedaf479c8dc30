"""Sentences of `metrics.summary` on what the most important compiled programs take; computed when it is asked for."""

from __future__ import annotations

from collections.abc import Mapping

from ltc_core.executors.device_program import Cost, Launch, launches
from ltc_core.executors.inductor.tier_report import recorded_at
from ltc_core.metrics_report import bytes_text, counted, num_runs

__all__ = ["sentences"]

_MOST = 3  # programs that are shown
_MOST_ASKED = 30  # programs whose compiler is asked: those with the most ops in all their runs
_SUFFIXES = ("FLOP", "kFLOP", "MFLOP", "GFLOP", "TFLOP", "PFLOP")


def sentences(counters: Mapping[str, int]) -> list[str]:
    """A sentence for each of the programs with the most work in all their runs; the executor jax alone has them."""
    if not num_runs(counters):
        return []
    ran = sorted((one for one in launches() if one.runs), key=_num_ops, reverse=True)
    known = [(one, cost) for one in ran[:_MOST_ASKED] if (cost := one.cost()) is not None]
    known.sort(key=lambda row: (row[0].runs * row[1].flops, row[0].runs * row[1].accessed_bytes))
    return [_sentence(*row) for row in reversed(known[-_MOST:])]


def _num_ops(launch: Launch) -> int:
    return launch.runs * len(launch.subgraph.nodes)


def _sentence(launch: Launch, cost: Cost) -> str:
    nodes = launch.subgraph.nodes
    return (
        f"A program of {counted(len(nodes), 'op')}{recorded_at(nodes)} ran {counted(launch.runs, 'time')}, each with "
        f"{_flops_text(cost.flops)}, {bytes_text(cost.accessed_bytes)} read and written, and "
        f"{bytes_text(cost.temporary_bytes)} of temporary memory."
    )


def _flops_text(value: float) -> str:
    """Render a number of operations as '1.23 GFLOP'."""
    at = 0
    while value >= 1000 and at < len(_SUFFIXES) - 1:
        value /= 1000
        at += 1
    return f"{value:.3g} {_SUFFIXES[at]}"
