"""How the agents of a job find each other, and where the processes find the store of their attempt.

On one host there is one agent; its store listens on the loopback interface. On several hosts the first one serves a
store at the endpoint, where the agents meet. The keys of an attempt begin with its number, and the processes of each
attempt have a store of their own: keys of a failed attempt are never read again. Used by `agent`.
"""

from __future__ import annotations

import datetime
import errno
import json
import secrets
import socket
import sys
import time
from typing import Any

import torch.distributed
from torch.distributed.elastic.rendezvous import (
    RendezvousClosedError,
    RendezvousConnectionError,
    RendezvousHandler,
    RendezvousInfo,
    RendezvousStoreInfo,
    RendezvousTimeoutError,
)
from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import C10dRendezvousBackend
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import (
    DynamicRendezvousHandler,
    RendezvousTimeout,
)

from ltc_core.errors import listed
from ltc_dist.job.store import LOOPBACK, address_towards, is_loopback, serve_store

from .spec import Spec

__all__ = ["DynamicRendezvous", "LoopbackRendezvous", "StaticRendezvous", "handler"]

_JOIN_S = 900.0  # how long to wait for other hosts
_LOOK_S = 0.1
c10d: Any = torch.distributed  # the stubs of its types are incomplete


class LoopbackRendezvous(RendezvousHandler):
    """One host: the agent serves a new store for each attempt, on the loopback interface."""

    def __init__(self) -> None:
        self._run_id = secrets.token_hex(16)
        self._store: Any = None
        self._is_closed = False

    @property
    def use_agent_store(self) -> bool:
        return True

    def get_backend(self) -> str:
        return "ltc-loopback"

    def next_rendezvous(self) -> RendezvousInfo:
        self._store, port = serve_store()  # a new one: keys of a failed attempt must not be read
        store = c10d.PrefixStore(self._run_id, self._store)
        return RendezvousInfo(store, 0, 1, RendezvousStoreInfo(LOOPBACK, port))

    def is_closed(self) -> bool:
        return self._is_closed

    def set_closed(self) -> None:
        self._is_closed = True

    def num_nodes_waiting(self) -> int:
        return 0

    def get_run_id(self) -> str:
        return self._run_id

    def shutdown(self) -> bool:
        self._is_closed = True
        return True


class Meeting:
    """The store at the endpoint of a job on several hosts, where their agents meet; the first host serves it.

    Attributes:
        run_id: drawn at random by the host that comes first; the same on all hosts.
        store: prefixes its keys with `run_id`.
        address: of this host, as the other hosts reach it.
    """

    def __init__(self, spec: Spec) -> None:
        host, _, port = spec.endpoint.rpartition(":")
        self._host = host.strip("[]")
        self._served: Any = None
        try:
            self.address = address_towards(self._host)
            if spec.backend != "static" or spec.node_rank == 0:
                self._serve(int(port), must=spec.backend == "static")
        except OSError as error:
            raise RendezvousConnectionError(f"{spec.endpoint}: {error}") from error
        self._base = self._served or c10d.TCPStore(
            self._host, int(port), is_master=False, timeout=datetime.timedelta(seconds=_JOIN_S)
        )
        token = secrets.token_hex(16)
        self.run_id: str = self._base.compare_set("ltc/run", "", token).decode()
        self.store = c10d.PrefixStore(self.run_id, self._base)

    def _serve(self, port: int, must: bool) -> None:
        """Serve the store, if the endpoint is an address of this host and no other process serves it."""
        address = str(socket.getaddrinfo(self._host, port, type=socket.SOCK_STREAM)[0][4][0])
        if is_loopback(address) and not is_loopback(self._host):
            address = ""  # a host's own name may resolve to loopback, where others cannot reach it
        try:
            self._served, _ = serve_store(address, port)
        except OSError as error:
            if not must:
                return
            if error.errno != errno.EADDRNOTAVAIL:
                raise
            address = ""  # the endpoint is the address of a NAT in front of this host
            self._served, _ = serve_store(address, port)
        self.address = address
        print(
            f"ltc-launch: the stores of this job listen on {address or 'all interfaces'}, port {port} and one that is "
            "free for each attempt, without authentication: keep to a network that you trust",
            file=sys.stderr,
            flush=True,
        )

    def serve_attempt(self) -> tuple[Any, str, int]:
        """Serve a new store for the processes of one attempt; returns it, its host and its port."""
        store, port = serve_store(self.address)
        return store, self.address or self._host, port


