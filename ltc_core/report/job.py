"""The ranks of a job beside each other: their collectives, and who comes last to them.

All ranks of a group run its collectives in one order, so the n-th slice of a group in each rank is one collective.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from typing import Any

from ltc_core.report.run_files import Rank, Slice

__all__ = ["collectives_of", "lateness_of"]

_MOST_SHOWN = 400


def collectives_of(rank: Rank, num_steps: int) -> list[dict[str, Any]]:
    """The collectives of a rank by line: calls, bytes, milliseconds, bytes a second, and how long the rank waits."""
    groups: defaultdict[tuple[str, str], list[Slice]] = defaultdict(list)
    waits: Counter[tuple[str, str]] = Counter()
    for one in rank.lanes.get("collectives", []):
        groups[one.args.get("line", ""), str(one.args.get("plan", ""))].append(one)
    for one in rank.slices:
        if one.name == "wait for other processes":
            waits[one.args.get("line", ""), str(one.args.get("plan", ""))] += one.took  # type: ignore[assignment]
    rows = []
    for (line, plan), found in groups.items():
        took_s = sum(one.took for one in found) / 1e6
        num_bytes = sum(int(one.args.get("bytes", 0)) for one in found)
        rows.append(
            {
                "line": line,
                "plan": plan,
                "calls": len(found),
                "bytes": num_bytes,
                "mean_ms": took_s * 1000 / len(found),
                "bytes_a_second": num_bytes / took_s if took_s else 0.0,
                "wait_ms_a_step": waits[line, plan] / 1000 / max(1, num_steps),
            }
        )
    return sorted(rows, key=lambda row: -row["wait_ms_a_step"])


def lateness_of(ranks: Sequence[Rank]) -> dict[str, Any] | None:
    """Who comes last to the collectives of all ranks, and by how much; None in a job of one."""
    if len(ranks) < 2:
        return None
    begun = [_starts(rank) for rank in ranks]
    last: Counter[int] = Counter()
    late_us: defaultdict[int, float] = defaultdict(float)
    points = []
    count = 0
    for group in begun[0]:
        if not all(group in of_rank for of_rank in begun):
            continue
        for starts in zip(*(of_rank[group] for of_rank in begun), strict=False):
            first = min(starts)
            slowest = max(range(len(ranks)), key=lambda k: starts[k])
            last[slowest] += 1
            count += 1
            for k, start in enumerate(starts):
                late_us[k] += start - first
            points.append([ranks[slowest].number, (max(starts) - first) / 1000])
    if not count:
        return None
    step = max(1, -(-len(points) // _MOST_SHOWN))
    return {
        "collectives": count,
        "ranks": [
            {
                "rank": rank.number,
                "last": last[k] / count,
                "late_ms": late_us[k] / count / 1000,
            }
            for k, rank in enumerate(ranks)
        ],
        "points": points[::step],
    }


def _starts(rank: Rank) -> dict[str, list[float]]:
    found: defaultdict[str, list[float]] = defaultdict(list)
    for one in rank.lanes.get("collectives", []):
        found[str(one.args.get("group", ""))].append(one.start)
    return found
