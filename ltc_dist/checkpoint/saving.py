"""`save` in a job: the master writes, the others wait for it, and it waits for nobody.

So `save` may be called by all processes, or by the master alone. Uses `job.host_collectives`.
"""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO

import ltc_core as ltc
from ltc_core.runtime.devices import contexts
from ltc_core.serialization import streaming
from ltc_core.serialization.cpu_copy import CpuCopies
from ltc_core.serialization.tree import map_tensors
from ltc_core.settings import settings
from ltc_dist.job import host_collectives, protocol
from ltc_dist.job.ranks import is_master_ordinal, ranks

__all__ = ["brought_together", "save", "save_streamed"]

_versions: dict[str, int] = defaultdict(int)  # how often this process came to save a path


def save(
    data: Any,
    file_or_path: str | os.PathLike[str] | BinaryIO,
    master_only: bool = True,
    global_master: bool = False,
) -> None:
    """Save a structure with its tensors on the CPU, in the master process.

    A file appears whole or not at all. The n-th call of another process for a path returns when the master has written
    it n times. The master waits for nobody, so `if is_master_ordinal(): save(...)` works, too, but not with LTC_SPMD.
    Nobody waits in the threads of a DataParallel.

    Args:
        file_or_path: where to; processes do not wait for what goes to an open file.
        master_only: False lets every process write; give each a path of its own then.
        global_master: one master for the whole job, not one for each host.

    Raises:
        CheckpointIOError: it cannot be written.
        RankError: the master has ended, or has not written it in time.

    Cost: cuts the graph in every process; the writer waits for the values.

    Source: `torch_xla.core.xla_model.save`, which waits in other ways in other versions.
    """
    is_path = isinstance(file_or_path, str | os.PathLike)
    told = os.fspath(file_or_path) if is_path else None  # type: ignore[arg-type]
    data = brought_together(data)
    _in_master(lambda: ltc.save(data, file_or_path), told, master_only, global_master)


def save_streamed(
    data: Any,
    path: str | os.PathLike[str],
    master_only: bool = True,
    global_master: bool = False,
) -> None:
    """Save a structure as a directory, one tensor at a time, in the master process.

    See `ltc_core.serialization.save` for what is kept, and `save` for who waits for whom. Scripts import it as
    `xser.save`, from `ltc_dist.serialization`.

    Args:
        master_only: False lets every process write; give each a path of its own then.
        global_master: one master for the whole job, not one for each host.

    Raises:
        CheckpointFormatError, CheckpointIOError: as `ltc_core.serialization.save`.
        RankError: the master has ended, or has not written it in time.

    Cost: cuts the graph in every process; the writer needs host memory for the largest tensor.

    Source: `torch_xla.utils.serialization.save`.
    """
    data = brought_together(data)
    _in_master(lambda: streaming.save(data, path), os.fspath(path), master_only, global_master)


def brought_together(data: Any) -> Any:
    """With LTC_SPMD the data on the CPU: all processes have parts of a tensor, so all of them bring it there."""
    return map_tensors(CpuCopies(), data) if settings.spmd else data


def _in_master(
    write: Callable[[], None], path: str | None, master_only: bool, global_master: bool
) -> None:
    """Write in the master; the others wait for that, if there is a path."""
    writes = not master_only or is_master_ordinal(local=not global_master)
    if writes:
        write()
    else:
        for ctx in contexts():  # the master's values may need this process's part in a collective
            ctx.cut("Save")
    if master_only and path is not None and ranks().world_size > 1 and not ranks().threads:
        _notice(str(Path(path).absolute()), writes, global_master)


def _notice(path: str, writes: bool, global_master: bool) -> None:
    """Announce that a version of the path is there, or wait for the announcement."""
    here = ranks()
    master = 0 if global_master else here.rank - here.local_rank
    _versions[path] += 1
    place: dict[str, Any] = {"master": master, "path": path, "number": _versions[path]}
    if writes:
        protocol.SAVED.tell(host_collectives.job_store(), **place)
    else:
        host_collectives.wait_for([protocol.SAVED.key(**place)], [master], f"the saving of {path}")
