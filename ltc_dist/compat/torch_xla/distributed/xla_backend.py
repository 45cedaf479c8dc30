"""`torch_xla.distributed.xla_backend`: torch.distributed's backend 'xla', and its rendezvous xla:// and pjrt://.

The backend is gloo, on tensors of the device and of the CPU: see `ltc_core.api.c10d`. Groups of it are of the class
`ProcessGroupXla`.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from datetime import timedelta
from typing import Any

import torch.distributed

from ltc_core import source
from ltc_core.api import c10d
from ltc_core.errors import ShardingError
from ltc_core.settings import settings
from ltc_dist.job.ranks import ranks

__all__ = ["ProcessGroupXla", "new_xla_process_group"]

dist: Any = torch.distributed  # the stubs of its types are incomplete

_BACKEND = "xla"
_SCHEMES = ("xla", "pjrt")


def _meet(
    url: str, timeout: timedelta = dist.default_pg_timeout, **kwargs: Any
) -> Iterator[tuple[Any, int, int]]:
    """Find the other processes as env:// does; a process that is alone needs no variables."""
    here = ranks()
    if here.world_size == 1:
        yield dist.HashStore(), 0, 1
        return
    yield from dist.rendezvous("env://", here.rank, here.world_size, timeout=timeout)


class ProcessGroupXla(getattr(dist, "ProcessGroup", object)):  # type: ignore[misc]
    """A group of processes of the backend 'xla'.

    Args:
        prefix_store: where its processes meet. None: the group cannot communicate.
        rank, size: of this process in the group, and of the group.
        timeout: how long a call waits for the other processes.

    Attributes:
        _mesh: lists of ranks that divide the job in groups like this one, this one among them; empty if nobody asked.

    A group of more processes than the job has cannot communicate either.
    """

    def getBackendName(self) -> str:
        return _BACKEND

    def __init__(self, prefix_store: Any, rank: int, size: int, timeout: timedelta) -> None:
        super().__init__(rank, size)
        self._mesh: list[list[int]] = []
        if prefix_store is None or size > max(ranks().world_size, 1):
            return
        gloo = dist.ProcessGroupGloo(prefix_store, rank, size, timeout)
        kind = dist.ProcessGroup.BackendType.GLOO
        self._set_default_backend(kind)
        for name in (settings.device_name, "cpu"):
            self._register_backend(torch.device(name), kind, gloo)


for _name, _method in c10d.derived_methods().items() if dist.is_available() else ():
    setattr(ProcessGroupXla, _name, _method)

_new_group = getattr(dist, "new_group", None)


@functools.wraps(_new_group or (lambda: None))
def new_xla_process_group(
    ranks: Sequence[int] | None = None,
    timeout: timedelta = dist.default_pg_timeout,
    backend: str | None = None,
    pg_options: Any = None,
    *args: Any,
    **kwargs: Any,
) -> Any:
    """`torch.distributed.new_group`, whose groups of the backend 'xla' know the groups of the other processes.

    Args:
        pg_options: {'xla_pg_options': {'spmd': True}}: the job is divided in groups like this one, of neighbours or of
            every n-th process; {'xla_pg_options': {'mesh': lists of ranks}}: in these.

    Raises:
        ShardingError: the job cannot be divided in groups like `ranks`.
    """
    assert _new_group is not None
    group = _new_group(ranks, timeout, backend, pg_options, *args, **kwargs)
    if ranks is not None and isinstance(group, ProcessGroupXla):
        wanted = pg_options.get("xla_pg_options", {}) if isinstance(pg_options, dict) else {}
        group._mesh = _mesh_of(list(ranks), dist.get_world_size(), wanted)
    return group


def _mesh_of(group: list[int], count: int, wanted: dict[str, Any]) -> list[list[int]]:
    """Lists of the ranks of `count` processes, `group` among them."""
    if len(group) == 1:
        return [[rank] for rank in range(count)]
    if wanted.get("mesh") and len(group) < count:
        return list(wanted["mesh"])
    if not wanted.get("spmd") or len(group) >= count:
        return [group]
    size, rest = divmod(count, len(group))
    neighbours = [list(range(k, k + len(group))) for k in range(0, count, len(group))]
    apart = [list(range(k, count, size)) for k in range(size)]
    for mesh in (neighbours, apart):
        if not rest and group in mesh:
            return mesh
    raise ShardingError(
        "the processes cannot be divided in groups like this one",
        got=f"ranks {group} of {count} processes",
        where=source.user_line(),
        next="pass neighbours or every n-th process, of a number that divides that of all; "
        "or {'xla_pg_options': {'mesh': [[0, 1], [2, 3]]}}",
    )


def _create(prefix_store: Any, rank: int, size: int, timeout: timedelta) -> ProcessGroupXla:
    return ProcessGroupXla(prefix_store, rank, size, timeout)


def _register() -> None:
    if dist.is_backend_available(_BACKEND):  # under another of its names
        return
    devices = [settings.device_name, "cpu"]
    dist.Backend.register_backend(_BACKEND, _create, devices=devices)
    dist.new_group = dist.distributed_c10d.new_group = new_xla_process_group
    for scheme in _SCHEMES:
        dist.register_rendezvous_handler(scheme, _meet)


_register()
