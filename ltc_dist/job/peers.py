"""How a process waits for others of its job, and what it raises about those that do not come."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from ltc_core.errors import CollectiveTimeoutError, PeerEndedError
from ltc_core.settings import settings
from ltc_core.timeline import slices
from ltc_core.timeline.marks import Awaited
from ltc_dist.job.host_collectives import ended, wait_checking

__all__ = ["await_peers", "look_for_ended", "too_late"]


def await_peers(
    keys: Mapping[int, str], rank: int, place: str, meeting: Awaited, store: Any
) -> None:
    """Wait until processes have written a key each, as `look_for_ended` and `too_late` say it.

    Args:
        keys: their ranks -> the keys.
        meeting: what a live view is told.

    Raises:
        PeerEndedError: one of them has ended.
        CollectiveTimeoutError: one of them did not come in time.
    """

    def check(time_is_up: bool) -> None:
        missing = [other for other, key in keys.items() if not store.check([key])]
        look_for_ended(missing, rank, place, store)
        if time_is_up and missing:
            raise too_late(f"rank {missing[0]}", rank, place)

    with slices.watched("wait for other processes", "", meeting):
        wait_checking(list(keys.values()), check, store)


def look_for_ended(others: Iterable[int], rank: int, place: str, store: Any) -> None:
    """Raise if one of the processes that are waited for has ended.

    Args:
        others: their ranks.
        rank: of this process.
        place: where it waits, such as 'is at all_reduce of f32[3], recorded at train.py:7'.
        store: connection to the job's store.

    Raises:
        PeerEndedError: the first of those that have ended.
    """
    gone = ended(others, store)
    if gone:
        raise PeerEndedError(
            f"rank {gone[0]} has ended while rank {rank} waits for it",
            got=f"rank {rank} {place}",
            next="let all processes take the same number of steps: a DistributedSampler with drop_last=True",
        )


def too_late(who: str, rank: int, place: str) -> CollectiveTimeoutError:
    """The error for a process that has waited for LTC_COLLECTIVE_TIMEOUT_S: `who` did not come."""
    return CollectiveTimeoutError(
        f"{who} did not come within {settings.collective_timeout_s:g} s",
        got=f"rank {rank} {place}",
        next="let all processes run the same steps; LTC_COLLECTIVE_TIMEOUT_S sets how long one waits",
    )
