"""`Supervision` of stand-ins for processes: whose failure counts, who is waited for, who has vanished."""

import signal
import time
from dataclasses import dataclass

import pytest

from ltc_dist.processes import supervision
from ltc_dist.processes.failures import CAUSE, CONSEQUENCE, VANISHED, Failure
from ltc_dist.processes.supervision import Supervision


@dataclass
class Reported:
    verdict: str
    time_s: float


@dataclass
class Process:
    """One that runs, until a test gives it an exit code."""

    rank: int
    exitcode: int | None = None
    reported: Reported | None = None
    left: bool = True
    pid: int = 1 << 30  # nobody's

    def report(self) -> Reported | None:
        return self.reported

    def has_left(self) -> bool:
        return self.left


def watched(*processes: Process) -> tuple[Supervision[Process], list[int]]:
    told: list[int] = []
    return Supervision(processes, told.append), told


def test_nothing_has_failed() -> None:
    found, told = watched(Process(0), Process(1, 0))
    found.tell_vanished()
    assert (found.first_failure(), found.awaits_cause(), told) == (None, False, [])
    assert [p.rank for p in found.running()] == [0]


def test_one_that_vanished_is_told_once() -> None:
    found, told = watched(Process(0), Process(1, 0, left=False))
    found.tell_vanished()
    found.tell_vanished()
    assert told == [1] and found.vanished == {1}
    assert found.first_failure() == Failure(1, 0, VANISHED)


def test_who_ends_with_code_0_because_it_is_told_to_has_not_vanished() -> None:
    found, told = watched(Process(0), Process(1, 1, Reported(CAUSE, 1.0)))
    with found.ending(0.0):
        found.processes[0].exitcode, found.processes[0].left = 0, False
    assert found.first_failure() == Failure(1, 1, CAUSE, 1.0) and not told


@pytest.mark.parametrize("verdict", [CAUSE, CONSEQUENCE])
def test_the_others_run_on_until_the_cause_is_known(
    verdict: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(supervision, "_TOGETHER_S", 0.0)
    found, _ = watched(Process(0), Process(1, 1, Reported(verdict, 1.0)))
    assert found.awaits_cause() == (verdict == CONSEQUENCE)
    monkeypatch.setattr(supervision, "_CAUSE_S", 0.0)
    assert not found.awaits_cause()


def test_nobody_is_waited_for_when_all_have_ended() -> None:
    found, _ = watched(Process(0, 0), Process(1, 1, Reported(CONSEQUENCE, 1.0)))
    assert not found.awaits_cause()


@pytest.mark.parametrize(("verdict", "expected"), [(CONSEQUENCE, [1]), (CAUSE, [])])
def test_a_loss_follows_from_who_ended_with_code_0(verdict: str, expected: list[int]) -> None:
    found, _ = watched(
        Process(0, 1, Reported(verdict, 1.0)), Process(1, 0), Process(2), Process(3, 0, left=False)
    )
    found.tell_vanished()
    with found.ending(0.0):
        found.processes[2].exitcode = 0
    assert found.ended_before(Failure(0, 1, verdict, 1.0)) == expected


def test_a_failure_after_the_end_was_told_is_no_cause() -> None:
    found, _ = watched(Process(0), Process(1, -signal.SIGKILL), Process(2))
    with found.ending(0.0):
        found.processes[0].exitcode = 1
        found.processes[0].reported = Reported(CAUSE, time.monotonic() + 1)
        found.processes[2].exitcode = 1
        found.processes[2].reported = Reported(CAUSE, 0.0)  # before it was told
    assert found.first_failure() == Failure(1, -signal.SIGKILL)
    found.processes[1].exitcode = 0
    assert found.first_failure() == Failure(2, 1, CAUSE, 0.0)
