"""The collectives that torch.distributed runs on tensors of the device, compared as those of graphs are.

Each process group has a `Line` of its own: its collectives have numbers, a plan that is new is compared before it runs,
and a wait looks once a second what the others do. The messages are gloo's, without an identity. Called by
`ltc_core.api.c10d` before each collective.
"""

from __future__ import annotations

import threading
import weakref
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed

from ltc_core import source
from ltc_core.graph.collective import Route
from ltc_dist.collectives.transport import Line, keep
from ltc_dist.job.host_collectives import connected, job_store
from ltc_dist.job.ranks import ranks

__all__ = ["begin", "members_of"]

dist: Any = torch.distributed  # its stubs lack what is used here

# group -> its line; None for a group that is not compared
_lines: weakref.WeakKeyDictionary[Any, Line | None] = weakref.WeakKeyDictionary()
_members: weakref.WeakKeyDictionary[Any, tuple[int, ...]] = weakref.WeakKeyDictionary()
_names: Counter[str] = Counter()  # how many groups of a name there were


def begin(group: Any, plan: str, has_root: bool) -> Callable[[Any], None] | None:
    """Begin a collective of a group; return what waits for its work, None if the group is not compared.

    Args:
        plan: text of the collective, the same in all members.
        has_root: whether a member may have done its part before the others begin theirs.

    Raises:
        CollectiveError: another member is at another collective, or has ended.

    Cost: 10 us; the first time with a plan, a meeting of all members in the job's store.
    """
    if group not in _lines:
        _lines[group] = _line_of(group)
    line = _lines[group]
    if line is None:
        return None
    call, _ = line.begin(plan, Route(group.group_name, -1, source.user_line()))

    def wait(work: Any) -> None:
        try:
            line.wait(work, call, looks_for_ended=not has_root)
        except BaseException:
            keep(group)
            raise

    return wait


def _line_of(group: Any) -> Line | None:
    members = members_of(group)
    if not members:
        return None
    _names[group.group_name] += 1
    is_main = threading.current_thread() is threading.main_thread()
    return Line(
        f"torch.distributed {group.group_name}, {_names[group.group_name]}",
        list(members),
        group.rank(),
        job_store() if is_main else connected(),
        None,  # the group, which the line must not keep alive
    )


def members_of(group: Any) -> tuple[int, ...]:
    """Ranks of a group of this job's processes, in its order; none if it is another group, or is not compared."""
    found = _members.get(group)
    if found is None:
        members = tuple(dist.distributed_c10d._world.pg_group_ranks.get(group, ()))
        is_ours = len(members) > 1 and _is_of_job() and _backend_of(group) == "gloo"
        found = _members[group] = members if is_ours else ()
    return found


def _is_of_job() -> bool:
    """Whether torch.distributed and this runtime mean the same processes: a script may connect others."""
    here = ranks()
    of_torch = dist.get_rank(), dist.get_world_size()
    return not here.threads and (here.rank, here.world_size) == of_torch


def _backend_of(group: Any) -> str:
    return str(group._get_backend(torch.device("cpu")).name())
