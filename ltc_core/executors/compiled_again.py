"""Why a program is compiled again where its graph is not new: what it depends on besides has changed.

Called by `device_program`; the cause of a new graph is `debug.explain`'s.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from types import MappingProxyType
from typing import NamedTuple

from ltc_core import metrics
from ltc_core.errors import listed
from ltc_core.graph.ir import Graph, references
from ltc_core.metrics_report import cause_counter, counted
from ltc_core.settings import settings

__all__ = ["Change", "tell"]


class Change(NamedTuple):
    """What has changed: its kind, and position of an input -> how it lay on the devices, and how it lies now."""

    kind: str
    inputs: Mapping[int, tuple[str, str]] = MappingProxyType({})


def tell(change: Change, graph: Graph) -> None:
    """Count why a graph's program is compiled again, and say it if LTC_EXPLAIN asks for it."""
    metrics.count(cause_counter(change.kind))
    if not settings.explain:
        return
    numbers = list(graph.inputs)
    parts = []
    for place, (was, now) in change.inputs.items():
        number = numbers[place]
        line = next((n.line for n in graph.nodes if number in references(n)), "")
        where = f", first read at {line}" if line else ""
        parts.append(f"input {place} ({graph.inputs[number]}): {was} -> {now}{where}")
    what = f"{change.kind}: {listed(parts, 3)}" if parts else change.kind
    print(f"[ltc] compile of {counted(len(graph.nodes), 'op')} again: {what}", file=sys.stderr)
