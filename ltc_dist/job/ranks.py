"""Ranks: the index of this process in its job and on this host, and the number of processes of both.

Read from RANK, WORLD_SIZE, LOCAL_RANK and LOCAL_WORLD_SIZE, which ltc-launch, torchrun and others set (PyTorch's
contract), else from those of mpirun (Open MPI, MVAPICH2, MPICH, Intel MPI), else from SLURM's. Without them, this is
the only process. A thread of `train.data_parallel` has its own ranks. All code gets its ranks here.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TextIO

from ltc_core.errors import SettingsError, listed

__all__ = [
    "Ranks",
    "get_local_ordinal",
    "get_ordinal",
    "is_master_ordinal",
    "master_print",
    "own_rank",
    "owns_rank",
    "ranks",
    "read_ranks",
    "replica",
    "world_size",
]


@dataclass(frozen=True)
class Ranks:
    """Ranks count from 0; `local` ones are those on this host.

    `threads` is the collective group of a thread of `train.data_parallel`; empty elsewhere.
    """

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    local_world_size: int = 1
    threads: str = ""


_CONTRACT = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
_NEEDED = ("RANK", "WORLD_SIZE")
# Of a process of mpirun: rank, world size, local rank, local world size.
_MPI = (
    (
        "OMPI_COMM_WORLD_RANK",
        "OMPI_COMM_WORLD_SIZE",
        "OMPI_COMM_WORLD_LOCAL_RANK",
        "OMPI_COMM_WORLD_LOCAL_SIZE",
    ),
    (
        "MV2_COMM_WORLD_RANK",
        "MV2_COMM_WORLD_SIZE",
        "MV2_COMM_WORLD_LOCAL_RANK",
        "MV2_COMM_WORLD_LOCAL_SIZE",
    ),
    ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
)
_SLURM = ("SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID")


def read_ranks(environ: Mapping[str, str] | None = None) -> Ranks:
    """Read the ranks from `environ` (default: os.environ).

    Without a local world size the job is assumed to be on one host. The local rank defaults to the rank modulo that.
    Within SLURM, mpirun's variables count if all four are set: srun sets PMI_RANK and PMI_SIZE, too.

    Raises:
        SettingsError: only a part of the variables is set, or they contradict each other.

    Source: the variables of PyTorch's elastic agent; those of the manuals of the MPI libraries and of srun.
    """
    environ = os.environ if environ is None else environ
    if any(name in environ for name in _CONTRACT):
        return _of_contract(environ)
    for names in _MPI:
        if all(name in environ for name in names):
            return _of_names(environ, names)
    if all(name in environ for name in _SLURM) and environ["SLURM_NTASKS"] != "1":
        return _of_slurm(environ)
    for names in _MPI:
        if all(name in environ for name in names[:2]):
            return _of_names(environ, names)
    return Ranks()


def _of_contract(environ: Mapping[str, str]) -> Ranks:
    missing = [name for name in _NEEDED if name not in environ]
    if missing:
        found = listed(f"{name}={environ[name]}" for name in _CONTRACT if name in environ)
        raise SettingsError(
            f"the environment names a part of a job only: {' and '.join(missing)} not set",
            got=found,
            next="start the script with ltc-launch or torchrun, or unset these variables to run one process",
        )
    return _of_names(environ, _CONTRACT)


def _of_names(environ: Mapping[str, str], names: tuple[str, str, str, str]) -> Ranks:
    """The ranks of the variables for rank, world size, local rank and local world size; the local ones may lack."""
    rank, size = _number(environ, names[0]), _number(environ, names[1])
    local_size = _number(environ, names[3], size)
    local_rank = _number(environ, names[2], rank % max(local_size, 1))
    return _checked(Ranks(rank, size, local_rank, local_size), names[0])


def _of_slurm(environ: Mapping[str, str]) -> Ranks:
    rank, size, local_rank = (_number(environ, name) for name in _SLURM)
    # "2(x3),1": tasks on each node, in order.
    counts: list[int] = []
    for item in environ.get("SLURM_TASKS_PER_NODE", "").split(","):
        count, _, times = item.partition("(x")
        counts += [int(count)] * int(times.rstrip(")") or 1) if count.isdecimal() else []
    node = _number(environ, "SLURM_NODEID", 0)
    local_size = counts[node] if node < len(counts) else size
    return _checked(Ranks(rank, size, local_rank, local_size), "SLURM_PROCID")


def _number(environ: Mapping[str, str], name: str, default: int | None = None) -> int:
    text = environ.get(name)
    if text is None and default is not None:
        return default
    if text is None or not text.strip().isdecimal():
        raise SettingsError(
            f"{name} must be a whole number, 0 or more",
            got=repr(text),
            next="start the script with ltc-launch or torchrun, which set it",
        )
    return int(text)


def _checked(found: Ranks, name: str) -> Ranks:
    if not (found.rank < found.world_size and found.local_rank < found.local_world_size):
        raise SettingsError(
            f"{name} says more than there are processes",
            got=f"rank {found.rank} of {found.world_size}, on this host {found.local_rank} of "
            f"{found.local_world_size}",
            next="ranks count from 0; start the script with ltc-launch or torchrun, which set them",
        )
    return found


_of_thread = threading.local()


def ranks() -> Ranks:
    """Return the ranks of this process, or inside `replica` those of the calling thread.

    Cost: reads the environment; nothing is initialised.
    """
    found: Ranks | None = getattr(_of_thread, "ranks", None)
    return read_ranks() if found is None else found


_OWNER = "_LTC_RANK_OWNER"  # a variable, so that the processes that the owner starts inherit it


def own_rank() -> None:
    """Make this process the owner of its rank, unless another process of this rank is and has started this one.

    Processes inherit RANK: the workers of a `DataLoader`, and programs that the script starts. The first one is the
    owner.
    """
    try:
        here = read_ranks()
    except SettingsError:  # told at the first use of the ranks
        return
    if here.world_size > 1 and not os.environ.get(_OWNER, "").startswith(_place(here)):
        os.environ[_OWNER] = _place(here) + str(os.getpid())


def owns_rank() -> bool:
    """Whether this process speaks for its rank to the other ranks of the job."""
    return os.environ.get(_OWNER, "").rpartition("/")[2] == str(os.getpid())


def _place(of: Ranks) -> str:
    """A rank of one attempt of one job."""
    names = ("MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT")
    return "/".join([*(os.environ.get(name, "") for name in names), str(of.rank), ""])


@contextmanager
def replica(of_thread: Ranks) -> Iterator[None]:
    """Set the ranks of the calling thread inside a `with` block."""
    before = getattr(_of_thread, "ranks", None)
    _of_thread.ranks = of_thread
    try:
        yield
    finally:
        _of_thread.ranks = before


# -- the names scripts use ------------------------------------------------------------------------


def get_ordinal(defval: int = 0) -> int:
    """Return this process's rank in the job; `defval` if it is alone.

    Source: `torch_xla.core.xla_model.get_ordinal`, which scripts call before `spawn` too.
    """
    found = ranks()
    return found.rank if found.world_size > 1 else defval


def get_local_ordinal(defval: int = 0) -> int:
    """Return this process's rank on its host; `defval` if it is alone in the job."""
    found = ranks()
    return found.local_rank if found.world_size > 1 else defval


def world_size(defval: int = 1) -> int:
    """Return the number of processes of the job; `defval` if this one is alone."""
    found = ranks()
    return found.world_size if found.world_size > 1 else defval


def is_master_ordinal(local: bool = True) -> bool:
    """Whether this is rank 0 of its host, or with `local=False` of the whole job."""
    found = ranks()
    return (found.local_rank if local else found.rank) == 0


def master_print(
    *args: Any, fd: TextIO | None = None, local: bool = False, flush: bool = False
) -> None:
    """Print on rank 0 of the job, or with `local=True` on rank 0 of each host.

    Args:
        fd: the stream; `sys.stdout` by default.
    """
    if is_master_ordinal(local):
        print(*args, file=sys.stdout if fd is None else fd, flush=flush)
