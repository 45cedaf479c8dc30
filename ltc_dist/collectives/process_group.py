"""Groups of processes, and the lines that connect them.

`group_of` returns the group that a script's `groups=` puts this process in. Each has its own process group of
torch.distributed, created on first use, so that collectives of graphs never mix with those that the script calls
through torch.distributed. Used by `ops`; `transport` has what runs on a line.
"""

from __future__ import annotations

import atexit
import datetime
import os
import sys
import threading
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed

from ltc_core.api import c10d
from ltc_core.errors import CollectiveError, first_line, listed
from ltc_core.graph import collective
from ltc_core.runtime.collective_tokens import hand_over
from ltc_core.settings import settings
from ltc_core.timeline import slices
from ltc_core.timeline.marks import Awaited
from ltc_dist.collectives.transport import KINDS, LINES, Line, is_on_gpus
from ltc_dist.job import clock, companions, host_collectives, protocol
from ltc_dist.job.host_collectives import connected, job_store
from ltc_dist.job.peers import await_peers
from ltc_dist.job.ranks import Ranks, ranks
from ltc_dist.job.store import gloo_devices

__all__ = ["Group", "group_of", "group_of_members", "has_connected", "is_of_processes", "line_of"]

dist: Any = torch.distributed  # its stubs lack what is used here

_NEVER = datetime.timedelta(days=365)

Groups = Sequence[Sequence[int]] | None


@dataclass(frozen=True)
class Group:
    """Some processes of the job, this one among them.

    Attributes:
        name: how ops name it.
        members: their ranks.
        position: of this process among them.
    """

    name: str
    members: tuple[int, ...]
    position: int


_groups: dict[tuple[int, ...], Group] = {}
_lock = threading.Lock()
# name of a line -> lock for connecting its processes
_connecting: defaultdict[str, threading.Lock] = defaultdict(threading.Lock)


def group_of(groups: Groups = None) -> Group:
    """Return this process's group; all processes by default.

    Raises:
        CollectiveError: `groups` does not have every rank in exactly one group.

    Cost: on first use of a group connects its processes.
    """
    here = ranks()
    members = _members(groups, here.rank, here.world_size)
    return _of_threads(here, members) if here.threads else group_of_members(members)


def group_of_members(members: tuple[int, ...]) -> Group:
    """The group of some processes in this order, this one among them; there may be any number of groups."""
    found = _groups.get(members)
    if found is None:
        found = Group(",".join(map(str, members)), members, members.index(ranks().rank))
        if len(members) > 1:
            _connect(found)
        _groups[members] = found
    return found


def line_of(group: Group, index: int) -> str:
    """Name of the line of a collective that the calling thread records on device `index`.

    The collectives of one line run in every member in the order in which they were recorded. Those of the main thread
    are one line, whatever device they are on. Threads beside it have no order among each other: each device has a line
    of its own for them, which the threads of the same device have in other processes.

    Cost: on first use of a line connects its processes.
    """
    is_main = threading.current_thread() is threading.main_thread()
    if is_main or group.name not in _transports:
        return group.name
    name = f"{group.name} on device {index}"
    _connect(Group(name, group.members, group.position))
    return name


# The names of TRANSPORTS that are lines of processes, and not of threads.
_transports: set[str] = set()


def is_of_processes(line: str) -> bool:
    """Whether the members of a line are processes: a thread has one device, of which the others need not hear."""
    return line in _transports


def has_connected() -> bool:
    """Whether this process has joined a group with others."""
    return any(len(members) > 1 for members in _groups)


def _connect(line: Group) -> None:
    with _lock:
        being_connected = _connecting[line.name]
    if line.name in _transports:
        return
    hand_over()
    c10d.hand_over_before_calls()
    with being_connected:
        if line.name not in _transports:
            collective.TRANSPORTS[line.name] = _connected(line)
            _transports.add(line.name)


@atexit.register
def _disconnect() -> None:
    """End the threads of gloo; end this process although collectives are under way, which would keep it.

    Handlers that are registered later, as those of scripts are, have run. If a collective is under way and the exit
    code is known, the process ends without waiting for the threads of gloo, which may abort it.
    """
    for line in LINES:
        line.disconnect()
    is_stuck = companions.is_stuck or any(line.is_stuck for line in LINES)
    code = host_collectives.exit_code
    if code is None and hasattr(sys, "last_value"):  # an exception that nobody has caught
        code = 1
    if is_stuck and code is not None:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _members(groups: Groups, rank: int, world_size: int) -> tuple[int, ...]:
    if not groups:
        return tuple(range(world_size))
    flat = sorted(r for group in groups for r in group)
    if flat != list(range(world_size)):
        raise CollectiveError(
            "groups must have every rank in exactly one group",
            got=f"{listed(groups)} for {world_size} processes",
            next="such as [[0, 1], [2, 3]] for four processes",
        )
    return next(tuple(group) for group in groups if rank in group)


