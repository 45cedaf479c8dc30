"""What a report is made of, while the run goes on: a timeline, and each program with its kernels and times of ops.

Each process writes two files into the directory, both readable at every moment: its timeline (`timeline.slices`) and
its programs. `start` and `stop` are called by `profiler`, `start_as_set` (LTC_REPORT) when the first device is used;
`note_program` by `runtime.program_cache`. The last process to end makes the page (`build`).
"""

from __future__ import annotations

import functools
import os
import platform
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from ltc_core import source
from ltc_core.debug.explain import Cause
from ltc_core.debug.report import graph_hash
from ltc_core.errors import ProfilerError, SettingsError
from ltc_core.graph.ir import Graph, Node
from ltc_core.record import modules
from ltc_core.report.build import PROGRAMS, TRACE, build
from ltc_core.report.program_facts import program_facts
from ltc_core.settings import rank_in_job, settings
from ltc_core.timeline import as_set, op_kernels, op_times, slices
from ltc_core.timeline.trace_file import (
    TraceFile,
    encode,
    is_being_written,
    is_whole,
    path_of_rank,
)

__all__ = ["note_program", "start", "start_as_set", "stop"]

# Programs whose graphs are kept whole: where each step makes a new program, the first ones tell why.
_MOST_GRAPHS = 64
_MATRIX = 768  # rows of the matrices, and bytes of the vectors, by which the machine is measured
_VECTOR_BYTES = 1 << 26


class Recording:
    """The programs of this process, on their way into a file.

    Args:
        directory: made if it does not exist, for this user alone.

    Raises:
        ProfilerError: a timeline is recorded already, or the directory cannot be written.
    """

    def __init__(self, directory: str) -> None:
        self.directory = Path(directory).absolute()
        rank, self._world_size = rank_in_job()
        self._rank = rank
        try:
            self.directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        except OSError as error:
            raise ProfilerError(
                f"the report cannot be written to {directory}",
                got=error.strerror or str(error),
                next="name a directory that can be written",
            ) from None
        self._file = TraceFile(path_of_rank(str(self.directory / PROGRAMS), rank))
        try:
            slices.start(self.directory / TRACE)
        except BaseException:
            self._file.drop()
            raise
        self._lock = threading.Lock()
        self._numbers: dict[str, int] = {}  # hash of a graph -> number of its program here
        # Hash of a graph -> the identities of its nodes, and the graph, which keeps them alive.
        self._nodes: dict[str, set[int]] = {}
        self._kept: dict[str, Graph] = {}
        self._write(self._facts())
        modules.is_on = True
        op_times.on = self._note_times
        op_kernels.on = self._note_kernels

    def _write(self, facts: dict[str, Any]) -> None:
        try:
            self._file.write([encode(facts)])
        except OSError as error:
            self.forget()
            print(
                f"ltc: the report cannot be written to {self._file.path}: {error.strerror or error}; training goes on",
                file=sys.stderr,
            )

    def _facts(self) -> dict[str, Any]:
        return {
            "kind": "process",
            "rank": self._rank or 0,
            "world_size": self._world_size,
            "pid": os.getpid(),
            "script": " ".join([os.path.basename(sys.argv[0]) or "python", *sys.argv[1:]]),
            "began": time.time(),
            "torch": torch.__version__,
            "python": platform.python_version(),
            "system": platform.platform(),
            "cores": len(os.sched_getaffinity(0)),
            "threads": torch.get_num_threads(),
            "executor": settings.executor,
            "device": settings.device,
            "settings": {k: v for k, v in sorted(os.environ.items()) if k.startswith("LTC_")},
        }

    def note_program(self, graph: Graph, cause: Cause | None, reason: str) -> None:
        """Write the facts of a program that was built."""
        if on is not self:
            return
        name = graph_hash(graph)
        with self._lock:
            is_new = name not in self._numbers
            number = self._numbers.setdefault(name, len(self._numbers) + 1)
        facts: dict[str, Any] = {
            "kind": "program",
            "id": name,
            "number": number,
            "compile": cause.number if cause is not None else number,
            "nearest": cause.nearest if cause is not None else None,
            "cause": cause.sentence if cause is not None else "",
            "why": cause.kind if cause is not None else "",
            "reason": reason,
            "line": source.user_line(),
            "ops": len(graph.nodes),
        }
        if is_new and number <= _MOST_GRAPHS:
            facts["graph"] = program_facts(graph)
            with self._lock:
                self._kept[name] = graph
                self._nodes[name] = {id(node) for node in graph.nodes}
        self._write(facts)

    def _note_times(self, nodes: Sequence[Node], times_ns: Sequence[int]) -> None:
        ids = [id(node) for node in nodes]
        with self._lock:
            # Graphs share nodes, and some nodes of a graph are replaced before it runs: the likest one is meant.
            alike = {name: sum(i in known for i in ids) for name, known in self._nodes.items()}
            name = max(alike, key=lambda name: (alike[name], -len(self._nodes[name])), default="")
            graph = self._kept[name] if alike.get(name) else None
        if graph is None:
            return
        makers = {(node.first, node.op): at for at, node in enumerate(graph.nodes)}
        found = {}
        for node, took_ns in zip(nodes, times_ns, strict=True):
            at = makers.get((node.first, node.op))
            if at is not None:
                found[at] = took_ns
        self._write({"kind": "times", "id": name, "ns": found})

    def _note_kernels(
        self, graph: Graph, calls: Sequence[tuple[str, Sequence[Node]]], eager: Sequence[Node]
    ) -> None:
        name = graph_hash(graph)
        with self._lock:
            known = name in self._kept
        if not known:
            return
        # The compiled graph has other nodes for the same values, and more of them where reductions are divided.
        makers = {node.first: at for at, node in enumerate(graph.nodes) if node.outs}

        def positions(nodes: Sequence[Node]) -> list[int]:
            return sorted({makers[node.first] for node in nodes if node.first in makers})

        rows = [(kernel, positions(nodes)) for kernel, nodes in calls]
        self._write(
            {
                "kind": "kernels",
                "id": name,
                "calls": [row for row in rows if row[1]],
                "eager": positions(eager),
            }
        )

    def close(self) -> None:
        """Measure the machine, end the files, and make the page if this process is the last one.

        Raises:
            ProfilerError: a file could not be written to its end.
        """
        self.forget()
        if slices.on is not None:  # else its file could not be written, which it has said
            slices.stop()
        try:
            self._file.write([encode({"kind": "machine", **_machine()})])
            self._file.close(encode({"kind": "end", "ended": time.time()}))
            if self._is_last():
                path = build(self.directory)
                print(f"ltc: the report of this run is {path}", file=sys.stderr, flush=True)
        except OSError as error:
            raise ProfilerError(
                f"the report {self.directory} could not be written to its end",
                got=error.strerror or str(error),
                next=f"make room, then: python -m ltc_core.report {self.directory}",
            ) from None

    def _is_last(self) -> bool:
        """Whether all processes of the job have closed their files."""
        if self._rank is None:
            return True
        root = str(self.directory / PROGRAMS)
        files = [Path(path_of_rank(root, rank)) for rank in range(self._world_size)]
        return all(map(is_whole, files)) and not is_being_written(root)

    def forget(self) -> None:
        """Write nothing more."""
        global on
        if on is self:
            on = None
        modules.is_on = False
        op_times.on = None
        op_kernels.on = None

    def drop(self) -> None:
        """Leave the file to the parent, in a forked child."""
        self.forget()
        self._file.drop()


