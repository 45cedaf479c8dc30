"""One checkpoint, written by all processes of a job: each writes its parts, rank 0 commits when all have.

It may run in a background thread. Processes communicate through the job's store. A failure in one of them is raised in
all, with its rank. Uses `commit`; called by `checkpointer`.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from ltc_core.errors import CheckpointError, CheckpointIOError, LtcError
from ltc_core.serialization.atomic import discard, io_errors
from ltc_core.serialization.directory import Plan
from ltc_dist.checkpoint import commit
from ltc_dist.checkpoint.layout import Manifest, step_name
from ltc_dist.job import host_collectives, protocol
from ltc_dist.job.ranks import Ranks

__all__ = ["Transaction"]


@dataclass(frozen=True)
class _Report:
    """Outcome of a process: the digests of what it wrote, or its error."""

    digests: dict[str, str] = field(default_factory=dict)
    what: str = ""
    got: str = ""
    next: str = ""
    is_io: bool = False

    @staticmethod
    def of(error: BaseException, here: Ranks) -> _Report:
        who = f"rank {here.rank}: " if here.world_size > 1 else ""
        is_io = isinstance(error, OSError)
        if isinstance(error, LtcError):
            return _Report({}, f"{who}{error.what}", error.got, error.next, is_io)
        return _Report({}, f"{who}{type(error).__name__}: {error}", is_io=is_io)

    @staticmethod
    def read(payload: bytes) -> _Report:
        return _Report(**json.loads(payload))

    def payload(self) -> bytes:
        return json.dumps(vars(self)).encode()

    def raised(self, step: int) -> CheckpointError:
        kind: Any = CheckpointIOError if self.is_io else CheckpointError
        error: CheckpointError = kind(
            f"{step_name(step)} was not saved ({self.what})", got=self.got, next=self.next
        )
        return error


@dataclass(frozen=True)
class Transaction:
    """What one process does for a checkpoint.

    Attributes:
        number: of this checkpoint among those of its Checkpointer.
        plans: the parts that this process writes, by name.
        known: steps that this run comes from or has committed; a commit adds to it.
        failure: why it could not make its parts.
    """

    root: str
    token: str
    step: int
    keep: int | None
    here: Ranks
    number: int
    plans: dict[str, Plan]
    known: set[int]
    failure: BaseException | None = None

    def run(self) -> None:
        """Write the parts, and wait for the commit.

        Raises:
            CheckpointIOError: this process, or another one, could not write.
            CheckpointError: another process failed otherwise.
        """
        failure = self.failure
        mine = _Report()
        try:
            if failure is None:
                mine = _Report(self._write())
        except Exception as error:
            failure = error
        if failure is not None:
            mine = _Report.of(failure, self.here)
        outcome = self._commit(mine) if self.here.rank == 0 else self._hear(mine)
        if failure is not None:
            raise failure
        if outcome.what:
            raise outcome.raised(self.step)

    @property
    def _temporary(self) -> str:
        return commit.temporary_name(self.root, self.step, self.token)

    def _write(self) -> dict[str, str]:
        need_bytes = sum(plan.nbytes for plan in self.plans.values())
        with (
            io_errors(self._temporary, need_bytes),
            host_collectives.busy(f"writes {step_name(self.step)}") as progress,
        ):
            return {
                name: commit.write_part(self._temporary, name, plan, progress)
                for name, plan in self.plans.items()
            }

    # -- rank 0 ------------------------------------------------------------------------------------

    def _commit(self, mine: _Report) -> _Report:
        """Wait for all parts, commit, and publish the outcome."""
        try:
            reports = [mine, *self._reports()]
            outcome = next((r for r in reports if r.what), _Report())
            if outcome.what:
                discard(self._temporary)
            else:
                self._publish(reports)
        except Exception as error:
            outcome = _Report.of(error, self.here)
            discard(self._temporary)
        if self.here.world_size > 1:
            place = {"token": self.token, "number": self.number}
            protocol.OUTCOME.tell(host_collectives.job_store(), outcome.payload(), **place)
        return outcome

    def _reports(self) -> list[_Report]:
        others = range(1, self.here.world_size)
        if not others:
            return []
        place = {"token": self.token, "number": self.number}
        keys = [protocol.REPORT.key(**place, rank=rank) for rank in others]
        payloads = host_collectives.await_values(
            keys, others, f"the writing of {step_name(self.step)}"
        )
        if self.number > 1:  # who reports has heard the outcome before
            earlier = {**place, "number": self.number - 1}
            protocol.OUTCOME.forget(host_collectives.job_store(), **earlier)
        return [_Report.read(payload) for payload in payloads]

    def _publish(self, reports: Sequence[_Report]) -> None:
        parts = {name: digest for report in reports for name, digest in report.digests.items()}
        others = {name: digest for name, digest in parts.items() if name not in self.plans}
        with io_errors(self._temporary):
            commit.see_parts(self._temporary, others)
            commit.abandon(self.root, self.known)
            commit.write_manifest(self._temporary, Manifest(self.step, self.here.world_size, parts))
            commit.publish(self._temporary, self.root, self.step)
            self.known.add(self.step)
            commit.point_latest(self.root, self.step)
            commit.prune(self.root, self.step, self.keep, self.known)

    # -- the others --------------------------------------------------------------------------------

    def _hear(self, mine: _Report) -> _Report:
        """Report to rank 0, and wait for the outcome."""
        store, place = host_collectives.job_store(), {"token": self.token, "number": self.number}
        protocol.REPORT.tell(store, mine.payload(), **place, rank=self.here.rank)
        key = protocol.OUTCOME.key(**place)
        (payload,) = host_collectives.await_values(
            [key], [0], f"the commit of {step_name(self.step)}"
        )
        protocol.REPORT.forget(store, **place, rank=self.here.rank)
        outcome = _Report.read(payload)
        if outcome.what:  # rank 0 has done so, where it sees the directory
            discard(self._temporary)
        return outcome
