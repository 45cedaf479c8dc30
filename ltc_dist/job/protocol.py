"""What the processes and the launchers of a job tell each other through its store: a row for each kind of fact.

A fact is of one writer, and ends: with its writer, or with what it is about. Stores are written and read through these
rows only, but for the addresses that PyTorch's backends exchange (`GROUP`). docs/protocol.md has the same table.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

__all__ = [
    "ASKED",
    "AT",
    "BEGUN",
    "BUSY",
    "CAME",
    "DEVICES",
    "ENDED",
    "FACTS",
    "GROUP",
    "HOST_ENDED",
    "LEASE",
    "MEETING",
    "MEMBER",
    "NEW_PLAN",
    "OUTCOME",
    "REPORT",
    "RUN",
    "SAVED",
    "TIME",
    "TOGETHER",
    "Fact",
]


@dataclass(frozen=True)
class Fact:
    """A kind of fact.

    Attributes:
        pattern: of its keys.
        value: what a key holds.
        writer: who writes it; nobody else does.
        ends: when it is no longer true, and what is done about it.
    """

    pattern: str
    value: str
    writer: str
    ends: str

    def key(self, **place: object) -> str:
        return self.pattern.format(**place)

    def tell(self, store: Any, value: bytes | str = b"1", **place: object) -> None:
        store.set(self.key(**place), value)

    def tell_first(self, store: Any, value: str, **place: object) -> str:
        """Write the fact if no process has written it; return the fact that is in the store."""
        held: bytes = store.compare_set(self.key(**place), "", value)
        return held.decode()

    def heard(self, store: Any, **place: object) -> bytes:
        """The value; empty if nobody has told it, or it was taken back."""
        key = self.key(**place)
        return bytes(store.get(key)) if store.check([key]) else b""

    def take_back(self, store: Any, **place: object) -> None:
        """Say that it holds no more. Its key stays: who reads it just now would wait for it otherwise."""
        store.set(self.key(**place), b"")

    def forget(self, store: Any, **place: object) -> None:
        """Remove the key of a fact that nobody reads any more."""
        store.delete_key(self.key(**place))


# -- of the processes of one attempt, below ltc/ATTEMPT --------------------------------------------------

ENDED = Fact(
    "ended/{rank}", "1", "the process, or its launcher when it vanished", "with the attempt"
)
BUSY = Fact(
    "busy",
    "what a process does on the host that others wait for, and how far it is",
    "the process that does it; the last one counts",
    "when it is done: taken back",
)
MEETING = Fact(
    "meet/{tag}/{members}/{number}/{rank}",
    "the payload of a rendezvous",
    "each member",
    "at the member's next rendezvous of this tag: removed",
)
MEMBER = Fact(
    "member/{line}/{position}",
    "1: a member of a line is about to be connected",
    "each member",
    "with the attempt",
)
GROUP = Fact("group/{line}", "addresses of gloo or NCCL", "PyTorch's backends", "with the attempt")
NEW_PLAN = Fact(
    "new/{line}/{number}/{position}",
    "a collective whose plan is new",
    "each member of the line",
    "at the member's next new plan: removed",
)
AT = Fact(
    "at/{line}/{position}",
    "the collective that a member waits in, and those before",
    "each member that has waited for a second",
    "when the wait is over: taken back",
)
DEVICES = Fact(
    "devices/{stage}/{rank}",
    "a process is about to join the devices of all processes: its id, an address, and why it cannot",
    "the first process of the rank that makes its devices",
    "with the attempt",
)
TOGETHER = Fact(
    "devices/{stage}/together",
    "yes, or why the devices of the processes are not joined",
    "the first process that knows it",
    "with the attempt",
)
ALIKE = Fact(
    "alike/{lane}/{number}/{rank}",
    "a program that a process is about to run, or a tensor to divide, on the devices of all processes",
    "each process",
    "when all have come to the next one: removed",
)
REPORT = Fact(
    "checkpoint/{token}/{number}/{rank}",
    "the parts of a checkpoint that a process has written, or its error",
    "each process but rank 0",
    "when the process has heard the outcome: removed",
)
OUTCOME = Fact(
    "checkpoint/{token}/{number}/outcome",
    "how the commit of a checkpoint has ended",
    "rank 0",
    "when all have reported to the next checkpoint: removed",
)
SAVED = Fact(
    "saved/{master}/{path}/{number}",
    "1: a file has been saved that often",
    "the process that saves it",
    "with the attempt",
)
ASKED = Fact(
    "clock/{rank}/{number}/asked",
    "1: a process of another host asks for the time",
    "the process, if it records a timeline",
    "when rank 0 has answered: removed",
)
TIME = Fact(
    "clock/{rank}/{number}/time",
    "the time of rank 0 at the answer, in ns",
    "rank 0",
    "when the process has read it: removed",
)

# -- of the launchers of a job on several hosts -----------------------------------------------------------

RUN = Fact(
    "ltc/run/{name}",
    "the job's random id, below which the rest is",
    "the first launcher of a --rdzv-id",
    "with the first host's launcher, which serves the store",
)
LEASE = Fact(
    "lease/{rank}",
    "a launcher's token and a number that grows",
    "the launcher of a host, four times a second",
    "4 seconds after its last change; taken back when the launcher ends",
)
HOST_ENDED = Fact(
    "ended/{rank}",
    "1",
    "the launcher of a host that begins no other attempt",
    "when another launcher of this host has the lease",
)
CAME = Fact(
    "{attempt}/came/{rank}",
    "a launcher's token",
    "the launcher of a host",
    "with the launcher's lease",
)
BEGUN = Fact(
    "{attempt}/begun",
    "the tokens of the launchers that take part, and where the store of their processes is",
    "the first host's launcher",
    "with the attempt",
)

FACTS = (
    ENDED, BUSY, MEETING, MEMBER, GROUP, NEW_PLAN, AT, DEVICES, TOGETHER, ALIKE, REPORT, OUTCOME, SAVED, ASKED, TIME,
    RUN, LEASE, HOST_ENDED, CAME, BEGUN,
)  # fmt: skip
