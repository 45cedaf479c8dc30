"""What a process raises about others of its job that do not come to where it waits for them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from ltc_core.errors import CollectiveTimeoutError, PeerEndedError
from ltc_core.settings import settings
from ltc_dist.job.host_collectives import ended

__all__ = ["look_for_ended", "too_late"]


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
