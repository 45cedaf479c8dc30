"""How the processes of a job agree, through its store, to join their devices: all of them do, or none.

Each process says that it comes; who first knows whether all can join says so for all. Two such stages follow each
other: that all come, and that all have connected. Where all devices are one mesh, the processes also compare what
they do there for the first time. `ltc_core.executors.companions` is the interface, `setup` registers
`find`.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import os
import socket
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from ltc_core.errors import (
    CollectiveError,
    PeerEndedError,
    RankError,
    first_line,
)
from ltc_core.executors.companions import LANES, NotTogether, Run
from ltc_core.settings import settings
from ltc_core.timeline import slices
from ltc_core.timeline.marks import Awaited
from ltc_dist.job import protocol
from ltc_dist.job.host_collectives import (
    LOOK_S,
    before_ended,
    connected,
    ended,
    job_store,
)
from ltc_dist.job.peers import await_peers, look_for_ended
from ltc_dist.job.ranks import read_ranks
from ltc_dist.job.store import LOOPBACK, address_towards

__all__ = ["JobCompanions", "find", "outlive_others"]

# A process that uses its device alone for longer, before it waits for others, makes the others go on without it.
_PATIENCE_S = 20.0
_MESH = "mesh"  # the programs of all devices, as a line
_NOTICE_S = 3.0
_PAUSE_S = 0.02
_YES = "yes"

# Whether a program of all processes may be under way for ever: a process has ended.
is_stuck = False
# Ends the coordinator that the other ranks need, if this process has it.
_end_coordinator: Callable[[], object] | None = None


def find() -> JobCompanions | None:
    """The processes of this job; None if there is one."""
    here = read_ranks()
    if here.world_size == 1:
        return None
    is_one_host = here.world_size == here.local_world_size
    return JobCompanions(here.rank, here.world_size, is_one_host)


def outlive_others() -> None:
    """Wait at the end of rank 0, if it has the coordinator of JAX, until the others have ended: else it aborts them.

    After a failure they get a moment to notice it: the launcher ends the others.
    """
    if _end_coordinator is not None:
        _end_coordinator()


def _end(others: Sequence[int], disconnect: Callable[[], object]) -> None:
    has_failed = is_stuck or hasattr(sys, "last_value")
    until = time.monotonic() + (_NOTICE_S if has_failed else math.inf)
    with contextlib.suppress(RankError, RuntimeError):  # the store is gone, and so is the job
        store = connected()
        keys = [protocol.ENDED.key(rank=rank) for rank in others]
        while not store.check(keys) and time.monotonic() < until:
            time.sleep(_PAUSE_S)
    disconnect()


class JobCompanions:
    """The processes of a job.

    Args:
        rank: of this process.
        count: number of processes.
        is_one_host: whether all are on one host, which then listens on its loopback interface only.
    """

    def __init__(self, rank: int, count: int, is_one_host: bool) -> None:
        self.rank = rank
        self.count = count
        self._is_one_host = is_one_host
        self._of_thread = threading.local()  # its connection to the store
        self._num_agreed: Counter[str] = Counter()
        self._has_told = False  # in which program it waits

    def meet(self, refusal: str) -> str:
        address = _free_address(self._is_one_host) if self.rank == 0 and not refusal else ""
        return self._agree("come", address, refusal)

    def confirm(self, refusal: str) -> None:
        self._agree("joined", "", refusal)

    def agree(self, lane: str, what: str, where: str) -> None:
        store = self._own_store()
        self._num_agreed[lane] += 1
        number = self._num_agreed[lane]
        at = {"lane": lane, "number": number}
        protocol.ALIKE.tell(store, f"{what}\n{where}", **at, rank=self.rank)
        everyone = tuple(range(self.count))
        keys = {rank: protocol.ALIKE.key(**at, rank=rank) for rank in everyone}
        here = f"is at {what}, recorded at {where}"
        await_peers(keys, self.rank, here, Awaited(lane, number, everyone), store)
        for rank in everyone:
            told = protocol.ALIKE.heard(store, **at, rank=rank).decode()
            if told.partition("\n")[0] != what:
                raise self._differs(rank, what, where, told)
        if number > 1:  # all are here, and so all have read what was told before
            protocol.ALIKE.forget(store, lane=lane, number=number - 1, rank=self.rank)

    def _own_store(self) -> Any:
        if not hasattr(self._of_thread, "store"):
            self._of_thread.store = connected()
        return self._of_thread.store

    def check(self, run: Run, is_late: bool) -> None:
        global is_stuck
        store = self._own_store()
        others = [rank for rank in range(self.count) if rank != self.rank]
        try:
            here = f"runs {run.what}, recorded at {run.where}"
            look_for_ended(others, self.rank, here, store)
        except PeerEndedError:
            is_stuck = True
            raise
        if not is_late:
            return
        for lane, rank in itertools.product(LANES, others):
            number = self._num_agreed[lane] + 1
            told = protocol.ALIKE.heard(store, lane=lane, number=number, rank=rank).decode()
            if told:
                is_stuck = True
                raise self._differs(rank, run.what, run.where, told)
        protocol.AT.tell(store, "\n".join(map(str, run)), line=_MESH, position=self.rank)
        self._has_told = True
        for rank in others:
            told = protocol.AT.heard(store, line=_MESH, position=rank).decode()
            told_number, _, program = told.partition("\n")
            if told_number == str(run.number) and program.partition("\n")[0] != run.what:
                is_stuck = True
                raise self._differs(rank, run.what, run.where, program)

    def end_wait(self) -> None:
        if self._has_told:
            self._has_told = False
            protocol.AT.take_back(self._own_store(), line=_MESH, position=self.rank)

    def _differs(self, rank: int, what: str, where: str, told: str) -> CollectiveError:
        other, _, line = told.partition("\n")
        return CollectiveError(
            f"rank {self.rank} and rank {rank} do not do the same on the mesh of all devices",
            got=f"rank {self.rank}: {what}, recorded at {where}\n"
            f"       rank {rank}: {other}, recorded at {line}",
            next="let all processes run the same steps, with the same seed, on the same whole batches; or let "
            "each read its own part, with ShardingSpec(..., minibatch=True)",
        )

    def keep_connected(self, disconnect: Callable[[], object]) -> None:
        global _end_coordinator
        if self.rank == 0:
            _end_coordinator = partial(_end, range(1, self.count), disconnect)
        else:
            before_ended(disconnect)

    def _agree(self, stage: str, address: str, refusal: str) -> str:
        """Wait until all have come to a stage; returns the address that rank 0 brought."""
        try:
            is_main = threading.current_thread() is threading.main_thread()
            store = job_store() if is_main else connected()
        except RankError as error:
            raise NotTogether(f"rank {self.rank} has no store: {first_line(error)}") from error
        own = "\n".join((str(os.getpid()), address, refusal))
        held = protocol.DEVICES.tell_first(store, own, stage=stage, rank=self.rank)
        if held != own:  # a DataLoader's worker, or a process that was started by this rank's
            raise NotTogether(f"another process of rank {self.rank} has made its devices")
        everyone = tuple(range(self.count))
        with slices.watched("wait for other processes", "", Awaited("devices", 0, everyone)):
            verdict = self._verdict(store, stage)
        if verdict != _YES:
            raise NotTogether(verdict)
        return protocol.DEVICES.heard(store, stage=stage, rank=0).decode().split("\n")[1]

    def _verdict(self, store: Any, stage: str) -> str:
        """What the first process has found out that knows whether all have come to a stage."""
        patience_s = min(_PATIENCE_S, settings.collective_timeout_s)
        begun = looked = time.monotonic()
        keys = [protocol.DEVICES.key(stage=stage, rank=rank) for rank in range(self.count)]
        while True:
            found = protocol.TOGETHER.heard(store, stage=stage).decode()
            now = time.monotonic()
            if not found and store.check(keys):
                found = self._summed_up(store, stage)
            elif not found and now - looked >= LOOK_S:
                looked = now
                found = self._missing(store, stage, keys, now - begun >= patience_s, patience_s)
            if found:
                return protocol.TOGETHER.tell_first(store, found, stage=stage)
            time.sleep(_PAUSE_S)

    def _summed_up(self, store: Any, stage: str) -> str:
        for rank in range(self.count):
            refusal = protocol.DEVICES.heard(store, stage=stage, rank=rank).decode().split("\n")[2]
            if refusal:
                return f"rank {rank}: {refusal}"
        return _YES

    def _missing(
        self, store: Any, stage: str, keys: list[str], is_over: bool, patience_s: float
    ) -> str:
        missing = [rank for rank, key in enumerate(keys) if not store.check([key])]
        gone = ended(missing, store)
        if gone:
            return f"rank {gone[0]} has ended"
        if is_over and missing:
            return f"rank {missing[0]} did not make its device within {patience_s:g} s"
        return ""


def _free_address(is_one_host: bool) -> str:
    """Address of this host, on the interface that the other processes reach, with a port that is free now."""
    host = LOOPBACK
    if not is_one_host:
        host = address_towards(os.environ.get("MASTER_ADDR", LOOPBACK))
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.create_server((host, 0), family=family) as probe:
        port = probe.getsockname()[1]
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
