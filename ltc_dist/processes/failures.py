"""Which process of a job failed first, by cause and not by time, and how, as text.

When a process fails, others fail as a consequence: they lose it in a collective, or are stopped. `verdict_of` is asked
in the process that fails; `first_failure` by the parent of `spawn` and by the launcher.
"""

from __future__ import annotations

import re
import signal
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch.distributed

from ltc_core.errors import (
    CollectiveTimeoutError,
    PeerEndedError,
    RankEndedError,
    RankTimeoutError,
    listed,
)

__all__ = [
    "CAUSE",
    "CONSEQUENCE",
    "SILENT",
    "VANISHED",
    "Failure",
    "after",
    "first_failure",
    "has_cause",
    "how_it_ended",
    "last_line",
    "verdict_of",
]

CAUSE = "cause"  # an exception of its own
CONSEQUENCE = "consequence"  # an exception because another process was lost
SILENT = "silent"  # an exit code alone
VANISHED = "vanished"  # exit code 0 in the middle of the function or script

_OF_A_LOST_PEER: tuple[type[BaseException], ...] = (
    PeerEndedError,
    CollectiveTimeoutError,
    RankEndedError,
    RankTimeoutError,
    torch.distributed.DistNetworkError,
    torch.distributed.DistStoreError,
)
# gloo and NCCL raise a RuntimeError; only its text says that a peer is gone.
_TEXTS_OF_A_LOST_PEER = re.compile(
    r"gloo.*(connection (closed|reset|refused)|broken pipe|timed out|time ?out|peer closed)"
    r"|nccl.*(remote error|remote process|remoteerror|connection|aborted|timeout|socket)",
    re.IGNORECASE | re.DOTALL,
)
_LONGEST_TEXT = 4000

# What libraries end a process with when a peer is gone, and a shell's or a pipe's end.
_ENDED_BY_OTHERS = (signal.SIGABRT, signal.SIGPIPE, signal.SIGHUP, signal.SIGINT)


@dataclass(frozen=True)
class Failure:
    """A process that failed.

    Attributes:
        verdict: its own verdict, see `verdict_of`.
        time_s: time of the verdict, on the host's monotonic clock; orders failures of one weight.
        was_stopped: whether it still ran, without a verdict, when all were told to end.
    """

    rank: int
    exitcode: int
    verdict: str = SILENT
    time_s: float = 0.0
    was_stopped: bool = False


def first_failure(failures: Iterable[Failure]) -> Failure:
    """The failure that caused the others."""
    return min(failures, key=lambda f: (_weight(f), f.time_s, f.rank))


def has_cause(failures: Iterable[Failure]) -> bool:
    """Whether one of these is a cause, not a consequence."""
    return any(_weight(failure) <= 1 for failure in failures)


def _weight(failure: Failure) -> int:
    """Small for a cause; the larger, the more likely the failure is a consequence."""
    if failure.was_stopped:
        return 6
    if failure.verdict != SILENT:
        return {CAUSE: 1, VANISHED: 3, CONSEQUENCE: 5}[failure.verdict]
    if failure.exitcode >= 0:
        return 2
    return 4 if -failure.exitcode in _ENDED_BY_OTHERS else 0


def verdict_of(error: BaseException) -> str:
    """CAUSE or CONSEQUENCE for the exception that ends this process; SILENT for an exit code alone.

    An exception raised from another one, or while it was handled, counts as that one: a script that catches the loss of
    a peer and calls `sys.exit(1)` ends by that loss.
    """
    chain = list(_chain(error))
    if any(map(_is_of_a_lost_peer, chain)):
        return CONSEQUENCE
    return SILENT if all(isinstance(found, SystemExit) for found in chain) else CAUSE


def _chain(error: BaseException) -> Iterator[BaseException]:
    """The error, its causes and contexts, and the members of exception groups."""
    waiting, seen = [error], set()
    while waiting:
        found = waiting.pop()
        if id(found) in seen:
            continue
        seen.add(id(found))
        yield found
        if isinstance(found, BaseExceptionGroup):
            waiting += found.exceptions
        before = found.__cause__ or (None if found.__suppress_context__ else found.__context__)
        if before is not None:
            waiting.append(before)


def _is_of_a_lost_peer(error: BaseException) -> bool:
    if isinstance(error, _OF_A_LOST_PEER):
        return True
    if not isinstance(error, RuntimeError):
        return False
    return _TEXTS_OF_A_LOST_PEER.search(last_line(error)[:_LONGEST_TEXT]) is not None


def last_line(error: BaseException) -> str:
    """The error as a traceback ends with it, without its notes; also of one whose `__str__` raises."""
    try:
        text = str(error)
    except Exception as failure:
        text = f"(its __str__ raises {type(failure).__name__})"
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def after(ended: Sequence[int]) -> str:
    """Words on the ranks that ended with exit code 0 before a failure, which follows from that; empty without any."""
    if not ended:
        return ""
    ranks = f"rank {ended[0]}" if len(ended) == 1 else f"ranks {listed(ended)}"
    return f", after {ranks} ended with exit code 0 while others waited"


def how_it_ended(exitcode: int) -> str:
    """Meaning of the exit code of a process that failed or vanished; negative ones are signals."""
    if exitcode == 0:
        return (
            "ended with exit code 0 before its script did, by os._exit or in native code, "
            "while others waited for it"
        )
    if exitcode < 0:
        return f"was killed by {signal.Signals(-exitcode).name}"
    return f"ended with exit code {exitcode}"
