"""What the supervisors of processes decide in one way: which failure counts, whom to wait for, what ends with whom.

`spawn` starts processes of a function; PyTorch's elastic agent starts those of the launcher. Each asks a `Supervision`
of its processes on this host.

`spawn` does not run on `torch.distributed.elastic.multiprocessing.start_processes`: a process whose function has
returned waits there until its parent asks for results, so nobody can join one alone; it is never a daemon; and the
exception that it raised comes back as text.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Generic, Protocol, TypeVar

from ltc_dist.processes.failures import CONSEQUENCE, VANISHED, Failure, first_failure, has_cause
from ltc_dist.processes.groups import end_groups

__all__ = ["Report", "Supervised", "Supervision"]

_CAUSE_S = 2.0  # for the cause of a failure to appear, while only consequences are known
_TOGETHER_S = 0.3  # for those that fail together: the first one counts


class Report(Protocol):
    """How a process says that it failed: its `failures.verdict_of`, and when, on the host's monotonic clock."""

    @property
    def verdict(self) -> str: ...

    @property
    def time_s(self) -> float: ...


class Supervised(Protocol):
    """A process of this host.

    Attributes:
        exitcode: None while it runs; negative ones are signals.
    """

    @property
    def rank(self) -> int: ...

    @property
    def pid(self) -> int: ...

    @property
    def exitcode(self) -> int | None: ...

    def report(self) -> Report | None:
        """Return what it has reported; None if it has not. Asked when it has failed."""

    def has_left(self) -> bool:
        """Whether its function or script has ended. Asked when its exit code is 0, which may be that of `os._exit`."""


AProcess = TypeVar("AProcess", bound=Supervised)


class Supervision(Generic[AProcess]):
    """The processes of one attempt on this host.

    Args:
        tell_ended: tells the others that a rank has ended which did not say so itself.

    Attributes:
        vanished: ranks that ended with exit code 0 before their function or script did.
    """

    def __init__(self, processes: Sequence[AProcess], tell_ended: Callable[[int], None]) -> None:
        self.processes = {process.rank: process for process in processes}
        self.vanished: set[int] = set()
        self._tell_ended = tell_ended
        self._failed_s: float | None = None  # when the first failure was seen
        self._ended_s: float | None = None  # when the processes were told to end
        self._ended: set[int] = set()  # ranks that ran then

    def running(self) -> list[AProcess]:
        return [process for process in self.processes.values() if process.exitcode is None]

    def _failed(self) -> list[AProcess]:
        return [process for process in self.processes.values() if process.exitcode]

    def tell_vanished(self) -> None:
        """Report vanished processes to the running ones, which may wait for them. Called in each round."""
        for rank, process in self.processes.items():
            if rank not in self.vanished and process.exitcode == 0 and not process.has_left():
                self.vanished.add(rank)
                self._tell_ended(rank)

    def awaits_cause(self) -> bool:
        """Whether those that run should run on for a moment, though others have failed.

        A process that is ended can no longer report why the others failed.
        """
        failed = self._failed()
        if not failed or not self.running():
            return False
        now = time.monotonic()
        if self._failed_s is None:
            self._failed_s = now
        limit = _TOGETHER_S if has_cause(map(self._failure, failed)) else _CAUSE_S
        return now - self._failed_s < limit

    @contextlib.contextmanager
    def ending(self, grace_s: float) -> Iterator[None]:
        """In the block the processes are told to end, and end; then what they have started is ended.

        Args:
            grace_s: seconds for all of it; then what is left is killed.
        """
        began, running = time.monotonic(), self.running()
        if self._ended_s is None:
            self._ended_s, self._ended = began, {process.rank for process in running}
        yield
        if running or self._failed():
            pids = [process.pid for process in self.processes.values()]
            end_groups(pids, grace_s - (time.monotonic() - began))

    def first_failure(self, expected: Collection[int] = ()) -> Failure | None:
        """The failure that caused the others; None if no process failed or vanished.

        Args:
            expected: exit codes that are no failures here.
        """
        failed = [process for process in self._failed() if process.exitcode not in expected]
        found = [self._failure(process) for process in failed]
        found += [Failure(rank, 0, VANISHED) for rank in self.vanished]
        return first_failure(found) if found else None

    def ended_before(self, failure: Failure) -> list[int]:
        """Ranks that ended by themselves with exit code 0, if the failure is that a process was lost: one of these."""
        if failure.verdict != CONSEQUENCE:
            return []
        own = self.processes.keys() - self._ended - self.vanished
        return sorted(rank for rank in own if self.processes[rank].exitcode == 0)

    def _failure(self, process: AProcess) -> Failure:
        report, code = process.report(), process.exitcode or 0
        was_stopped = self._ended_s is not None and process.rank in self._ended
        if report is None:
            return Failure(process.rank, code, was_stopped=was_stopped)
        if was_stopped:
            assert self._ended_s is not None
            was_stopped = report.time_s > self._ended_s
        return Failure(process.rank, code, report.verdict, report.time_s, was_stopped)
