"""Which of several failures the others follow from: chosen by cause, whatever the order and the clock."""

import itertools
import signal

import pytest
import torch

from ltc_core.errors import CollectiveError, CollectiveTimeoutError, PeerEndedError, RankEndedError
from ltc_dist.processes.failures import (
    CAUSE,
    CONSEQUENCE,
    SILENT,
    VANISHED,
    Failure,
    after,
    first_failure,
    has_cause,
    how_it_ended,
    last_line,
    verdict_of,
)

# From the strongest cause to the weakest.
KILLED = Failure(5, -signal.SIGKILL)
RAISED = Failure(4, 1, CAUSE, 9.0)
EXITED = Failure(3, 7)
GONE = Failure(3, 0, VANISHED)
ABORTED = Failure(3, -signal.SIGABRT)
LOST = Failure(2, 1, CONSEQUENCE, 3.0)
STOPPED = Failure(1, -signal.SIGTERM, was_stopped=True)
STOPPED_HARD = Failure(1, -signal.SIGKILL, was_stopped=True)
STOPPED_AND_RAISED = Failure(0, 1, CAUSE, 1.0, was_stopped=True)


@pytest.mark.parametrize(
    "failures",
    [
        (KILLED, RAISED, EXITED, LOST, STOPPED),
        (RAISED, EXITED, LOST, STOPPED_HARD),
        (RAISED, ABORTED, LOST, STOPPED),
        (RAISED, EXITED, GONE, ABORTED, LOST),
        (GONE, LOST, STOPPED),
        (EXITED, LOST, STOPPED_AND_RAISED),
        (LOST, STOPPED_HARD),
        (RAISED, Failure(0, 1, CAUSE, 9.5)),
    ],
)
def test_the_first_of_these_in_any_order(failures: tuple[Failure, ...]) -> None:
    for shuffled in itertools.permutations(failures):
        assert first_failure(shuffled) == failures[0]


def test_what_needs_no_other_one_to_explain_it() -> None:
    assert has_cause([LOST, RAISED]) and has_cause([KILLED])
    assert not has_cause([EXITED, LOST, STOPPED_AND_RAISED]) and not has_cause([])


def raised(error: BaseException, before: BaseException | None = None) -> BaseException:
    """An exception as it is after it was raised, while another one was handled."""
    try:
        if before is None:
            raise error
        try:
            raise before
        except BaseException:
            raise error  # noqa: B904
    except BaseException as found:
        return found


GLOO = "[/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:543] Connection closed by peer [127.0.0.1]:1"


@pytest.mark.parametrize(
    ("error", "verdict"),
    [
        (ValueError("no such word"), CAUSE),
        (ConnectionResetError("of a server of the user"), CAUSE),
        (RuntimeError("Connection closed by peer"), CAUSE),
        (CollectiveError("rank 0 and rank 1 are at different collectives"), CAUSE),
        (PeerEndedError("rank 1 has ended"), CONSEQUENCE),
        (RankEndedError("rank 1 has ended"), CONSEQUENCE),
        (CollectiveTimeoutError("rank 1 did not come"), CONSEQUENCE),
        (RuntimeError(GLOO), CONSEQUENCE),
        (
            RuntimeError("[gloo/transport/tcp/unbound_buffer.cc:78] Timed out waiting 4000ms"),
            CONSEQUENCE,
        ),
        (torch.distributed.DistNetworkError("failed to recv, got 0 bytes"), CONSEQUENCE),  # type: ignore[attr-defined]
        (raised(ValueError("training failed"), RuntimeError(GLOO)), CONSEQUENCE),
        (ExceptionGroup("two", [ValueError("a"), RuntimeError(GLOO)]), CONSEQUENCE),
        (SystemExit(1), SILENT),
        (raised(SystemExit(1), RuntimeError(GLOO)), CONSEQUENCE),
        (raised(SystemExit(1), ValueError("a")), CAUSE),
    ],
    ids=str,
)
def test_what_an_exception_says(error: BaseException, verdict: str) -> None:
    assert verdict_of(error) == verdict


def test_a_chain_that_is_a_ring() -> None:
    first, second = ValueError("a"), ValueError("b")
    first.__cause__, second.__cause__ = second, first
    assert verdict_of(first) == CAUSE


def test_the_last_line() -> None:
    class Mute(Exception):
        def __str__(self) -> str:
            raise KeyError

    error = ValueError("a\nb")
    error.add_note("more")
    assert last_line(error) == "ValueError: a\nb" and last_line(KeyError()) == "KeyError"
    assert last_line(Mute()) == "Mute: (its __str__ raises KeyError)"


def test_who_ended_before() -> None:
    assert after([]) == ""
    assert after([1]) == ", after rank 1 ended with exit code 0 while others waited"
    assert after([1, 2]) == ", after ranks 1, 2 ended with exit code 0 while others waited"


def test_how_it_ended() -> None:
    assert how_it_ended(-9) == "was killed by SIGKILL"
    assert how_it_ended(3) == "ended with exit code 3"
    assert "os._exit" in how_it_ended(0)
