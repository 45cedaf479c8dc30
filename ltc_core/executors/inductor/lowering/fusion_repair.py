"""A repair of PyTorch's compiler before 2.15: it fused a write with a read of what the write destroys.

Where memory is written twice, the second writing kernel may be fused with one that reads the memory between the writes
at other places, if its reads have the name of the first write's result: `x[0] = 4` followed by `x.copy_(x.flip(0))`.
PyTorch compared the name of the memory only. Used by `build_artifact`, in the compiler's process only.
"""

from __future__ import annotations

from typing import Any
from unittest import mock

from torch._inductor.dependencies import MemoryDep
from torch._inductor.scheduler import Scheduler

__all__ = ["repaired"]

_fusable = Scheduler.fusable_weak_dep


def repaired() -> Any:
    """A context in which such kernels are not fused."""
    return mock.patch.object(Scheduler, "fusable_weak_dep", _fusable_if_safe)


def _fusable_if_safe(scheduler: Any, dependency: Any, reader: Any, writer: Any) -> bool:
    if not _fusable(scheduler, dependency, reader, writer):
        return False
    real_names = scheduler.mutation_real_name
    memory = real_names[dependency.mutating_buf]
    writes = [w for w in writer.read_writes.writes if w.name == dependency.mutating_buf]
    return all(
        isinstance(read, MemoryDep)
        and all(read.index == write.index and read.size == write.size for write in writes)
        for read in reader.read_writes.reads
        if real_names.get(read.name) == memory
    )
