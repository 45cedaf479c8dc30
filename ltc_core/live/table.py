"""States as a table: one row for each process, below it what was compiled, who is slowest, and who waits for whom.

In: what `board` has read. Out: lines of text, in which everything that a process wrote is escaped.
Who waits for whom is worked out here: a process says at which meeting it waits and which ranks come
to it; missing are those that do not wait at the same one. `top` and the launcher draw the lines on
a `screen`.
"""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import groupby

from ltc_core.errors import listed
from ltc_core.live.board import Seen
from ltc_core.live.sampler import WAITS_FOR_OTHERS
from ltc_core.live.screen import printable
from ltc_core.live.state import State, Wait
from ltc_core.metrics_report import bytes_text

__all__ = ["lines"]

_NAMED_S = (
    0.5  # a shorter wait for others is no news, and states of two processes are not of one moment
)
_SHOWN_S = 1.0  # since when: not said for less
_SILENT_S = 2.0  # a process that has written nothing for so long is stopped, or holds Python's lock
_STANDS_OUT = 0.1  # a rank that waits for others so much less is the slowest one
_STEPS_BEHIND = 2
_FEWEST_ROWS = 4
_HEAD = (
    "rank", "pid", "step", "steps/s", "ran", "programs", "queue", "memory", "peak", "CPU", "RSS", "doing",
)  # fmt: skip
_LEFT_OUT_FIRST = ("pid", "programs", "RSS", "peak", "CPU", "memory", "ran", "queue")
_LEFT = ("ran", "doing")  # columns of text; numbers stand at the right


def lines(found: Sequence[Seen], size: os.terminal_size, now_ns: int = 0) -> list[str]:
    """The text for some processes; [] for none.

    Args:
        size: of the terminal; of many ranks only so many are shown as it has lines for.
        now_ns: on the monotonic clock of the host; by default the present.
    """
    now_ns = now_ns or time.perf_counter_ns()
    text: list[str] = []
    jobs = [list(group) for _, group in groupby(found, key=_key)]
    for job in jobs:
        lines_of_job = size.lines // max(len(jobs), 1)
        text += _job(job, os.terminal_size((size.columns, lines_of_job)), now_ns)
    return text


def _key(seen: Seen) -> tuple[str, int]:
    return seen.state.job, 0 if seen.state.job else seen.state.pid


def _job(job: Sequence[Seen], size: os.terminal_size, now_ns: int) -> list[str]:
    missing = {id(seen): _missing(seen, job, now_ns) for seen in job}
    below = [*_new_programs(job, now_ns), *_slowest(job, missing), *_waiting(job, missing)]
    num_rows = max(size.lines - len(below) - 3, _FEWEST_ROWS)
    # Those that wait least come first, if not all can be shown: they are the ones to look at.
    shown = (
        sorted(job, key=lambda s: s.state.others_share)[:num_rows] if num_rows < len(job) else job
    )
    shown = sorted(shown, key=lambda s: (s.state.rank, s.state.pid))
    rows = [_HEAD, *(_row(seen, job, missing[id(seen)], now_ns) for seen in shown)]
    text = _aligned(rows, size.columns)
    if len(shown) < len(job):
        text.append(f"and {len(job) - len(shown)} more ranks, which wait for others most")
    absent = _absent(job)
    if absent:
        below.append(f"not there: {_ranks(absent)} (ended, or not begun)")
    return text + below


# -- rows ------------------------------------------------------------------------------------------


def _row(seen: Seen, job: Sequence[Seen], missing: Sequence[int], now_ns: int) -> tuple[str, ...]:
    s = seen.state
    return (
        str(s.rank) if s.rank >= 0 else "-",
        str(s.pid),
        str(s.step),
        f"{s.steps_per_s:.1f}" if not seen.is_ended else "",
        printable(s.ran),
        str(s.programs),
        str(s.queue),
        bytes_text(s.used_bytes),
        bytes_text(s.peak_bytes),
        f"{s.cpu_share:.1f}" if not seen.is_ended else "",
        bytes_text(s.rss_bytes),
        _doing(seen, missing, now_ns) + ("" if s.rank >= 0 else f" ({printable(s.script)})"),
    )


def _doing(seen: Seen, missing: Sequence[int], now_ns: int) -> str:
    s = seen.state
    if seen.is_ended:
        return "ended"
    if seen.is_stopped:
        return "stopped by a signal"
    silent_s = (now_ns - s.written_ns) / 1e9
    words = printable(s.doing)
    if missing:
        words += f", {_ranks(missing)}"
    since_s = (now_ns - s.since_ns) / 1e9
    if since_s >= _SHOWN_S:
        words += f", since {_seconds(since_s)}"
    if silent_s >= _SILENT_S:
        words += f"; no news for {_seconds(silent_s)}"
    return words


