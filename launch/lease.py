"""Which hosts are there: each launcher renews a lease in the store of the job, and so nobody waits for a dead one.

A lease names its launcher (`token`) and ends with it. Whether it is renewed is seen by its change, so the clocks of the
hosts do not matter. Used by `rendezvous`.
"""

from __future__ import annotations

import os
import secrets
import socket
import threading
import time
from collections.abc import Callable
from typing import Any

import torch.distributed
from torch.distributed.elastic.rendezvous import RendezvousError

from ltc_dist.job import protocol

__all__ = ["Lease", "Leases"]

_RENEW_S = 0.25
_ALIVE_S = 4.0  # without a change in this time it has ended


class Leases:
    """What the leases of a job say.

    Args:
        store: of the job.
    """

    def __init__(self, store: Any) -> None:
        self._store = store
        # number of a host -> its lease, and when it last changed
        self._seen: dict[int, tuple[str, float]] = {}
        # number of a host -> the token whose renewal has been seen
        self._renewed: dict[int, str] = {}

    def token(self, rank: int) -> str:
        """Token of the launcher that has the lease of host `rank`; empty for none."""
        return self._read(rank).rpartition(" ")[0]

    def is_alive(self, rank: int, token: str) -> bool:
        """Whether the launcher `token` has the lease and renews it; call it again and again."""
        found, now = self._read(rank), time.monotonic()
        before, since = self._seen.get(rank, ("", now))
        if found != before:
            if before and before.rpartition(" ")[0] == found.rpartition(" ")[0]:
                self._renewed[rank] = found.rpartition(" ")[0]
            self._seen[rank], since = (found, now), now
        holds = bool(token) and found.rpartition(" ")[0] == token
        return holds and self._renewed.get(rank) == token and now - since < _ALIVE_S

    def _read(self, rank: int) -> str:
        return protocol.LEASE.heard(self._store, rank=rank).decode()


class Lease:
    """The lease of this host, renewed by a thread until `end`.

    Args:
        rank: number of this host.
        store: of the job.
        own_store: another connection to it, for the thread.
        is_served: whether something listens at its address. PyTorch prints a stack when a store is gone.

    Attributes:
        token: names this launcher: host, process and a random number.

    Raises:
        RendezvousError: another launcher has the lease, and renews it.
    """

    def __init__(
        self, rank: int, store: Any, own_store: Any, is_served: Callable[[], bool]
    ) -> None:
        self.token = f"{socket.gethostname()}/{os.getpid()}/{secrets.token_hex(8)}"
        self._rank = rank
        self._store = own_store
        self._is_served = is_served
        self._has_ended = threading.Event()
        _await_end_of_other(rank, Leases(store))
        protocol.LEASE.tell(own_store, f"{self.token} 0", rank=rank)
        self._thread = threading.Thread(target=self._renew, name="ltc-lease", daemon=True)
        self._thread.start()

    def _renew(self) -> None:
        number = 0
        while not self._has_ended.wait(_RENEW_S):
            number += 1
            if not self._is_served():  # the first host has ended, and its store with it
                return
            try:
                protocol.LEASE.tell(self._store, f"{self.token} {number}", rank=self._rank)
            except torch.distributed.DistError:  # it has ended since
                return

    def stop(self) -> None:
        """Renew it no more, as if the launcher had been killed."""
        self._has_ended.set()
        self._thread.join(_ALIVE_S)

    def end(self) -> None:
        """Take the lease back, so that another launcher of this host need not wait for its end."""
        self.stop()
        protocol.LEASE.take_back(self._store, rank=self._rank)


def _await_end_of_other(rank: int, leases: Leases) -> None:
    deadline = time.monotonic() + _ALIVE_S
    while (other := leases.token(rank)) and time.monotonic() < deadline:
        if leases.is_alive(rank, other):
            host, pid, _ = other.split("/")
            raise RendezvousError(
                f"the launcher of host {rank} runs already, on {host} (pid {pid}); give this host another --node-rank, "
                "or this job another --rdzv-id"
            )
        time.sleep(_RENEW_S / 2)
