"""The store of a job that is on one host: it listens on the loopback interface only, at a port that was free.

Served by the parent of `spawn` and by the launcher's agent.
"""

from __future__ import annotations

import socket
from typing import Any

import torch.distributed

__all__ = ["LOOPBACK", "serve_store"]

LOOPBACK = "127.0.0.1"
c10d: Any = torch.distributed  # its stubs lack what is used here


def serve_store() -> tuple[Any, int]:
    """Give a store and its port; it is served as long as it is held."""
    listener = socket.create_server((LOOPBACK, 0))
    port = listener.getsockname()[1]
    store = c10d.TCPStore(
        LOOPBACK,
        port,
        is_master=True,
        wait_for_workers=False,
        master_listen_fd=listener.detach(),
    )
    return store, port
