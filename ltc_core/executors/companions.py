"""The other processes of this job, for an executor whose programs may span the devices of all of them.

`ltc_dist` sets `find`, because only it knows ranks and the job's store. Used by `jax.library`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, Protocol

__all__ = ["LANES", "Companions", "NotTogether", "Run", "find"]

# What processes agree on, each in one order: programs that run, tensors that are divided, data that move.
LANES = ("programs", "tensors", "moves")


class NotTogether(Exception):
    """The devices of the processes are not joined; the text says why, and is the same in all of them."""


class Run(NamedTuple):
    """A run of a program of all processes.

    Attributes:
        number: of the run, counted in each process.
        what: text of the program.
        where: the user's line.
    """

    number: int
    what: str
    where: str


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

    def agree(self, lane: str, what: str, where: str) -> None:
        """Wait until each process is about to do the same.

        Args:
            lane: of `LANES`.
            what: text of it.
            where: the user's line.

        Raises:
            CollectiveError: a process is about to run something else, has ended, or does not come in time.
        """

    def check(self, run: Run, is_late: bool) -> None:
        """Check what the others do while this process waits for a program of all of them.

        Args:
            run: of the program.
            is_late: whether a process that is at something else by now will not come.

        Raises:
            PeerEndedError: a process has ended.
            CollectiveError: a process waits for this one to do something else, or in another program.
        """

    def end_wait(self) -> None:
        """The program for which this process has waited is done."""

    def keep_connected(self, disconnect: Callable[[], object]) -> None:
        """Have this process disconnect at its end, and rank 0, which the others are connected to, end after them."""


def _nobody() -> Companions | None:
    return None


find: Callable[[], Companions | None] = _nobody
