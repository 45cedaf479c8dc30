"""What happens when: the runtime begins and ends slices here, while a timeline is recorded or PyTorch profiles.

`watched` or `begin` is called where a step is cut, a program runs, a value is waited for, data moves, a graph is
compiled or a batch is read, and never for an op. They give None while nobody watches. A `Slice` becomes an event of the
running `Timeline` and a range of PyTorch's profile; for a live view, `marks` keep what is under way. A thread writes
the events into the `trace_file` twice a second. `start` and `stop` are called by `profiler`, `start_as_set` (LTC_TRACE)
when the first device is used.
"""

from __future__ import annotations

import contextlib
import gc
import itertools
import os
import socket
import sys
import threading
import time
import warnings
import weakref
from collections import deque
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch.autograd import profiler as _flag

from ltc_core.errors import ProfilerError
from ltc_core.settings import rank_in_job, settings
from ltc_core.timeline import as_set, marks
from ltc_core.timeline.marks import Awaited, Mark
from ltc_core.timeline.merge import merge_if_whole
from ltc_core.timeline.trace_file import TraceFile, encode, path_of_rank

__all__ = ["Slice", "Timeline", "begin", "start", "start_as_set", "stop", "watched"]

_WRITE_EVERY_S = 0.5
_SHORTEST_COLLECTION_NS = 500_000  # of the garbage collector: shorter ones are left out
_JOIN_S = 5.0
_MOST_TEXTS = 10_000
_IDS_OF_A_RANK = 1 << 32  # ids of arrows and lanes are one space for all processes of a file

_range: Any = torch._C._profiler._RecordFunctionFast


def _us(ns: int) -> str:
    text = f"{ns:04d}"
    return f"{text[:-3]}.{text[-3:]}"


class Slice:
    """Something under way. It begins when it is made."""

    __slots__ = ("_args", "_facts", "_flow", "_lane", "_name", "_range", "_started_ns", "_timeline")

    def __init__(
        self, timeline: Timeline | None, name: str, lane: str, ends_elsewhere: bool
    ) -> None:
        self._timeline = timeline
        self._name = name
        self._lane = lane
        self._facts = ""
        self._args: Mapping[str, Any] = {}
        self._flow: tuple[str, int, int] | None = None
        self._range: Any = None
        if _flag._is_profiler_enabled and not ends_elsewhere:
            self._range = _range(f"ltc::{name}")
            self._range.__enter__()
        self._started_ns = time.perf_counter_ns()

    def note(self, facts: str = "", **args: Any) -> None:
        """Set what is shown beside it.

        Args:
            facts: the inside of a JSON object, encoded once for many slices; see `facts`.
            args: more of them.
        """
        self._facts = facts
        self._args = args

    def send_arrow(self) -> int:
        """Begin an arrow here; returns its id, 0 if no timeline is recorded."""
        if self._timeline is None:
            return 0
        number = next(self._timeline.ids)
        self._flow = "s", number, self._started_ns
        return number

    def pass_arrow(self, number: int) -> None:
        """Lead an arrow through the beginning of this slice."""
        if number:
            self._flow = "t", number, self._started_ns

    def end_arrow(self, number: int) -> None:
        """End an arrow here and now."""
        if number:
            self._flow = "f", number, time.perf_counter_ns()

    def __enter__(self) -> Slice:
        return self

    def __exit__(self, *error: object) -> None:
        self.end()

    def end(self) -> None:
        if self._timeline is not None:
            took_ns = time.perf_counter_ns() - self._started_ns
            self._timeline.add(
                (
                    self._name,
                    self._lane or self._timeline.lane_of_thread(),
                    self._started_ns,
                    took_ns,
                    self._facts,
                    self._args,
                    self._flow,
                )
            )
        if self._range is not None:
            self._range.__exit__(None, None, None)


def is_watched() -> bool:
    """Whether somebody watches: a timeline of ours, or PyTorch's profiler. Cost: 50 ns."""
    return on is not None or _flag._is_profiler_enabled


def begin(name: str, lane: str = "", ends_elsewhere: bool = False) -> Slice | None:
    """Begin a slice of this thread; None if nobody watches.

    Args:
        lane: a lane beside the threads, in which slices may overlap.
        ends_elsewhere: it may end in another thread, or before one that began later.

    Cost: 60 ns if nobody watches.
    """
    if not is_watched():
        return None
    return Slice(on, name, lane, ends_elsewhere)


_unseen: contextlib.AbstractContextManager[None] = contextlib.nullcontext()


def watched(
    name: str, lane: str = "", awaited: Awaited | None = None
) -> contextlib.AbstractContextManager[Slice | None]:
    """Context manager: the block is a slice of this thread, which it gets; None if nobody watches. See `begin`.

    Args:
        awaited: the meeting, where the block waits for other processes; a live view says who is missing.
    """
    inner = begin(name, lane) or _unseen
    return inner if marks.on is None else Mark(marks.on, name, lane, awaited, inner)


