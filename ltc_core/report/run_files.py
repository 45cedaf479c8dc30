"""The files of a run, read again: for each rank its slices, curves and programs, on one clock.

In: a directory that `recording` has written, of a run that has ended, was killed or goes on. Out: `Rank`s. Files of an
earlier run with more ranks in the same directory are left out.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from ltc_core.errors import ProfilerError
from ltc_core.timeline.merge import clock_of, files_of_ranks, offset_of
from ltc_core.timeline.trace_file import events_of, path_of_rank

__all__ = ["PROGRAMS", "TRACE", "Rank", "Slice", "read_ranks"]

TRACE, PROGRAMS = "trace.json", "programs.json"


class Slice(NamedTuple):
    """Something that a thread did, or that was under way; times in microseconds."""

    name: str
    start: float
    end: float
    args: dict[str, Any]

    @property
    def took(self) -> float:
        return self.end - self.start


class Rank:
    """What one process has recorded.

    Attributes:
        number: its rank.
        process: what it is: script, versions, settings.
        machine: what its threads can do at most; empty if it was killed.
        is_whole: whether it has ended by itself.
        programs: facts of each compile, in order.
        times: id of a program -> position of a node -> least nanoseconds in runs that called the ops one by one.
        kernels: id of a program -> its kernel calls in the order in which they run (name, positions of the nodes it
            computes), and the positions of nodes that are called one by one between them; none if it was not compiled.
        threads: name of a thread -> its slices, each inside or after the one before.
        lanes: name of a lane of slices that may overlap -> them.
        curves: name -> points (time, value).
    """

    def __init__(self, number: int) -> None:
        self.number = number
        self.process: dict[str, Any] = {}
        self.machine: dict[str, float] = {}
        self.is_whole = False
        self.programs: list[dict[str, Any]] = []
        self.times: dict[str, dict[int, int]] = {}
        self.kernels: dict[str, tuple[list[tuple[str, list[int]]], list[int]]] = {}
        self.threads: dict[str, list[Slice]] = {}
        self.lanes: dict[str, list[Slice]] = defaultdict(list)
        self.curves: dict[str, list[tuple[float, float]]] = defaultdict(list)

    @property
    def slices(self) -> list[Slice]:
        """The slices of all threads."""
        return [found for lane in self.threads.values() for found in lane]


def read_ranks(directory: Path) -> list[Rank]:
    """The ranks of a run.

    Raises:
        ProfilerError: there is no report in the directory.
    """
    files = _files(directory)
    first_clock: dict[str, Any] = {}
    ranks = []
    for number, programs, trace in files:
        rank = Rank(number)
        _read_programs(rank, programs)
        if trace.exists():
            clock, measured_ns, _ = clock_of(trace)
            first_clock = first_clock or clock
            _read_trace(rank, trace, offset_of(clock, first_clock, measured_ns) / 1000)
        ranks.append(rank)
    return ranks


def _files(directory: Path) -> list[tuple[int, Path, Path]]:
    """Number, programs and timeline of each rank of the last run."""
    alone = directory / PROGRAMS
    of_ranks = files_of_ranks(str(alone))
    if not of_ranks and not alone.exists():
        raise ProfilerError(
            f"there is no report in {directory}",
            got=f"no file {PROGRAMS}",
            next="run the script with LTC_REPORT set to this directory",
        )
    newest = max(of_ranks, key=lambda path: path.stat().st_mtime, default=None)
    if newest is None or (alone.exists() and alone.stat().st_mtime > newest.stat().st_mtime):
        return [(0, alone, directory / TRACE)]
    process = next(iter(events_of(newest)), {})
    count = int(process.get("world_size", len(of_ranks)))
    found = []
    for number in range(count):
        path = Path(path_of_rank(str(alone), number))
        if path.exists():
            found.append((number, path, Path(path_of_rank(str(directory / TRACE), number))))
    return found


def _read_programs(rank: Rank, file: Path) -> None:
    for facts in events_of(file):
        kind = facts.pop("kind", "")
        if kind == "process":
            rank.process = facts
        elif kind == "machine":
            rank.machine = facts
        elif kind == "end":
            rank.is_whole = True
        elif kind == "program":
            rank.programs.append(facts)
        elif kind == "kernels":  # of several sets of constants those compiled last
            rank.kernels[facts["id"]] = facts["calls"], facts["eager"]
        elif kind == "times":
            times = rank.times.setdefault(facts["id"], {})
            for at, took_ns in facts["ns"].items():  # the least of several runs
                times[int(at)] = min(took_ns, times.get(int(at), took_ns))


def _read_trace(rank: Rank, file: Path, offset_us: float) -> None:
    names: dict[int, str] = {}
    threads: dict[int, list[Slice]] = defaultdict(list)
    begun: dict[Any, dict[str, Any]] = {}
    for event in events_of(file):
        phase, at = event["ph"], event["ts"] + offset_us
        if phase == "X":
            found = Slice(event["name"], at, at + event["dur"], event["args"])
            threads[event["tid"]].append(found)
        elif phase == "b":
            begun[event["id"]] = event
        elif phase == "e":
            start = begun.pop(event["id"])
            found = Slice(start["name"], start["ts"] + offset_us, at, start["args"])
            rank.lanes[start["cat"]].append(found)
        elif phase == "C":
            rank.curves[event["name"]].append((at, event["args"]["value"]))
        elif event["name"] == "thread_name":
            names[event["tid"]] = event["args"]["name"]
    for lane, found_there in threads.items():
        name = names.get(lane, str(lane))
        while name in rank.threads:
            name += "'"
        rank.threads[name] = _in_order(found_there)
    for others in rank.lanes.values():
        others.sort(key=lambda found: found.start)


def _in_order(found: Sequence[Slice]) -> list[Slice]:
    """Slices by their start, an outer one before those in it."""
    return sorted(found, key=lambda one: (one.start, -one.end))
