"""Durations of steps with replay and with compiled code, kept on disk for later runs of the script.

The file lies beside the library of the graph's first compiled subgraph and goes with it. The keys of libraries tell
machine, number of threads and numeric flags, so the durations are those of this machine. They are measured again after
a day: other programs may have used its cores. Used by `tiers`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import os
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from ltc_core.program.program import StepTimes

__all__ = ["file_of", "read", "write"]


def file_of(root: Path, keys: Sequence[str]) -> Path:
    """The file of a graph, by the keys of its compiled subgraphs."""
    name = hashlib.sha256(" ".join(keys).encode()).hexdigest()[:16]
    return root / keys[0] / f"steps-{name}.json"


# Whether the script waits for each step -> name in the file.
_NAMES = {True: "waited", False: "free"}
_FIELDS = [field.name for field in dataclasses.fields(StepTimes)]
_KEPT_S = 24 * 3600


def read(path: Path) -> dict[bool, StepTimes]:
    """What is kept, by whether the script waits for each step; empty if there is nothing that can be read."""
    try:
        kept = json.loads(path.read_text("utf-8"))
        found = {
            is_waited: StepTimes(*(float(kept[name][each]) for each in _FIELDS))
            for is_waited, name in _NAMES.items()
            if name in kept
        }
    except (OSError, ValueError, KeyError, TypeError):
        return {}
    if not all(min(dataclasses.astuple(each)) > 0 for each in found.values()):
        return {}
    now = time.time()
    return {key: each for key, each in found.items() if 0 <= now - each.measured_s < _KEPT_S}


def write(path: Path, times: Mapping[bool, StepTimes]) -> None:
    """Keep durations. A directory that cannot be written to, or is gone, keeps none."""
    text = json.dumps({_NAMES[key]: dataclasses.asdict(each) for key, each in times.items()})
    temporary = path.with_name(f"{path.name}.{os.getpid()}")
    with contextlib.suppress(OSError):
        temporary.write_text(text, "utf-8")
        temporary.replace(path)