class StaticRendezvous(RendezvousHandler):
    """Several hosts, each with a number. An attempt begins when all hosts have come.

    When a host begins another attempt, the others restart, too. No host waits for one that has announced its end.
    """

    def __init__(self, spec: Spec) -> None:
        self._meeting = Meeting(spec)
        self._rank = spec.node_rank
        self._size = spec.nnodes
        self._attempt = -1
        self._store: Any = None
        self._is_closed = False

    @property
    def use_agent_store(self) -> bool:
        return True

    def get_backend(self) -> str:
        return "ltc-static"

    def next_rendezvous(self) -> RendezvousInfo:
        came, self._attempt = f"came/{self._rank}", self._attempt + 1
        while (keys := self._keys(self._attempt)).check([came]):
            self._attempt += 1  # an earlier launcher of this host had come, and was killed
        self._store = None
        if self._rank == 0:
            self._store, address, port = self._meeting.serve_attempt()
            keys.set("store", json.dumps([address, port]))
        keys.set(came, b"")
        self._await_all(keys)
        address, port = json.loads(keys.get("store"))
        return RendezvousInfo(keys, self._rank, self._size, RendezvousStoreInfo(address, port))

    def _keys(self, attempt: int) -> Any:
        return c10d.PrefixStore(str(attempt), self._meeting.store)

    def _await_all(self, keys: Any) -> None:
        deadline = time.monotonic() + _JOIN_S
        while missing := [k for k in range(self._size) if not keys.check([f"came/{k}"])]:
            gone = [k for k in missing if self._meeting.store.check([f"ended/{k}"])]
            if gone:
                raise RendezvousClosedError(f"host {gone[0]} has ended")
            if time.monotonic() >= deadline:
                raise RendezvousTimeoutError(
                    f"{self._size - len(missing)} of {self._size} hosts have come in {_JOIN_S:g} s; missing: "
                    f"{listed(missing)}"
                )
            time.sleep(_LOOK_S)

    def is_closed(self) -> bool:
        return self._is_closed

    def set_closed(self) -> None:
        """Announce that this host begins no other attempt."""
        self._is_closed = True
        self._meeting.store.set(f"ended/{self._rank}", b"")

    def num_nodes_waiting(self) -> int:
        following = self._keys(self._attempt + 1)
        return sum(following.check([f"came/{k}"]) for k in range(self._size))

    def get_run_id(self) -> str:
        return self._meeting.run_id

    def shutdown(self) -> bool:
        self.set_closed()
        return True


class DynamicRendezvous(DynamicRendezvousHandler):
    """PyTorch's c10d rendezvous, for hosts without numbers; the processes of each attempt have a new store."""

    _meeting: Meeting

    @classmethod
    def of(cls, spec: Spec) -> DynamicRendezvous:
        meeting = Meeting(spec)
        made = cls.from_backend(
            meeting.run_id,
            meeting.store,
            C10dRendezvousBackend(meeting.store, meeting.run_id),
            spec.nnodes,
            spec.nnodes,
            local_addr=meeting.address or None,
            timeout=RendezvousTimeout(join=datetime.timedelta(seconds=_JOIN_S)),
        )
        made._meeting = meeting
        found: DynamicRendezvous = made
        return found

    def next_rendezvous(self) -> RendezvousInfo:
        self._bootstrap_store_info = None
        self._shared_tcp_store_server = None
        return super().next_rendezvous()

    def _create_tcp_store_server(self, master_addr: str, master_port: int) -> Any:
        return self._meeting.serve_attempt()[0]


def handler(spec: Spec) -> RendezvousHandler:
    """Rendezvous with which the agent of this host finds the others.

    Raises:
        RendezvousError: the endpoint can neither be served nor reached.
    """
    if spec.nnodes == 1:
        return LoopbackRendezvous()
    return StaticRendezvous(spec) if spec.backend == "static" else DynamicRendezvous.of(spec)
