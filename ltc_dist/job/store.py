"""The store of a job, and the addresses that it and gloo listen on: one interface of a host at most.

A job on one host has a store on the loopback interface. Served by the parent of `spawn` and by the launcher's agent.
"""

from __future__ import annotations

import ipaddress
import os
import socket
from typing import Any

import torch.distributed

__all__ = ["LOOPBACK", "address_towards", "gloo_devices", "is_loopback", "serve_store"]

LOOPBACK = "127.0.0.1"
# An address for documentation (RFC 5737), whose route is the default route; nothing is sent.
_ANYWHERE, _DISCARD = "192.0.2.1", 9
c10d: Any = torch.distributed  # its stubs lack what is used here


def serve_store(address: str = LOOPBACK, port: int = 0) -> tuple[Any, int]:
    """A store and its port; it is served as long as it is referenced.

    Args:
        address: of an interface of this host, the only one that it listens on; empty for all of them.
        port: 0 for one that is free.

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


def is_loopback(host: str) -> bool:
    """Whether a host is named by its loopback interface."""
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def address_towards(host: str) -> str:
    """The address of this host, on the interface that leads to `host`; nothing is sent.

    If `host` resolves to a loopback address, as a host's own name often does (/etc/hosts), the interface of the default
    route is taken.

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
    """What gloo listens on: the interfaces of GLOO_SOCKET_IFNAME, else the loopback or the way to MASTER_ADDR.

    gloo's own default is the address that the host's name resolves to.
    """
    create = c10d.ProcessGroupGloo.create_device
    names = os.environ.get("GLOO_SOCKET_IFNAME", "").strip()
    if is_one_host and names in ("", "lo"):
        return [create(hostname=LOOPBACK)]
    if names:
        return [create(interface=name.strip()) for name in names.split(",")]
    return [create(hostname=address_towards(os.environ.get("MASTER_ADDR", LOOPBACK)))]