def facts(**args: Any) -> str:
    """The arguments of many slices, encoded once."""
    return encode(args)[1:-1]


# -- the timeline of this process ------------------------------------------------------------------

# Name, lane (its number, or its name if slices may overlap), start, duration, facts, arguments, arrow.
Event = tuple[str, int | str, int, int, str, Mapping[str, Any], tuple[str, int, int] | None]

Point = tuple[str, int, int]  # of a curve: name, time, value


class Timeline:
    """Events of this process, on their way into a file.

    Args:
        path: the file; in a job the one that the files of all ranks are merged into.
    """

    def __init__(self, path: str) -> None:
        self._rank, self._world_size = rank_in_job()
        self._path = path
        self._file = TraceFile(path_of_rank(path, self._rank))
        self._pid = os.getpid()
        self._events: deque[Event | Point | str] = deque()
        self._lane = threading.local()
        self._lanes: dict[str, list[tuple[int, weakref.ref[threading.Thread]]]] = {}
        self._num_lanes = 0
        self._lock = threading.Lock()  # of lanes
        self._counters: dict[str, int] = {}
        self._texts: dict[str, str] = {}
        self._collection_lane = 0
        self._collection_ns = 0
        self._ending = threading.Event()
        self.ids = itertools.count((self._rank or 0) * _IDS_OF_A_RANK + 1)
        self._describe()
        self._thread = threading.Thread(target=self._write_on, name="ltc-timeline", daemon=True)
        self._thread.start()
        gc.callbacks.append(self._on_collection)

    def add(self, event: Event) -> None:
        self._events.append(event)

    def lane_of_thread(self) -> int:
        """The lane of this thread. Threads of one name that follow each other share one."""
        try:
            return self._lane.number  # type: ignore[no-any-return]
        except AttributeError:
            number = self._lane.number = self._new_lane()
            return number

    def _new_lane(self) -> int:
        thread = threading.current_thread()
        with self._lock:
            known = self._lanes.setdefault(thread.name, [])
            for k, (number, last) in enumerate(known):
                before = last()
                if before is None or not before.is_alive():
                    known[k] = number, weakref.ref(thread)
                    return number
            number = self._name_lane(thread.name)
            known.append((number, weakref.ref(thread)))
            return number

    def _name_lane(self, name: str) -> int:
        self._num_lanes += 1
        number = self._num_lanes
        self._add_metadata("thread_name", {"name": name}, number)
        self._add_metadata("thread_sort_index", {"sort_index": number}, number)
        return number

    def note_counter(self, name: str, value: int) -> None:
        """Add a point of a curve, if it has changed."""
        if self._counters.get(name) != value:
            self._counters[name] = value
            self._events.append((name, time.perf_counter_ns(), value))

    def note_offset(self, offset_ns: int) -> None:
        """Note what to add to this process's clock for that of rank 0, on another host."""
        self._add_metadata("ltc_offset", {"offset_ns": offset_ns})

    def _add_metadata(self, name: str, args: dict[str, Any], lane: int = 0) -> None:
        event = {"ph": "M", "name": name, "pid": self._pid, "tid": lane, "ts": 0, "args": args}
        self._events.append(encode(event))

    def _describe(self) -> None:
        script = os.path.basename(sys.argv[0]) or "python" if sys.argv else "python"
        title = script if self._rank is None else f"rank {self._rank}: {script}"
        self._add_metadata("process_name", {"name": title})
        self._add_metadata("process_sort_index", {"sort_index": self._rank or 0})
        host = socket.gethostname()
        self._add_metadata("process_labels", {"labels": f"{host}, process {self._pid}"})
        # On one boot of one host all processes have one monotonic clock.
        boot = ""
        with contextlib.suppress(OSError):
            boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        clock = {
            "rank": self._rank or 0,
            "boot": boot or host,
            "wall_ns": time.time_ns(),
            "monotonic_ns": time.perf_counter_ns(),
        }
        self._add_metadata("ltc_clock", clock)

    def _on_collection(self, phase: str, info: dict[str, int]) -> None:
        """Called by the garbage collector, in any thread; a collection holds all of them up."""
        now_ns = time.perf_counter_ns()
        if phase == "start":
            self._collection_ns = now_ns
        elif now_ns - self._collection_ns >= _SHORTEST_COLLECTION_NS:
            args = {"generation": info["generation"], "collected": info["collected"]}
            took_ns = now_ns - self._collection_ns
            event = ("collect garbage", "garbage collection", self._collection_ns, took_ns)
            self._events.append((*event, "", args, None))

    # -- writing -------------------------------------------------------------------------------

    def _write_on(self) -> None:
        while not self._ending.wait(_WRITE_EVERY_S):
            try:
                self._write()
            except OSError as error:
                self._give_up(error)
                return

    def _give_up(self, error: OSError) -> None:
        global on
        if on is self:
            on = None
        self.forget()
        self._events.clear()
        warnings.warn(
            f"the timeline cannot be written to {self._file.path}: {error.strerror or error}. Nothing more is "
            "written to it; training goes on.",
            stacklevel=2,
        )

    def _write(self) -> None:
        events, lines = self._events, []
        while events:
            event = events.popleft()
            if isinstance(event, str):
                lines.append(event)
            else:
                lines.append(self._text(event) if len(event) == 7 else self._counter_text(event))
        if lines:
            self._file.write(lines)

    def _text(self, event: Event) -> str:
        """One event; several lines if it has an arrow, or lies in a lane of slices that may overlap."""
        # With `json` for all arguments and floats for the times, writing an event takes 11.2 us of a core, not 5.9
        # (20,000 events, two busy cores).
        name, lane, started_ns, took_ns, facts, args, flow = event
        inside = facts
        for key, value in args.items():
            comma = "," if inside else ""
            inside += f'{comma}"{key}":{value if type(value) is int else self._encoded(value)}'
        if type(lane) is str:
            head = f'"cat":"{lane}","id":{next(self.ids)},"pid":{self._pid},"tid":0,"name":"{name}"'
            return (
                f'{{"ph":"b",{head},"ts":{_us(started_ns)},"args":{{{inside}}}}},\n'
                f'{{"ph":"e",{head},"ts":{_us(started_ns + took_ns)}}}'
            )
        place = f'"pid":{self._pid},"tid":{lane}'
        text = (
            f'{{"ph":"X","cat":"ltc","name":"{name}",{place},"ts":{_us(started_ns)},"dur":{_us(took_ns)},'
            f'"args":{{{inside}}}}}'
        )
        if flow is None:
            return text
        phase, number, at_ns = flow
        bound = ',"bp":"e"' if phase == "f" else ""
        return (
            f'{text},\n{{"ph":"{phase}","cat":"launch","name":"launch","id":{number},{place},'
            f'"ts":{_us(at_ns)}{bound}}}'
        )

    def _counter_text(self, point: Point) -> str:
        name, now_ns, value = point
        return (
            f'{{"ph":"C","name":{self._encoded(name)},"pid":{self._pid},"tid":0,"ts":{_us(now_ns)},'
            f'"args":{{"value":{value}}}}}'
        )

    def _encoded(self, value: Any) -> str:
        """A value as JSON. Most texts come again and again."""
        if type(value) is not str:
            return encode(value)
        found = self._texts.get(value)
        if found is None:
            if len(self._texts) >= _MOST_TEXTS:
                self._texts.clear()
            found = self._texts[value] = encode(value)
        return found

    def close(self) -> None:
        """Write what is left, and in a job merge the files of all ranks if this was the last one."""
        self._ignore_collections()
        self._ending.set()
        self._thread.join(_JOIN_S)
        self._add_metadata("ltc_end", {})
        last = str(self._events.pop())
        try:
            self._write()
            self._file.close(last)
            if self._rank is not None:
                merge_if_whole(self._path, self._world_size)
        except OSError as error:
            raise ProfilerError(
                f"the timeline {self._file.path} could not be written to its end",
                got=error.strerror or str(error),
                next="make room; what is in the file can be opened",
            ) from None

    def forget(self) -> None:
        """Leave the file as it is: in a forked child to the parent."""
        self._ignore_collections()
        self._file.drop()

    def _ignore_collections(self) -> None:
        with contextlib.suppress(ValueError):  # they are ignored already
            gc.callbacks.remove(self._on_collection)


