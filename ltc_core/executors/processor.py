"""The processor of this machine: for the keys of programs that are compiled for it, and how many threads it runs."""

from __future__ import annotations

import functools
import hashlib
import os
from pathlib import Path

import torch

__all__ = ["num_cores", "processor"]


@functools.cache
def processor() -> str:
    """Digest of the processor's model and features."""
    try:
        rows = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return torch.backends.cpu.get_cpu_capability()
    wanted = ("model name", "flags", "Features")
    about = sorted({row for row in rows if row.startswith(wanted)})
    return hashlib.sha256("\n".join(about).encode()).hexdigest()[:16]


def num_cores() -> int:
    """Number of cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
