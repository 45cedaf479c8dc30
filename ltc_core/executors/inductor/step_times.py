"""Durations of steps with replay and with compiled code, kept on disk for later runs of the script.

The file lies beside the library of the graph's first compiled subgraph and goes with it. The keys of libraries tell
machine, number of threads and numeric flags, so the durations are those of this machine. Used by `tiers`.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from collections.abc import Sequence
from pathlib import Path

from ltc_core.program.program import StepTimes

__all__ = ["file_of", "read", "write"]


def file_of(root: Path, keys: Sequence[str]) -> Path:
    """The file of a graph, by the keys of its compiled subgraphs."""
    name = hashlib.sha256(" ".join(keys).encode()).hexdigest()[:16]
    return root / keys[0] / f"steps-{name}.json"


def read(path: Path) -> StepTimes | None:
    """What is kept; None if there is nothing that can be read."""
    try:
        found = json.loads(path.read_text("utf-8"))
        times = StepTimes(float(found["replay_ns"]), float(found["compiled_ns"]))
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return times if times.replay_ns > 0 and times.compiled_ns > 0 else None


def write(path: Path, times: StepTimes) -> None:
    """Keep durations. A directory that cannot be written to, or is gone, keeps none."""
    text = json.dumps({"replay_ns": times.replay_ns, "compiled_ns": times.compiled_ns})
    temporary = path.with_name(f"{path.name}.{os.getpid()}")
    with contextlib.suppress(OSError):
        temporary.write_text(text, "utf-8")
        temporary.replace(path)
