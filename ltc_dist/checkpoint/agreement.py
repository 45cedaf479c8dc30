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
            reading.look(self._directory, candidate)
            self._told(["read", candidate])
            contents = self._attempt(candidate, shared, own)

        try:
            reading.find(self._directory, attempt, step)
        except CheckpointError as error:
            self._told(["error", error.what, error.got, error.next])
            raise
        self._told(["done"])
        return contents

    def _follow(self, shared: Collection[str], own: Collection[str]) -> Contents | None:
        """Read what rank 0 names, until all have read one."""
        contents: Contents | None = None
        while True:
            verb, *said = self._told(None)
            if verb == "error":
                raise CheckpointError(said[0], got=said[1], next=said[2])
            if verb == "done":
                return contents
            try:
                contents = self._attempt(said[0], shared, own)
            except CheckpointError:
                contents = None  # rank 0 has heard why, and names another one

    def _told(self, message: list[Any] | None) -> list[Any]:
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
        here, problem = self._here, ""
        try:
            contents = reading.read(self._directory, step, here.rank, here.world_size, shared, own)
        except (CheckpointError, OSError) as error:
            problem = reading.why(error)
        heard = host_collectives.rendezvous(f"restored/{self.token}", problem.encode())
        problems = [p.decode() for p in heard if p]
        if problems:
            raise CheckpointError(problems[0])
        return contents
