"""Groups of processes: torch.distributed's process groups, and how a graph's collectives use them.

`group_of` returns the group that a script's `groups=` puts this process in. Each has its own process group, created on
first use, so that collectives of graphs never mix with those that the script calls through torch.distributed. Used by
`ops`.
"""

from __future__ import annotations

import datetime
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed

from ltc_core.api import c10d
from ltc_core.errors import CollectiveError, CollectiveTimeoutError, PeerEndedError, listed
from ltc_core.graph import collective
from ltc_core.graph.buckets import deal
from ltc_core.graph.collective import (
    COMBINE,
    all_reduce_in_vectors,
    packed,
    plan_text,
    scaled,
    unpacked,
)
from ltc_core.runtime.collective_tokens import hand_over
from ltc_core.settings import settings
from ltc_dist.job.host_collectives import LOOK_S, connected, ended, job_store, wait_looking
from ltc_dist.job.ranks import Ranks, ranks
from ltc_dist.job.store import gloo_devices

__all__ = ["Group", "group_of", "line_of"]

dist: Any = torch.distributed  # its stubs lack what is used here

_KINDS = {
    "sum": dist.ReduceOp.SUM,
    "mul": dist.ReduceOp.PRODUCT,
    "and": dist.ReduceOp.BAND,
    "or": dist.ReduceOp.BOR,
    "min": dist.ReduceOp.MIN,
    "max": dist.ReduceOp.MAX,
}

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
_LONGEST_PAUSE_S = 0.01  # between two looks at whether a GPU is done


def group_of(groups: Groups = None) -> Group:
    """Return this process's group; all processes by default.

    Raises:
        CollectiveError: `groups` does not have every rank in exactly one group.

    Cost: on first use of a group connects its processes.
    """
    here = ranks()
    members = _members(groups, here.rank, here.world_size)
    if here.threads:
        return _of_threads(here, members)
    found = _groups.get(members)
    if found is None:
        found = Group(",".join(map(str, members)), members, members.index(here.rank))
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


def _connect(line: Group) -> None:
    with _lock:
        being_connected = _connecting[line.name]
    if line.name in _transports:
        return
    hand_over()
    c10d.hand_over_before_calls()
    with being_connected:
        if line.name not in _transports:
            collective.TRANSPORTS[line.name] = ProcessTransport(line)
            _transports.add(line.name)


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
    if kind not in _KINDS:
        raise CollectiveError(
            f"there is no reduction {kind!r}", got=f"legal are {', '.join(_KINDS)}"
        )
    if _nccl_is_used() and kind in ("and", "or") and not ranks().threads:
        raise CollectiveError(
            f"GPUs have no reduction {kind!r}",
            got="NCCL has sum, mul, min and max",
            next="for flags of 0 and 1, 'min' is and, 'max' is or",
        )
    return _KINDS[kind]


