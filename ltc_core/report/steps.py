"""Where the time of each step went, from the slices of one rank.

A step ends with the cut that ends it, in the thread that cuts most. Each moment of that thread belongs to one `PART`.
Where it waits for values, the moment belongs to what the workers do meanwhile.
"""

from __future__ import annotations

import bisect
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

from ltc_core.report.run_files import Rank, Slice

__all__ = ["PARTS", "Step", "main_thread", "mean_of", "steady", "steps_of", "worker_ms"]

COMPUTING = "computing"
DATA = "waiting for data"
OTHERS = "waiting for other processes"
COMPILER = "waiting for the compiler"
HANDING_OVER = "building and handing over programs"
SCRIPT = "recording and the script itself"
PARTS = (COMPUTING, DATA, OTHERS, COMPILER, HANDING_OVER, SCRIPT)

_FOUND = ("OptimizerStep", "Upload")  # reasons for the cut that ends a step which is not marked

# Slice -> what the thread does meanwhile.
_PART_OF = {
    "run": COMPUTING,
    "run early": COMPUTING,
    "cut": HANDING_OVER,
    "wait for a batch": DATA,
    "read a batch": DATA,
    "upload a batch": DATA,
    "wait for other processes": OTHERS,
    "wait for the compiler": COMPILER,
    "compile": COMPILER,
    "run on the CPU": COMPUTING,
}
# Slices in which it waits for what the workers do.
_WAITS = ("fetch", "wait for the worker", "wait for the device")


class Segment(NamedTuple):
    """A stretch of time of a thread, and the innermost slice there."""

    start: float
    end: float
    name: str


class Step(NamedTuple):
    """A step: when it began and ended, in microseconds, and the microseconds of each part of it."""

    number: int
    start: float
    end: float
    parts: dict[str, float]

    @property
    def took(self) -> float:
        return self.end - self.start


def main_thread(rank: Rank) -> str:
    """The thread that cuts most; '' if none does."""
    cuts = {name: sum(one.name == "cut" for one in found) for name, found in rank.threads.items()}
    name = max(cuts, key=lambda name: cuts[name], default="")
    return name if cuts.get(name) else ""


def steps_of(rank: Rank) -> list[Step]:
    """The steps of a rank, the first one from its first slice on."""
    slices = rank.threads.get(main_thread(rank), [])
    ends = _ends(slices)
    if not ends:
        return []
    segments = flat(slices)
    workers = _Workers(
        flat(found) for name, found in rank.threads.items() if name.startswith("ltc-worker")
    )
    found, start, at = [], slices[0].start, 0
    for number, end in enumerate(ends):
        parts = dict.fromkeys(PARTS, 0.0)
        known = 0.0
        while at < len(segments) and segments[at].start < end:
            segment = segments[at]
            if segment.end > end:  # the next step has the rest of it
                segments[at] = Segment(end, segment.end, segment.name)
                segment = Segment(segment.start, end, segment.name)
            else:
                at += 1
            for part, took in _parts_of(segment, workers):
                parts[part] += took
                known += took
        parts[SCRIPT] += max(0.0, end - start - known)
        found.append(Step(number, start, end, parts))
        start = end
    return found


def _ends(slices: Sequence[Slice]) -> list[float]:
    """When steps ended: a mark with nothing recorded since the last one, as a loader's first, ends none."""
    found = []
    has_cut = False
    marked_until = 0.0
    for one in slices:
        if one.name == "mark_step":
            marked_until = one.end
            if has_cut:
                found.append(one.end)
                has_cut = False
        elif one.name == "cut" and one.end <= marked_until:
            if not found or found[-1] != marked_until:
                found.append(marked_until)
        elif one.name == "cut":
            has_cut = one.args.get("reason") not in _FOUND
            if not has_cut:
                found.append(one.end)
    return found


def _parts_of(segment: Segment, workers: _Workers) -> Iterator[tuple[str, float]]:
    took = segment.end - segment.start
    if segment.name in _WAITS:
        for part, of_it in workers.during(segment.start, segment.end).items():
            yield part, of_it
            took -= of_it
        yield HANDING_OVER, max(0.0, took)
    else:
        yield _PART_OF.get(segment.name, SCRIPT), took


class _Workers:
    """What the worker threads do. Where several are busy, the first one counts."""

    def __init__(self, lanes: Iterable[list[Segment]]) -> None:
        self._lanes = list(lanes)
        self._starts = [[one.start for one in lane] for lane in self._lanes]

    def during(self, start: float, end: float) -> dict[str, float]:
        found: dict[str, float] = {}
        for lane, starts in zip(self._lanes, self._starts, strict=True):
            at = max(0, bisect.bisect_right(starts, start) - 1)
            while at < len(lane) and lane[at].start < end:
                took = min(end, lane[at].end) - max(start, lane[at].start)
                if took > 0:
                    part = _PART_OF.get(lane[at].name, COMPUTING)
                    found[part] = found.get(part, 0.0) + took
                at += 1
            if found:
                break
        return found


def flat(slices: Sequence[Slice]) -> list[Segment]:
    """The segments of a thread, in order: each moment belongs to the innermost slice."""
    found: list[Segment] = []
    under_way: list[tuple[float, str]] = []  # end, name
    now = 0.0

    def go_on(until: float) -> None:
        nonlocal now
        while under_way and now < until:
            end, name = under_way[-1]
            if min(end, until) > now:
                found.append(Segment(now, min(end, until), name))
                now = min(end, until)
            if end <= until:
                under_way.pop()
        now = max(now, until)

    for one in slices:
        go_on(one.start)
        # Clocks are read one after the other: an inner slice may end a little after the outer one.
        end = min(one.end, under_way[-1][0]) if under_way else one.end
        under_way.append((end, one.name))
    if under_way:
        go_on(max(end for end, _ in under_way))
    return found


def steady(steps: Sequence[Step]) -> list[Step]:
    """The later half of the steps, in which programs are built and compiled."""
    return list(steps[len(steps) // 2 :])


def worker_ms(rank: Rank, steps: Sequence[Step]) -> float:
    """Milliseconds of a step for which worker threads compute, beside the thread that trains or while it waits."""
    if not steps:
        return 0.0
    start, end = steps[0].start, steps[-1].end
    took = 0.0
    for name, found in rank.threads.items():
        if name.startswith("ltc-worker"):
            for segment in flat(found):
                if _PART_OF.get(segment.name) == COMPUTING:
                    took += max(0.0, min(end, segment.end) - max(start, segment.start))
    return took / len(steps) / 1000


def mean_of(steps: Sequence[Step]) -> dict[str, Any]:
    """Milliseconds of a step in the mean, and of each part."""
    count = max(1, len(steps))
    return {
        "ms": sum(step.took for step in steps) / count / 1000,
        "parts": {part: sum(step.parts[part] for step in steps) / count / 1000 for part in PARTS},
    }