def _of_threads(here: Ranks, members: tuple[int, ...]) -> Group:
    if len(members) not in (1, here.world_size):
        raise CollectiveError(
            "threads reduce all together, or not at all",
            got=f"a group of {len(members)} of {here.world_size}",
            next="use processes for smaller groups",
        )
    return Group(here.threads, members, members.index(here.rank))


def reduction(kind: str) -> Any:
    """Return torch.distributed's name of a reduction."""
    if kind not in KINDS:
        raise CollectiveError(
            f"there is no reduction {kind!r}", got=f"legal are {', '.join(KINDS)}"
        )
    if is_on_gpus() and kind in ("and", "or") and not ranks().threads:
        raise CollectiveError(
            f"GPUs have no reduction {kind!r}",
            got="NCCL has sum, mul, min and max",
            next="for flags of 0 and 1, 'min' is and, 'max' is or",
        )
    return KINDS[kind]


def _connected(group: Group) -> Line:
    """Connect the processes of a line."""
    # A waiting thread occupies its connection, so each thread beside the main one has its own.
    is_main = threading.current_thread() is threading.main_thread()
    own_store = job_store() if is_main else connected()
    _await_members(group, own_store)
    store = dist.PrefixStore(protocol.GROUP.key(line=group.name), own_store)
    connect = _nccl() if is_on_gpus() else _gloo
    try:
        backend = connect(store, group.position, len(group.members))
    except (RuntimeError, OSError) as error:
        raise CollectiveError(
            f"the processes of group {group.name} could not be connected",
            got=first_line(error),
            next="see that all of them come to their first collective; on several hosts GLOO_SOCKET_IFNAME names "
            "the interface between them",
        ) from error
    if not is_on_gpus():
        # `Line.wait` gives up, and later where others tell progress. NCCL's watchdog ends what hangs.
        backend._set_default_timeout(_NEVER)
    if is_main:
        _compare_clocks(group, own_store)
    return Line(group.name, group.members, group.position, own_store, backend)


def _await_members(group: Group, store: Any) -> None:
    """Wait until all members are about to connect: what PyTorch's backends wait for no signal interrupts.

    Raises:
        PeerEndedError: a member has ended.
        CollectiveTimeoutError: a member did not come in time.
    """
    protocol.MEMBER.tell(store, line=group.name, position=group.position)
    keys = {
        rank: protocol.MEMBER.key(line=group.name, position=position)
        for position, rank in enumerate(group.members)
    }
    place = f"connects the ranks {listed(group.members)}"
    meeting = Awaited(group.name, 0, group.members)
    await_peers(keys, group.members[group.position], place, meeting, store)


def _compare_clocks(group: Group, store: Any) -> None:
    """Measure this host's clock against that of rank 0, if a timeline of a job on several hosts is recorded."""
    here = ranks()
    is_whole_job = len(group.members) == here.world_size > here.local_world_size
    if is_whole_job and settings.trace is not None:
        offset_ns = clock.offset_from_rank_0(store, here.rank, here.world_size)
        if offset_ns is not None and slices.on is not None:
            slices.on.note_offset(offset_ns)


def _nccl() -> Callable[[Any, int, int], Any]:
    """Return the backend that connects GPUs. NCCL's own watchdog ends an op that hangs, after its timeout."""
    if not dist.is_nccl_available():
        raise CollectiveError(
            "GPUs reduce through NCCL, which this PyTorch lacks",
            got=f"torch {torch.__version__}",
            next="install PyTorch's CUDA build, or unset LTC_DEVICE",
        )
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = datetime.timedelta(seconds=settings.collective_timeout_s)
    return lambda store, position, size: dist.ProcessGroupNCCL(store, position, size, options)


def _gloo(store: Any, position: int, size: int) -> Any:
    """Connect processes, on the interfaces that `gloo_devices` names."""
    options = dist.ProcessGroupGloo._Options()
    options._timeout = datetime.timedelta(seconds=settings.collective_timeout_s)
    here = ranks()
    options._devices = gloo_devices(here.world_size == here.local_world_size)
    return dist.ProcessGroupGloo(store, position, size, options)
