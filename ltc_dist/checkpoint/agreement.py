"""What the processes of a job agree on: a directory that all can write to and see, and a checkpoint that all can read.

Rank 0 claims the directory, and names one checkpoint after the other until each process could read what it needs of it.
What one process finds wrong, all hear. Comes from `lock`, `commit` and `reading`; used by `checkpointer`.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import secrets
from collections.abc import Collection
from typing import Any

from ltc_core.errors import CheckpointError, CheckpointIOError, listed
from ltc_dist.checkpoint import commit, lock, reading
from ltc_dist.checkpoint.reading import Contents
from ltc_dist.job import host_collectives
from ltc_dist.job.ranks import Ranks

__all__ = ["Agreement"]

_made = itertools.count()  # those of this process meet the same ones of the others
_NOT_WRITABLE = (
    "cannot be written to",
    "give a directory that every process may write to, and no other job or open Checkpointer does.",
)
_NOT_SHARED = (
    "would not be whole in",
    "give a directory that all hosts share, by a path that leads every process to it.",
)


class Agreement:
    """The directory of a job's checkpoints, once every process can write there and sees what the others write.

    Attributes:
        token: of this job's temporary names.

    Raises:
        CheckpointIOError: some process cannot; in every process.

    Cost: the processes wait for each other.
    """

    def __init__(self, directory: str, here: Ranks) -> None:
        self._directory = directory
        self._here = here
        self._claim: lock.Claim | None = None
        place, probe = f"checkpoints/{next(_made)}", secrets.token_hex(8)
        try:
            self.token = self._open(place, probe)
        except BaseException:
            self.release()
            raise
        finally:
            with contextlib.suppress(OSError):  # told already, where it could not be made
                os.unlink(commit.probe_name(directory, probe))

    def _open(self, place: str, probe: str) -> str:
        problem = ""
        try:
            commit.probe(self._directory, probe)
            if self._here.rank == 0:
                self._claim = lock.claim(self._directory)
                commit.sweep(self._directory)
        except OSError as error:
            problem = str(error)
            if isinstance(error, CheckpointIOError):
                problem = f"{error.what} ({error.got})"
        payload = json.dumps([problem, secrets.token_hex(4), probe]).encode()
        answers = [json.loads(p) for p in host_collectives.rendezvous(place, payload)]
        self._refuse([problem for problem, _, _ in answers], *_NOT_WRITABLE)
        probes = {rank: probe for rank, (_, _, probe) in enumerate(answers)}
        if self._here.rank > 0:
            probes = {0: probes[0]}
        else:
            commit.remove_other_probes(self._directory, probes.values())
        unseen = commit.see_probes(self._directory, probes)
        told = f"does not see what rank {listed(map(str, unseen))} wrote there" if unseen else ""
        problems = host_collectives.rendezvous(f"{place}/seen", told.encode())
        self._refuse([problem.decode() for problem in problems], *_NOT_SHARED)
        return str(answers[0][1])

    def _refuse(self, problems: list[str], what: str, next: str) -> None:
        """Raise if some process has a problem; they are in the order of ranks, "" for none."""
        found = [f"rank {rank}: {problem}" for rank, problem in enumerate(problems) if problem]
        if found:
            raise CheckpointIOError(
                f"checkpoints {what} {self._directory}", got=listed(found), next=next
            )

    def release(self) -> None:
        """Release the directory; further calls do nothing."""
        if self._claim is not None:
            self._claim.release()

    def read(
        self, step: int | None, shared: Collection[str], own: Collection[str]
    ) -> Contents | None:
        """Read what this process needs of the newest checkpoint that is whole, the same one in all processes.

        Args:
            step: read that of this step instead.
            shared, own: names of the objects that are needed.

        Returns:
            None if there is no checkpoint.

        Raises:
            CheckpointError: there are some, and none is whole.
        """
        if self._here.rank > 0:
            return self._follow(shared, own)
        contents: Contents | None = None

        def attempt(candidate: int) -> None:
            nonlocal contents
            reading.patiently(lambda: reading.inspect(self._directory, candidate))
            self._from_rank_0(["read", candidate])
            contents = self._attempt(candidate, shared, own)

        try:
            reading.find(self._directory, attempt, step)
        except CheckpointError as error:
            number = error.errno if isinstance(error, CheckpointIOError) else None
            self._from_rank_0(["error", error.what, error.got, error.next, number])
            raise
        self._from_rank_0(["done"])
        return contents

    def _follow(self, shared: Collection[str], own: Collection[str]) -> Contents | None:
        """Read what rank 0 names, until all have read one."""
        contents: Contents | None = None
        while True:
            verb, *said = self._from_rank_0(None)
            if verb == "error":
                raise _error_of_another(*said)
            if verb == "done":
                return contents
            try:
                contents = self._attempt(said[0], shared, own)
            except CheckpointError:
                contents = None  # rank 0 has heard why, and names another one

    def _from_rank_0(self, message: list[Any] | None) -> list[Any]:
        """Message of rank 0, which gives it here."""
        payload = b"" if message is None else json.dumps(message).encode()
        found: list[Any] = json.loads(
            host_collectives.rendezvous(f"restore/{self.token}", payload)[0]
        )
        return found

    def _attempt(self, step: int, shared: Collection[str], own: Collection[str]) -> Contents:
        """Read a checkpoint, and hear whether the others could.

        Raises:
            CheckpointError: some process found a file missing or damaged.
        """
        here = self._here.rank, self._here.world_size
        problem: tuple[str, int | None] = "", None
        try:
            contents = reading.patiently(
                lambda: reading.read(self._directory, step, *here, shared, own)
            )
        except (CheckpointError, OSError) as error:
            problem = reading.why(error), error.errno if reading.may_pass(error) else None
        heard = host_collectives.rendezvous(f"restored/{self.token}", json.dumps(problem).encode())
        problems = [(what, number) for what, number in map(json.loads, heard) if what]
        if problems:
            what, number = min(problems, key=lambda p: p[1] is None)  # one that may pass decides
            raise _error_of_another(what, number=number)
        return contents


def _error_of_another(
    what: str, got: str = "", next: str = "", number: int | None = None
) -> CheckpointError:
    """An error as another process had it."""
    if number is None:
        return CheckpointError(what, got=got, next=next)
    return CheckpointIOError(what, got=got, next=next, errno=number)
