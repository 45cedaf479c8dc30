"""How the agents of a job find each other, and where the processes find the store of their attempt.

On one host there is one agent; its store listens on the loopback interface. On several hosts the first one serves a
store at the endpoint, where the agents meet. The keys of an attempt begin with its number, and the processes of each
attempt have a store of their own: keys of a failed attempt are never read again. Used by `agent`.
"""

from __future__ import annotations

import contextlib
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
from ltc_dist.job import protocol
from ltc_dist.job.store import LOOPBACK, address_towards, is_loopback, serve_store

from .lease import Lease, Leases
from .spec import Spec

__all__ = ["DynamicRendezvous", "LoopbackRendezvous", "StaticRendezvous", "awaited", "handler"]

_JOIN_S = 900.0  # how long to wait for other hosts
_LOOK_S = 0.1
_TELL_S, _TELL_AGAIN_S = 5.0, 60.0  # until one is told who is waited for
_ANSWER = datetime.timedelta(seconds=60)  # of a store that is there
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

    def stop(self) -> None:
        """It has no thread."""


class Endpoint:
    """The store at the endpoint of a job on several hosts, where their agents meet; the first host serves it.

    Attributes:
        run_id: drawn at random by the host that comes first; the same on all hosts of one --rdzv-id.
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
        self._port = int(port)
        if self._served is None:
            self._await_store()
        self._base = self._served or self._client()
        token = secrets.token_hex(16)
        self.run_id: str = protocol.RUN.tell_first(self._base, token, name=spec.rdzv_id)
        self.store = c10d.PrefixStore(self.run_id, self._base)

    def connected(self) -> Any:
        """Another connection to `store`, for a thread of its own."""
        return c10d.PrefixStore(self.run_id, self._client())

    def is_served(self) -> bool:
        """Whether something listens at the endpoint. Cost: a connection."""
        try:
            socket.create_connection((self._reached_at(), self._port), timeout=1.0).close()
        except OSError:
            return False
        return True

    def _client(self) -> Any:
        return c10d.TCPStore(self._reached_at(), self._port, is_master=False, timeout=_ANSWER)

    def _reached_at(self) -> str:
        """Where this host reaches the store."""
        return self._host if self._served is None else self.address or LOOPBACK

    def _await_store(self) -> None:
        """Wait until the first host serves the store. Unlike a wait within PyTorch, Ctrl-C ends this one at once."""
        with _Waiting() as waits:
            while not self.is_served():
                waits.look(f"the first host, which is to listen at {self._host}:{self._port}")
                time.sleep(_LOOK_S)

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
    """Several hosts, each with a number. An attempt begins when all hosts are there.

    Host 0 begins it: it names the launchers that take part, and the store of their processes. When a host comes to the
    next attempt, the others restart, too. Nobody waits for a launcher that has ended (`lease`).
    """

    def __init__(self, spec: Spec) -> None:
        self._endpoint = Endpoint(spec)
        self._rank = spec.node_rank
        self._size = spec.nnodes
        self._attempt = -1
        self._store: Any = None
        self._is_closed = False
        self._leases = Leases(self._endpoint.store)
        endpoint = self._endpoint
        self._lease = Lease(self._rank, endpoint.store, endpoint.connected(), endpoint.is_served)

    @property
    def use_agent_store(self) -> bool:
        return True

    def get_backend(self) -> str:
        return "ltc-static"

    def next_rendezvous(self) -> RendezvousInfo:
        self._store = None
        begun = self._await_begin()
        store = RendezvousStoreInfo(*begun["store"])
        keys = c10d.PrefixStore(str(self._attempt), self._endpoint.store)
        return RendezvousInfo(keys, self._rank, self._size, store)

    def _await_begin(self) -> dict[str, Any]:
        """Come to the next attempt that has not begun, and wait until it begins with this launcher."""
        self._come()
        with _Waiting() as waits:
            while True:
                told = protocol.BEGUN.heard(self._endpoint.store, attempt=self._attempt)
                if told:
                    begun: dict[str, Any] = json.loads(told)
                    if begun["launchers"][self._rank] == self._lease.token:
                        return begun
                    self._come()  # it began with an earlier launcher of this host
                    continue
                missing = [k for k in range(self._size) if not self._is_there(self._attempt, k)]
                if self._rank == 0 and not missing:
                    self._begin()
                    continue
                gone = [k for k in missing if self._has_ended(k)]
                if gone:
                    raise RendezvousClosedError(f"host {gone[0]} has ended")
                there = self._size - len(missing)
                waits.look(f"hosts {listed(missing)}; {there} of {self._size} are there")
                time.sleep(_LOOK_S)

    def _come(self) -> None:
        self._attempt += 1
        place = {"attempt": self._attempt, "rank": self._rank}
        protocol.CAME.tell(self._endpoint.store, self._lease.token, **place)

    def _is_there(self, attempt: int, rank: int) -> bool:
        """Whether the launcher of a host has come to this attempt, and runs."""
        return rank == self._rank or self._leases.is_alive(rank, self._came(attempt, rank))

    def _came(self, attempt: int, rank: int) -> str:
        """Token of the launcher of a host that has come to an attempt; empty for none."""
        return protocol.CAME.heard(self._endpoint.store, attempt=attempt, rank=rank).decode()

    def _begin(self) -> None:
        self._store, address, port = self._endpoint.serve_attempt()
        launchers = [self._came(self._attempt, k) for k in range(self._size)]
        text = json.dumps({"launchers": launchers, "store": [address, port]})
        protocol.BEGUN.tell(self._endpoint.store, text, attempt=self._attempt)

    def _has_ended(self, rank: int) -> bool:
        """Whether the launcher of a host has announced its end, and no other one has come in its place."""
        has_ended = protocol.HOST_ENDED.heard(self._endpoint.store, rank=rank)
        return bool(has_ended) and not self._leases.token(rank)

    def is_closed(self) -> bool:
        return self._is_closed

    def set_closed(self) -> None:
        """Announce that this launcher begins no other attempt."""
        if not self._is_closed:
            self._is_closed = True
            with contextlib.suppress(torch.distributed.DistError):  # the first host is gone, too
                protocol.HOST_ENDED.tell(self._endpoint.store, rank=self._rank)
                self._lease.end()

    def num_nodes_waiting(self) -> int:
        others = [k for k in range(self._size) if k != self._rank]
        return sum(self._is_there(self._attempt + 1, k) for k in others)

    def get_run_id(self) -> str:
        return self._endpoint.run_id

    def shutdown(self) -> bool:
        self.set_closed()
        return True

    def stop(self) -> None:
        """End its thread. The other hosts are told nothing."""
        self._lease.stop()


class _Waiting:
    """A wait for other hosts: said after 5 s and then once a minute, ended after 15 minutes."""

    now: _Waiting | None = None

    def __init__(self, awaited: str = "") -> None:
        self._began = time.monotonic()
        self._tells_at = self._began + _TELL_S
        self._awaited = awaited

    def __enter__(self) -> _Waiting:
        _Waiting.now = self
        return self

    def __exit__(self, *error: object) -> None:
        _Waiting.now = None

    def look(self, awaited: str) -> None:
        """Say what is waited for, if it is time to.

        Raises:
            RendezvousTimeoutError: the time is up.
        """
        now = time.monotonic()
        self._awaited = awaited
        if now - self._began >= _JOIN_S:
            raise RendezvousTimeoutError(f"waited {_JOIN_S:g} s for {awaited}")
        if now >= self._tells_at:
            self._tells_at = now + _TELL_AGAIN_S
            _say(self.words)

    @property
    def words(self) -> str:
        return f"waits for {self._awaited}, since {time.monotonic() - self._began:.0f} s"


def awaited() -> str:
    """The hosts that this launcher waits for, and since when; '' if it does not wait."""
    waits = _Waiting.now
    return "" if waits is None else waits.words


def _say(text: str) -> None:
    print(f"ltc-launch: {text}", file=sys.stderr, flush=True)


class DynamicRendezvous(DynamicRendezvousHandler):
    """PyTorch's c10d rendezvous, for hosts without numbers; the processes of each attempt have a new store."""

    _endpoint: Endpoint

    @classmethod
    def of(cls, spec: Spec) -> DynamicRendezvous:
        endpoint = Endpoint(spec)
        made = cls.from_backend(
            endpoint.run_id,
            endpoint.store,
            C10dRendezvousBackend(endpoint.store, endpoint.run_id),
            spec.nnodes,
            spec.nnodes,
            local_addr=endpoint.address or None,
            timeout=RendezvousTimeout(join=datetime.timedelta(seconds=_JOIN_S)),
        )
        made._endpoint = endpoint
        found: DynamicRendezvous = made
        return found

    def stop(self) -> None:
        """End its thread. The other hosts are told nothing."""
        self._stop_heartbeats()

    def next_rendezvous(self) -> RendezvousInfo:
        self._bootstrap_store_info = None
        self._shared_tcp_store_server = None
        with _Waiting("other hosts"):
            return super().next_rendezvous()

    def _create_tcp_store_server(self, master_addr: str, master_port: int) -> Any:
        return self._endpoint.serve_attempt()[0]


def handler(spec: Spec) -> LoopbackRendezvous | StaticRendezvous | DynamicRendezvous:
    """Rendezvous with which the agent of this host finds the others.

    `stop` is to be called before Python ends: a thread that comes back from PyTorch's store then aborts the process.

    Raises:
        RendezvousError: the endpoint can neither be served nor reached.
    """
    if spec.nnodes == 1:
        return LoopbackRendezvous()
    return StaticRendezvous(spec) if spec.backend == "static" else DynamicRendezvous.of(spec)
