"""How the agents of a job find each other: on one host there is one agent, and its store is for this host only."""

from __future__ import annotations

import secrets
from typing import Any

import torch.distributed
from torch.distributed.elastic.rendezvous import (
    RendezvousHandler,
    RendezvousInfo,
    RendezvousParameters,
    RendezvousStoreInfo,
)
from torch.distributed.elastic.rendezvous import registry as rendezvous_registry

from ltc_dist.loopback import LOOPBACK, serve_store

from .spec import Spec

__all__ = ["LoopbackRendezvous", "handler"]

_JOIN_S = 900  # for hosts to come
c10d: Any = torch.distributed  # its stubs lack what is used here


class LoopbackRendezvous(RendezvousHandler):
    """One host: the agent serves the store, on the loopback interface; a new one for each attempt."""

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
        self._store, port = (
            serve_store()
        )  # what an attempt that failed has written must not be read again
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


def handler(spec: Spec) -> RendezvousHandler:
    """Give what the agent of this host finds the others by."""
    if spec.nnodes == 1:
        return LoopbackRendezvous()
    parameters = RendezvousParameters(
        backend=spec.backend,
        endpoint=spec.endpoint,
        run_id=f"ltc-{spec.endpoint}",  # the same on all hosts
        min_nodes=spec.nnodes,
        max_nodes=spec.nnodes,
        rank=spec.node_rank,
        timeout=_JOIN_S,
    )
    found: RendezvousHandler = rendezvous_registry.get_rendezvous_handler(parameters)
    return found
