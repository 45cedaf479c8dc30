"""The timelines of a job's processes in one file, on the clock of rank 0.

In: the files of the ranks (`trace_file.path_of_rank`). Out: one file, in which each rank is a process. On one host all
processes have one monotonic clock. Files of other hosts are moved by the offset that the job has measured, else by
that of the hosts' wall clocks. Called by `slices` when the last rank ends, and by `python -m ltc_core.timeline`.
"""

from __future__ import annotations

import glob
import os
import re
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from ltc_core.errors import ProfilerError
from ltc_core.timeline.trace_file import (
    encode,
    events_of,
    is_being_written,
    is_whole,
    path_of_rank,
)

__all__ = ["clock_of", "files_of_ranks", "merge", "merge_if_whole", "offset_of"]


def files_of_ranks(path: str) -> list[Path]:
    """The files of the ranks that lie beside a job's file, in the order of the ranks."""
    root, suffix = os.path.splitext(path)
    name = re.compile(re.escape(os.path.basename(root)) + r"\.rank(\d+)" + re.escape(suffix))
    found = {}
    for file in glob.glob(f"{glob.escape(root)}.rank*{glob.escape(suffix)}"):
        matched = name.fullmatch(os.path.basename(file))
        if matched is not None:
            found[int(matched[1])] = Path(file)
    return [found[rank] for rank in sorted(found)]


def merge_if_whole(path: str, world_size: int) -> bool:
    """Merge the files of all ranks if all are closed: the last rank to end does so. Returns whether it did."""
    files = [Path(path_of_rank(path, rank)) for rank in range(world_size)]
    if not all(map(is_whole, files)) or is_being_written(path):
        return False
    merge(path, files)
    return True


def merge(path: str, files: Iterable[Path]) -> None:
    """Write the events of several files into one, which others cannot read.

    Raises:
        ProfilerError: there are no files.
        OSError: one cannot be read, or the new one cannot be written.
    """
    files = list(files)
    if not files:
        raise ProfilerError(
            f"there are no timelines to merge into {path}",
            got=f"no file {path_of_rank(path, 0)}",
            next="copy the files of all ranks into one directory, and name the file that LTC_TRACE named",
        )
    target = Path(path).absolute()
    descriptor, temporary = tempfile.mkstemp(prefix=f".{target.name}.", dir=target.parent)
    try:
        with open(descriptor, "w", encoding="utf-8") as out:
            clock: dict[str, Any] = {}
            taken: set[int] = set()
            out.write("[\n")
            for file in files:
                own, measured_ns, pid = clock_of(file)
                clock = clock or own
                offset_ns = offset_of(own, clock, measured_ns)
                number = pid if pid not in taken else max(taken) + 1
                taken.add(number)
                for event in events_of(file):
                    event["pid"] = number
                    if event["ph"] != "M":
                        event["ts"] = round(event["ts"] + offset_ns / 1000, 3)
                    out.write(encode(event).replace("<", "\\u003c") + ",\n")
            out.write(
                encode({"ph": "M", "name": "ltc_end", "pid": 0, "tid": 0, "ts": 0, "args": {}})
            )
            out.write("\n]\n")
        os.replace(temporary, target)
    except BaseException:
        os.unlink(temporary)
        raise


def clock_of(file: Path) -> tuple[dict[str, Any], int | None, int]:
    """The clock of a file's process, its offset from rank 0 if that was measured, and the process's id."""
    clock: dict[str, Any] = {}
    offset_ns, pid = None, 0
    for event in events_of(file):
        if event["ph"] == "M" and event["name"] == "ltc_clock":
            clock, pid = event["args"], event["pid"]
        elif event["ph"] == "M" and event["name"] == "ltc_offset":
            offset_ns = event["args"]["offset_ns"]
    return clock, offset_ns, pid


def offset_of(clock: dict[str, Any], of_first: dict[str, Any], measured_ns: int | None) -> int:
    """What to add to the times of a process: nothing on the first one's host, else as measured, or by wall clocks."""
    if not clock or clock["boot"] == of_first["boot"]:
        return 0
    if measured_ns is not None:
        return measured_ns
    ahead = of_first["wall_ns"] - of_first["monotonic_ns"]
    return int(clock["wall_ns"] - clock["monotonic_ns"] - ahead)
