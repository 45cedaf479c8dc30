"""The other processes of this job, for an executor whose programs may span the devices of all of them.

`ltc_dist` sets `find`, because only it knows ranks and the job's store. Used by `jax.library`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

__all__ = ["Companions", "NotTogether", "find"]


class NotTogether(Exception):
    """The devices of the processes are not joined; the text says why, and is the same in all of them."""


class Companions(Protocol):
    """All processes of the job.

    Attributes:
        rank: of this process.
        count: number of processes.
    """

    rank: int
    count: int

    def meet(self, refusal: str) -> str:
        """Wait until each process makes its devices; returns an address of rank 0 with a free port.

        Args:
            refusal: why this process cannot join the others; empty if it can.

        Raises:
            NotTogether: a process cannot join, has ended, or does not come in time.
        """

    def confirm(self, refusal: str) -> None:
        """Wait until each process has joined the others, or has failed to.

        Raises:
            NotTogether: a process has failed to, for which `refusal` is the reason.
        """


def _nobody() -> Companions | None:
    return None


find: Callable[[], Companions | None] = _nobody