@functools.cache
def _machine() -> dict[str, float]:
    """What this process's threads can do at most: float operations and bytes a second. Cost: 0.2 s."""
    left, right = torch.ones(_MATRIX, _MATRIX), torch.ones(_MATRIX, _MATRIX)
    source = torch.ones(_VECTOR_BYTES // 4)
    target = torch.empty_like(source)
    with torch.no_grad():
        flops = 2 * _MATRIX**3 / _least_s(lambda: torch.mm(left, right))
        bandwidth = 2 * _VECTOR_BYTES / _least_s(lambda: target.copy_(source))
    return {"flops": flops, "bandwidth": bandwidth}


def _least_s(call: Any) -> float:
    found = []
    for _ in range(5):
        started = time.perf_counter()
        call()
        found.append(time.perf_counter() - started)
    return min(found)


on: Recording | None = None  # while a report is recorded
_lock = threading.Lock()


def start(directory: str | os.PathLike[str]) -> None:
    """Record a report of this process.

    Raises:
        ProfilerError: one is recorded already, or the directory cannot be written.
    """
    global on
    with _lock:
        if on is not None:
            raise ProfilerError(
                "a report is recorded already",
                got=f"{on.directory}, and {os.fspath(directory)}",
                next="end the first one, or unset LTC_REPORT; only one is recorded at a time",
            )
        on = Recording(os.fspath(directory))


def stop() -> None:
    """End the report, and make its page.

    Raises:
        ProfilerError: none is recorded, or its files could not be written.
    """
    with _lock:
        found = on
    if found is None:
        raise ProfilerError("no report is recorded", next="call start() before")
    found.close()


def note_program(graph: Graph, cause: Cause | None, reason: str) -> None:
    """Write the facts of a program, if a report is recorded."""
    if on is not None:
        on.note_program(graph, cause, reason)


_directory_of_parent = ""  # where the process that forked this one records


def start_as_set() -> None:
    """Record a report if LTC_REPORT asks for one.

    A forked child of a process that records one does not, unless it has become a rank, with files of its own.

    Raises:
        SettingsError: the directory of LTC_REPORT cannot be written, or LTC_TRACE is set, too.
    """
    path = settings.report
    if path is None or on is not None:
        return
    if settings.trace is not None:
        raise SettingsError(
            "a report has a timeline of its own, and only one is recorded at a time",
            got=f"LTC_TRACE={settings.trace} and LTC_REPORT={path}",
            where="LTC_REPORT",
            next=f"unset LTC_TRACE; the timeline is {path}/{TRACE}",
        )
    as_set.start_as_set(start, path, _directory_of_parent, "LTC_REPORT")


def at_exit() -> None:
    if on is not None:
        as_set.stop_at_exit(stop)


def after_fork_in_child() -> None:
    global _directory_of_parent, _lock
    _lock = threading.Lock()
    if on is not None:
        _directory_of_parent = path_of_rank(str(on.directory), on._rank)
        on.drop()
