"""The clock of rank 0, as a process of another host reads it: for timelines that are shown together.

All processes of a job call `offset_from_rank_0` at one point. Each asks rank 0 for its time through the store, several
times. The shortest round trip counts: the answer was made in its middle, to within half of it. Called by
`collectives.process_group` when the job connects.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from typing import Any

from ltc_dist.job import protocol
from ltc_dist.job.host_collectives import wait_checking

__all__ = ["offset_from_rank_0"]

_NUM_ROUNDS = 8
_PATIENCE_S = 10.0  # a process that records no timeline does not answer


class _NoAnswer(Exception):
    pass


def offset_from_rank_0(
    store: Any, rank: int, world_size: int, now_ns: Callable[[], int] = time.perf_counter_ns
) -> int | None:
    """Return what to add to this process's clock for that of rank 0, in ns; None if rank 0 does not answer.

    Cost: waits for the processes of lower ranks; half a millisecond for each of a process's questions.
    """
    with contextlib.suppress(_NoAnswer):
        if rank == 0:
            for other in range(1, world_size):
                _answer(store, other, now_ns)
            return 0
        return min(_ask(store, rank, number, now_ns) for number in range(_NUM_ROUNDS))[1]
    return None


def _answer(store: Any, rank: int, now_ns: Callable[[], int]) -> None:
    for number in range(_NUM_ROUNDS):
        _wait(store, protocol.ASKED.key(rank=rank, number=number))
        protocol.TIME.tell(store, str(now_ns()), rank=rank, number=number)
        protocol.ASKED.forget(store, rank=rank, number=number)


def _ask(store: Any, rank: int, number: int, now_ns: Callable[[], int]) -> tuple[int, int]:
    """How long an answer took, and the offset by it."""
    asked_ns = now_ns()
    protocol.ASKED.tell(store, rank=rank, number=number)
    _wait(store, protocol.TIME.key(rank=rank, number=number))
    there_ns, here_ns = int(protocol.TIME.heard(store, rank=rank, number=number)), now_ns()
    protocol.TIME.forget(store, rank=rank, number=number)
    return here_ns - asked_ns, there_ns - (asked_ns + here_ns) // 2


def _wait(store: Any, key: str) -> None:
    deadline = time.monotonic() + _PATIENCE_S

    def check(time_is_up: bool) -> None:
        if time_is_up or time.monotonic() >= deadline:
            raise _NoAnswer

    wait_checking([key], check, store)
