"""The summary of a report: what a newcomer should know first, in sentences, each with the section that shows it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from ltc_core.metrics_report import counted
from ltc_core.report.steps import COMPUTING, DATA, OTHERS, SCRIPT

__all__ = ["summary_of"]

_LEAST = 0.02  # a smaller share of a step is not told
_MUCH = 0.1  # a share of a step that is worth advice
# Why programs are built that each run needs once.
_ONCE = ("first graph", "new optimizer state", "gradients kept", "initialisation", "new code")


def summary_of(data: Mapping[str, Any]) -> list[dict[str, str]]:
    """Sentences on a run: {"text", "section"}. `data` is what `build` gives to the page."""
    return [{"text": text, "section": section} for text, section in _sentences(data)]


def _sentences(data: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    rank = data["ranks"][0]
    if not rank["is_whole"]:
        yield (
            "The run has not ended by itself, or goes on: what it did until then is here.",
            "steps",
        )
    yield from _step(rank)
    yield from _programs(rank)
    yield from _limit(rank)
    yield from _waits(rank)
    yield from _memory(rank)
    yield from _ranks(data)


def _step(rank: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    mean = rank["mean"]
    if not rank["num_steps"]:
        yield "No step has ended: nothing was marked, and no optimizer stepped.", "steps"
        return
    ranked = sorted(mean["parts"].items(), key=lambda item: -item[1])
    told = [f"{_ms(took)} {part}" for part, took in ranked if took >= _LEAST * mean["ms"]]
    yield (
        f"A step takes {_ms(mean['ms'])} ms: {', '.join(told)} "
        f"(mean of the last {rank['num_steady']} of {rank['num_steps']} steps).",
        "steps",
    )
    if rank["worker_ms"] > mean["parts"][COMPUTING] + _LEAST * mean["ms"]:
        yield (
            f"The thread that trains does that; a worker computes beside it, {_ms(rank['worker_ms'])} ms a step.",
            "steps",
        )


def _programs(rank: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    again = [
        p for p in rank["programs"] if p["why"] not in _ONCE and p["compile"] > 1 and p["cause"]
    ]
    count = len(rank["programs"])
    if not count:
        return
    if not again:
        yield (
            f"{counted(count, 'program')} built, none of them because something changed.",
            "programs",
        )
        return
    last = again[-1]
    yield (
        f"{counted(count, 'program')} built, {len(again)} of them because something changed; the last: "
        f"{last['cause']}.",
        "programs",
    )


def _limit(rank: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    lines = rank["lines"]
    if lines and lines[0]["ms"]:
        total = sum(row["ms"] for row in lines)
        first = lines[0]
        yield (
            f"Most of the computing is at {first['line']}: {100 * first['ms'] / total:.0f} %, "
            f"of that most in {first['ops'][0][0]}.",
            "time",
        )
    mean = rank["mean"]
    if mean["parts"][SCRIPT] > 0.4 * mean["ms"] > 0:
        yield (
            f"The script itself and recording take {100 * mean['parts'][SCRIPT] / mean['ms']:.0f} % of a step: "
            "larger batches, or less Python in the loop, help more than faster ops.",
            "steps",
        )
    elif mean["parts"][COMPUTING] > 0.8 * mean["ms"] > 0:
        yield "The step is as long as its computing: only faster or fewer ops help.", "time"


def _waits(rank: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    loader, mean = rank["loader"], rank["mean"]
    if loader is not None and loader["share"] > _MUCH:
        yield (
            f"The loader is the limit: {_ms(mean['parts'][DATA])} ms of each step wait for data. Reading a batch takes "
            f"{_ms(loader['read_ms'])} ms: use more workers (DataLoader(num_workers=...)), or do less for a sample.",
            "data",
        )
    elif loader is not None:
        yield "The loader is not the limit: batches are there when they are needed.", "data"
    syncs = [row for row in rank["syncs"] if row["calls"] >= max(2, rank["num_steps"] // 2)]
    if syncs:
        first = syncs[0]
        yield (
            f"{first['line'] or 'A library'} waits for a value ({first['reason']}, {counted(first['calls'], 'time')}, "
            f"{_ms(first['ms_a_step'])} ms a step): {first['advice']}.",
            "waits",
        )
    if rank["fallbacks"]:
        ops = {row["op"] for row in rank["fallbacks"]}
        first = rank["fallbacks"][0]
        yield (
            f"{counted(len(ops), 'op')} ran on the CPU, most often {first['op']} at {first['line']} "
            f"({counted(first['calls'], 'time')}).",
            "waits",
        )
    elif rank["num_steps"]:
        yield "No op ran on the CPU instead of the device.", "waits"


def _memory(rank: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    largest = max(
        (p for p in rank["programs"] if "graph" in p),
        key=lambda p: p["graph"]["memory"]["peak"],
        default=None,
    )
    if largest is not None:
        memory = largest["graph"]["memory"]
        yield (
            f"A step holds {_bytes(memory['peak'])} at its peak, {_bytes(memory['inputs'])} of it parameters, "
            "states and data.",
            "memory",
        )


def _ranks(data: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    found = data["lateness"]
    if found is None:
        return
    waiting = {
        rank["number"]: rank["mean"]["parts"][OTHERS] for rank in data["ranks"] if rank["num_steps"]
    }
    late = max(found["ranks"], key=lambda row: row["last"])
    yield (
        f"Rank {late['rank']} comes last to {100 * late['last']:.0f} % of the collectives, "
        f"{_ms(late['late_ms'])} ms after the first.",
        "job",
    )
    if waiting:
        most = max(waiting, key=lambda number: waiting[number])
        yield f"Rank {most} waits most for the others: {_ms(waiting[most])} ms a step.", "job"


def _ms(value: float) -> str:
    return f"{value:.3g}" if value < 1000 else f"{value:.0f}"


def _bytes(value: float) -> str:
    for unit in ("B", "KiB", "MiB"):
        if value < 1024:
            return f"{value:.3g} {unit}"
        value /= 1024
    return f"{value:.3g} GiB"