def _aligned(rows: Sequence[tuple[str, ...]], num_columns: int) -> list[str]:
    """The rows as lines. In a narrow terminal columns are left out, so that what a process does can be read."""
    widths = {name: max(len(row[k]) for row in rows) for k, name in enumerate(_HEAD)}
    kept = list(_HEAD)
    for name in _LEFT_OUT_FIRST:
        if sum(widths[name] + 2 for name in kept) - 2 < num_columns:
            break
        kept.remove(name)
    return [
        "  ".join(
            cell.ljust(widths[name]) if name in _LEFT else cell.rjust(widths[name])
            for cell, name in zip(row, _HEAD, strict=True)
            if name in kept
        ).rstrip()
        for row in rows
    ]


# -- below the rows --------------------------------------------------------------------------------


def _new_programs(job: Sequence[Seen], now_ns: int) -> list[str]:
    """The last new program, once for all ranks that had the same one."""
    ranks: dict[tuple[int, str], list[State]] = {}
    for seen in job:
        if seen.state.cause:
            ranks.setdefault((seen.state.cause_number, seen.state.cause), []).append(seen.state)
    found = []
    for (number, cause), states in list(ranks.items())[:3]:
        ago_s = (now_ns - max(s.cause_ns for s in states)) / 1e9
        of = f" of {_ranks([s.rank for s in states])}" if len(ranks) > 1 else ""
        found.append(f"last new program{of}: {number}, {_seconds(ago_s)} ago: {printable(cause)}")
    return found


def _slowest(job: Sequence[Seen], missing: Mapping[int, Sequence[int]]) -> list[str]:
    """The rank that the others wait for."""
    running = [seen.state for seen in job if not seen.is_ended and seen.state.rank >= 0]
    if len(running) < 2:
        return []
    awaited = Counter(rank for ranks in missing.values() for rank in ranks)
    least = min(running, key=lambda s: s.others_share)
    most = max(running, key=lambda s: s.others_share)
    behind, ahead = min(running, key=lambda s: s.step), max(running, key=lambda s: s.step)
    if len(awaited) == 1:
        return [f"slowest: rank {next(iter(awaited))}, which others wait for now"]
    if most.others_share - least.others_share >= _STANDS_OUT:
        return [
            f"slowest: rank {least.rank}, which waits for others {least.others_share:.0%} of the time; "
            f"rank {most.rank}: {most.others_share:.0%}"
        ]
    if ahead.step - behind.step >= _STEPS_BEHIND:
        return [
            f"slowest: rank {behind.rank}, at step {behind.step}; rank {ahead.rank}: {ahead.step}"
        ]
    return ["slowest: no rank stands out"]


def _waiting(job: Sequence[Seen], missing: Mapping[int, Sequence[int]]) -> list[str]:
    """Who waits for whom; ranks that wait for the same ones in one line."""
    ended = {seen.state.rank for seen in job if seen.is_ended}
    who: dict[tuple[int, ...], list[int]] = {}
    for seen in job:
        if missing[id(seen)]:
            who.setdefault(tuple(missing[id(seen)]), []).append(seen.state.rank)
    found = []
    for awaited, ranks in who.items():
        gone = [rank for rank in awaited if rank in ended]
        words = f", of which {_ranks(gone)} ended" if gone else ""
        verb = "waits" if len(ranks) == 1 else "wait"
        found.append(f"{_ranks(ranks)} {verb} for {_ranks(awaited)}{words}")
    return found


def _missing(seen: Seen, job: Sequence[Seen], now_ns: int) -> list[int]:
    """The ranks that a process waits for; [] if it waits for none, or not for long."""
    state = seen.state
    if seen.is_ended or state.doing != WAITS_FOR_OTHERS:
        return []
    waits = [wait for wait in state.waits if (now_ns - wait.since_ns) / 1e9 >= _NAMED_S]
    there = {other.state.rank: other for other in job}
    return sorted(
        {
            rank
            for wait in waits
            for rank in wait.members
            if rank != state.rank and rank in there and not _is_at(there[rank], wait)
        }
    )


def _is_at(seen: Seen, wait: Wait) -> bool:
    return not seen.is_ended and any(other.at == wait.at for other in seen.state.waits)


def _absent(job: Sequence[Seen]) -> list[int]:
    """The ranks of this host that have no file."""
    ranks = {seen.state.rank for seen in job}
    state = job[0].state
    if state.rank < 0 or not 1 < state.local_size <= 4096:
        return []
    first = state.rank - state.local_rank
    return sorted(set(range(first, first + state.local_size)) - ranks)


def _ranks(ranks: Sequence[int]) -> str:
    return f"rank{'s' * (len(ranks) > 1)} {listed(ranks)}"


def _seconds(seconds: float) -> str:
    if seconds < 120:
        return f"{max(seconds, 0.0):.0f} s"
    minutes = int(seconds // 60)
    return f"{minutes} min" if minutes < 120 else f"{minutes // 60} h {minutes % 60} min"
