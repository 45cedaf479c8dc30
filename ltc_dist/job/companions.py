"""How the processes of a job agree, through its store, to join their devices: all of them do, or none.

Each process says that it comes; who first knows whether all can join says so for all. Two such stages follow each
other: that all come, and that all have connected. `ltc_core.executors.companions` is the interface, `setup` registers
`find`.
"""

from __future__ import annotations

import os
import socket
import threading
import time
from typing import Any

from ltc_core.errors import RankError, first_line
from ltc_core.executors.companions import NotTogether
from ltc_core.settings import settings
from ltc_core.timeline import slices
from ltc_core.timeline.marks import Awaited
from ltc_dist.job import protocol
from ltc_dist.job.host_collectives import LOOK_S, connected, ended, job_store
from ltc_dist.job.ranks import read_ranks
from ltc_dist.job.store import LOOPBACK, address_towards

__all__ = ["JobCompanions", "find"]

# A process that uses its device alone for longer, before it waits for others, makes the others go on without it.
_PATIENCE_S = 20.0
_PAUSE_S = 0.02
_YES = "yes"


def find() -> JobCompanions | None:
    """The processes of this job; None if there is one."""
    here = read_ranks()
    if here.world_size == 1:
        return None
    is_one_host = here.world_size == here.local_world_size
    return JobCompanions(here.rank, here.world_size, is_one_host)


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

    def meet(self, refusal: str) -> str:
        address = _free_address(self._is_one_host) if self.rank == 0 and not refusal else ""
        return self._agree("come", address, refusal)

    def confirm(self, refusal: str) -> None:
        self._agree("joined", "", refusal)

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
