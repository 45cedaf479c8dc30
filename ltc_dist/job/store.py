"""The store of a job, and the addresses that the store and gloo listen on.

On one host both listen on the loopback interface only. The store is served by the parent of `processes.spawn` and by
`ltc_launch.rendezvous`.
"""

from __future__ import annotations

import datetime
import importlib
import ipaddress
import os
import socket
from typing import Any

import torch.distributed

from ltc_core.settings import settings

__all__ = [
    "LOOPBACK",
    "address_towards",
    "connect",
    "gloo_devices",
    "is_loopback",
    "note_served",
    "serve_store",
]

LOOPBACK = "127.0.0.1"
# An address for documentation (RFC 5737), whose route is the default route; nothing is sent.
_ANYWHERE, _DISCARD = "192.0.2.1", 9
c10d: Any = torch.distributed  # its stubs lack what is used here
_rendezvous: Any = importlib.import_module(
    "torch.distributed.rendezvous"
)  # the name is a function's, too
_connect_to_agent: Any = _rendezvous._create_c10d_store
_served: tuple[str, int] | None = None


def serve_store(address: str = LOOPBACK, port: int = 0) -> tuple[Any, int]:
    """Serve a store, as long as it is referenced; returns it and its port.

    Args:
        address: of the interface to listen on; empty for all interfaces.
        port: 0 for a free one.

    Raises:
        OSError: the address is not one of this host, or the port is taken.
    """
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    listener = socket.create_server((address, port), family=family)
    port = listener.getsockname()[1]
    store = c10d.TCPStore(
        address or LOOPBACK,
        port,
        is_master=True,
        wait_for_workers=False,
        master_listen_fd=listener.detach(),
    )
    return store, port


def note_served(address: str, port: int) -> None:
    """Note where the parent of this process serves the store. A script may serve another store at another port.

    It sets MASTER_PORT then, or names a port in `init_method`, as PyTorch's DDP tutorial does. But where
    TORCHELASTIC_USE_AGENT_STORE is set, PyTorch makes every process a client, and all would wait for a server. There is
    no public hook for it: the schemes `env` and `tcp` cannot be registered again.
    """
    global _served
    _served = address, port
    _rendezvous._create_c10d_store = _create_c10d_store


def _create_c10d_store(
    hostname: str, port: int, rank: int, world_size: int, timeout: Any, *more: Any, **named: Any
) -> Any:
    if _served is None or port == _served[1]:
        return _connect_to_agent(hostname, port, rank, world_size, timeout, *more, **named)
    return c10d.TCPStore(
        hostname, port, world_size, is_master=rank == 0, timeout=timeout, multi_tenant=True
    )


def connect(rank: int, world_size: int) -> Any:
    """New connection to the store of the job: the one that the parent serves, else that of MASTER_ADDR.

    Raises:
        RuntimeError, ValueError: it cannot be reached, or the variables are missing.
    """
    timeout = datetime.timedelta(seconds=settings.collective_timeout_s)
    if _served is not None:
        return c10d.TCPStore(*_served, is_master=False, timeout=timeout)
    found, _, _ = next(c10d.rendezvous("env://", rank, world_size, timeout=timeout))
    return found


def is_loopback(host: str) -> bool:
    """Whether `host` is 'localhost' or a loopback address."""
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def address_towards(host: str) -> str:
    """Address of this host on the interface that leads to `host`; nothing is sent.

    If `host` resolves to a loopback address, as a host's own name often does (/etc/hosts), it is the address on the
    interface of the default route.

    Raises:
        OSError: there is no such host, or no route to it.
    """
    found = _source(host)
    if is_loopback(found) and not is_loopback(host):
        try:
            return _source(_ANYWHERE)
        except OSError:  # a host without a network
            return found
    return found


def _source(host: str) -> str:
    family, _, _, _, address = socket.getaddrinfo(host, _DISCARD, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect(address)
        return str(probe.getsockname()[0])


def gloo_devices(is_one_host: bool) -> list[Any]:
    """What gloo listens on: the interfaces of GLOO_SOCKET_IFNAME, else the loopback or the one towards MASTER_ADDR.

    gloo's own default is the address that the host's name resolves to.
    """
    create = c10d.ProcessGroupGloo.create_device
    names = os.environ.get("GLOO_SOCKET_IFNAME", "").strip()
    if is_one_host and names in ("", "lo"):
        return [create(hostname=LOOPBACK)]
    if names:
        return [create(interface=name.strip()) for name in names.split(",")]
    return [create(hostname=address_towards(os.environ.get("MASTER_ADDR", LOOPBACK)))]