class ProcessTransport:
    """A group of processes, reached through gloo, or NCCL where LTC_DEVICE is cuda."""

    def __init__(self, group: Group) -> None:
        # A waiting thread occupies its connection, so each thread beside the main one has its own.
        is_main = threading.current_thread() is threading.main_thread()
        self._job_store = job_store() if is_main else connected()
        store = dist.PrefixStore(f"group/{group.name}", self._job_store)
        connect = _nccl() if _nccl_is_used() else _gloo
        try:
            self._backend = connect(store, group.position, len(group.members))
        except (RuntimeError, OSError) as error:
            raise CollectiveError(
                f"the processes of group {group.name} could not be connected",
                got=str(error).splitlines()[0],
                next="see that all of them come to their first collective; on several hosts GLOO_SOCKET_IFNAME names "
                "the interface between them",
            ) from error
        self._group = group
        self._rank = group.members[group.position]
        self._known: set[str] = set()
        self._plan = ""
        self._replicas: Sequence[int] | None = None
        self._is_pair = len(group.members) == 2 and not _nccl_is_used()
        # address of a vector -> its reduction, what that is part of, and what is to be done at its end
        self._under_way: dict[int, tuple[Any, str, Callable[[], Any]]] = {}

    # -- ops -----------------------------------------------------------------------------------

    def all_reduce(
        self, values: list[torch.Tensor], kind: str, scale: float, label: str
    ) -> list[torch.Tensor]:
        return all_reduce_in_vectors(self, values, kind, scale, label)

    def start_all_reduce(self, flat: torch.Tensor, kind: str, plan: str) -> None:
        self._agree(plan)
        start = self._start_exchange if self._is_pair else self._start_reduction
        work, at_end = start(flat, kind)
        self._under_way[flat.data_ptr()] = work, plan, at_end

    def _start_reduction(self, flat: torch.Tensor, kind: str) -> tuple[Any, Callable[[], Any]]:
        options = dist.AllreduceOptions()
        options.reduceOp = reduction(kind)
        return self._backend.allreduce([flat], options), lambda: None

    def _start_exchange(self, flat: torch.Tensor, kind: str) -> tuple[Any, Callable[[], Any]]:
        """Exchange vectors between two processes.

        As many bytes as in gloo's ring, in one go: on two cores 1.2 ms for 1 MiB instead of 2.2, and 0.3 for 4 KiB
        instead of 1.8.
        """
        sizes = [0, 0]
        sizes[1 - self._group.position] = flat.numel()
        come = torch.empty_like(flat)
        work = self._backend.alltoall_base(come, flat, sizes, sizes)
        return work, lambda: COMBINE[kind](flat, come, out=flat)

    def finish_all_reduce(self, flat: torch.Tensor) -> None:
        work, self._plan, at_end = self._under_way.pop(flat.data_ptr())
        self._wait(work)
        at_end()

    def broadcast(self, values: list[torch.Tensor], root: int) -> list[torch.Tensor]:
        self._agree(plan_text(f"broadcast from {root} of", values))
        options = dist.BroadcastOptions()
        options.rootRank = root
        buckets = list(deal(values, settings.bucket_mb))
        flats = [packed(values, chosen) for chosen in buckets]
        for work in [self._backend.broadcast([flat], options) for flat in flats]:
            self._wait(work)
        return unpacked(flats, buckets, [v.shape for v in values])

    def all_gather(self, value: torch.Tensor, dim: int) -> torch.Tensor:
        self._agree(plan_text(f"all_gather along dim {dim} of", [value]))
        sent = value.contiguous()
        received = [torch.empty_like(sent) for _ in self._group.members]
        self._wait(self._backend.allgather([received], [sent]))
        return torch.cat(received, dim)

    def reduce_scatter(
        self, value: torch.Tensor, kind: str, scale: float, dim: int
    ) -> torch.Tensor:
        self._agree(plan_text(f"reduce_scatter {kind} along dim {dim} of", [value]))
        options = dist.ReduceScatterOptions()
        options.reduceOp = reduction(kind)
        parts = value.chunk(len(self._group.members), dim)
        result = torch.empty_like(parts[0], memory_format=torch.contiguous_format)
        self._wait(self._backend._reduce_scatter_base(result, torch.cat(parts), options))
        return scaled(result, scale)

    def all_to_all(self, value: torch.Tensor, split_dim: int, concat_dim: int) -> torch.Tensor:
        self._agree(plan_text(f"all_to_all from dim {split_dim} to dim {concat_dim} of", [value]))
        sent = torch.stack(value.chunk(len(self._group.members), split_dim))
        received = torch.empty_like(sent)
        self._wait(self._backend.alltoall_base(received, sent, [], []))
        return torch.cat(received.unbind(), concat_dim)

    def permute(self, value: torch.Tensor, pairs: list[int]) -> torch.Tensor:
        self._agree(plan_text(f"collective_permute {pairs} of", [value]))
        here, size = self._group.position, value.numel()
        routes = list(zip(pairs[::2], pairs[1::2], strict=True))
        members = range(len(self._group.members))
        to = [size * ((here, member) in routes) for member in members]
        come = [size * ((member, here) in routes) for member in members]
        sent = value.reshape(-1).repeat(sum(map(bool, to)))
        received = value.new_zeros(max(size, sum(come)))
        self._wait(self._backend.alltoall_base(received[: sum(come)], sent, come, to))
        return received.view(value.shape)

    # -- programs that reduce by themselves ----------------------------------------------------

    def replicas(self, own: int, count: int) -> Sequence[int] | None:
        if count != len(self._group.members):
            return None
        if self._replicas is None:  # chips are not counted as ranks are
            found = self.all_gather(torch.tensor([own]), 0).tolist()
            self._replicas = found if sorted(found) == list(range(count)) else ()
        return self._replicas or None

    def agree(self, plan: str) -> None:
        self._agree(plan)

    def launched(self, plan: str) -> None:
        return

    # -- waiting, and agreeing -----------------------------------------------------------------

    def _agree(self, plan: str) -> None:
        """Before the first run of an op with such operands, check that all processes run the same op.

        gloo does not look: with other sizes elsewhere it may give wrong numbers without an error.
        """
        self._plan = plan
        if plan in self._known:
            return
        self._known.add(plan)
        self._job_store.set(self._plan_key(self._group.position), self._plan)
        for position in range(len(self._group.members)):
            self._await_plan(position)

    def _plan_key(self, position: int) -> str:
        return f"plan/{self._group.name}/{len(self._known)}/{position}"

    def _await_plan(self, position: int) -> None:
        def look(time_is_up: bool) -> None:
            at = f"at/{self._group.name}/{position}"
            if self._job_store.check([at]):  # it waits for us, in an op that it knows
                self._differ(position, self._job_store.get(at).decode())
            self._look_for_ended()
            if time_is_up:
                raise CollectiveTimeoutError(
                    f"rank {self._group.members[position]} did not come within {settings.collective_timeout_s:g} s",
                    got=f"rank {self._rank} is at {_short(self._plan)}",
                    next="let all processes of the group run the same collectives",
                )

        key = self._plan_key(position)
        wait_looking([key], look, self._job_store)
        other = self._job_store.get(key).decode()
        if other != self._plan:
            self._differ(position, other)

    def _wait(self, work: Any) -> None:
        """Wait for an op; now and then check what the missing processes do."""
        is_done = _is_done_on_gpu if _nccl_is_used() else _is_done
        while True:
            try:
                if is_done(work):
                    return
            except RuntimeError:
                self._look_for_ended()
                raise
            store, here = self._job_store, self._group.position
            store.set(f"at/{self._group.name}/{here}", self._plan)
            for position in range(len(self._group.members)):
                key = f"plan/{self._group.name}/{len(self._known) + 1}/{position}"
                if position != here and store.check([key]):
                    self._differ(position, store.get(key).decode())
            self._look_for_ended()

    def _look_for_ended(self) -> None:
        gone = ended(self._group.members, self._job_store)
        if gone:
            raise PeerEndedError(
                f"rank {gone[0]} has ended while rank {self._rank} waits for it",
                got=f"rank {self._rank} is at {_short(self._plan)}",
                next="let all processes take the same number of steps: a DistributedSampler with drop_last=True",
            )

    def _differ(self, position: int, other: str) -> None:
        raise CollectiveError(
            f"rank {self._rank} and rank {self._group.members[position]} are at different collectives",
            got=f"rank {self._rank}: {_short(self._plan)}\n"
            f"       rank {self._group.members[position]}: {_short(other)}",
            next="let all processes of a group run the same collectives, on tensors of the same sizes",
        )


def _is_done(work: Any) -> bool:
    """Wait a while for an op; returns whether it is done, and raises its error."""
    try:
        work.wait(datetime.timedelta(seconds=LOOK_S))
        return True
    except RuntimeError:
        if not work.is_completed():
            return False
    work.wait()  # it failed, or was done just after the time was up
    return True


def _is_done_on_gpu(work: Any) -> bool:
    """The same for NCCL, whose wait aborts the communicator at its timeout, and without one does not wait.

    Source: `ProcessGroupNCCL::WorkNCCL::wait` of PyTorch.
    """
    deadline, pause_s = time.monotonic() + LOOK_S, 0.0
    while not work.is_completed():
        if time.monotonic() >= deadline:
            return False
        time.sleep(pause_s)
        pause_s = min(2 * pause_s or 1e-5, _LONGEST_PAUSE_S)
    work.wait(
        datetime.timedelta(seconds=LOOK_S)
    )  # with a time it raises what failed; none is left to pass
    return True


def _nccl_is_used() -> bool:
    return settings.device == "cuda"


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


def _short(plan: str) -> str:
    return plan if len(plan) < 400 else f"{plan[:400]}... ({plan.count('[')} tensors)"
