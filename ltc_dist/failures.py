"""Which of several processes failed first, and how, in words. Asked by the parent of `spawn` and by the launcher."""

from __future__ import annotations

import signal
from collections.abc import Iterable
from dataclasses import dataclass

__all__ = ["Failure", "first_failure", "how_it_ended"]


@dataclass(frozen=True)
class Failure:
    """A process that ended otherwise than well; `time_s` is when it told what it had raised, None if it did not."""

    rank: int
    exitcode: int
    time_s: float | None


def first_failure(failures: Iterable[Failure], stops_with: int = 0) -> Failure:
    """Give the one that the others failed because of.

    One that was killed or left by itself, without a word, took the others with it.

    Args:
        stops_with: the signal by which the others may have been stopped already.
    """

    def order(failure: Failure) -> tuple[int, float]:
        if failure.time_s is not None:
            return 1, failure.time_s
        was_stopped = stops_with and failure.exitcode == -stops_with
        return (2 if was_stopped else 0), failure.rank

    return min(failures, key=order)


def how_it_ended(exitcode: int) -> str:
    """Say what an exit code tells; negative ones are signals."""
    if exitcode < 0:
        return f"was killed by {signal.Signals(-exitcode).name}"
    return f"ended with exit code {exitcode}"