on: Timeline | None = None  # while one is recorded
_file_of_parent = ""  # the file of the process that forked this one, if it records one
_lock = threading.Lock()


def start(path: str | os.PathLike[str]) -> None:
    """Record a timeline of this process into a file.

    Raises:
        ProfilerError: one is recorded already, or the file cannot be written.
    """
    global on
    with _lock:
        if on is not None:
            raise ProfilerError(
                "a timeline is recorded already",
                got=f"{on._file.path}, and {os.fspath(path)}",
                next="end the first one, or unset LTC_TRACE; only one is recorded at a time",
            )
        on = Timeline(os.fspath(path))


def stop() -> None:
    """End the timeline and close its file.

    Raises:
        ProfilerError: none is recorded, or the file could not be written.
    """
    global on
    with _lock:
        found, on = on, None
    if found is None:
        raise ProfilerError("no timeline is recorded", next="call start() before")
    found.close()


def start_as_set() -> None:
    """Start a timeline if LTC_TRACE asks for one.

    A forked child of a process that records one does not, unless it has become a rank, with a file of its own.

    Raises:
        SettingsError: the file of LTC_TRACE cannot be written.
    """
    path = settings.trace
    if path is None or on is not None:
        return
    as_set.start_as_set(start, path, _file_of_parent, "LTC_TRACE")


def at_exit() -> None:
    if on is not None:
        as_set.stop_at_exit(stop)


def after_fork_in_child() -> None:
    global on, _file_of_parent, _lock
    _lock = threading.Lock()
    if on is not None:
        found, on = on, None
        _file_of_parent = found._file.path
        found.forget()
