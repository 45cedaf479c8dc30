"""Detection of hangs: each process writes its number of steps and the time of the last one; the launcher reads both.

A process that is stopped, or whose GIL is blocked, writes nothing; a process that waits for ever keeps writing the same
time. Both are found by the time of the last step. `shim` starts the writer in each process; `agent` reads. With --watch
the processes publish their states in the same directory, as `ltc_core.live` does.
"""

from __future__ import annotations

import os
import struct
import threading
import time
from dataclasses import dataclass

import psutil

from ltc_core import metrics
from ltc_dist.processes import child

__all__ = ["Watch", "start", "steps"]

_FORM = struct.Struct("<qd")  # steps; time of the last one on the monotonic clock of the host
_BEAT_S = 0.2
_STACKS_S = 1.0  # for processes to print their stacks


def start(directory: str, local_rank: int) -> None:
    """Write the steps of this process, in a daemon thread, until the process ends."""
    path = os.path.join(directory, str(local_rank))
    threading.Thread(target=_beat, args=(path,), name="ltc-heartbeat", daemon=True).start()


def _beat(path: str) -> None:
    steps, last = -1, 0.0
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
    while True:
        found = metrics.counter_value("ExecuteComputation") or 0
        if found != steps:
            steps, last = found, time.monotonic()
        os.pwrite(file, _FORM.pack(steps, last), 0)
        time.sleep(_BEAT_S)


@dataclass(frozen=True)
class _Beat:
    """The last step of one process."""

    rank: int
    pid: int
    steps: int
    idle_s: float


class Watch:
    """Finds processes of this host that hang. Each attempt has its own.

    Args:
        timeout_s: seconds without a step after which a process counts as hanging.
    """

    def __init__(self, directory: str, timeout_s: float) -> None:
        self._directory = directory
        self._timeout_s = timeout_s
        for name in os.listdir(directory):
            os.unlink(os.path.join(directory, name))
        self._started = time.monotonic()

    def hang(self, pids: dict[int, tuple[int, int]]) -> str:
        """Sentence about the processes that hang, "" if none does. All processes then print their stacks to stderr.

        Args:
            pids: local rank -> rank and process id.
        """
        beats = [self._beat(k, *who) for k, who in pids.items() if _runs(who[1])]
        if not any(beat.idle_s > self._timeout_s for beat in beats):
            return ""
        fewest = min(beat.steps for beat in beats)
        guilty = [beat for beat in beats if beat.steps == fewest]
        for beat in beats:
            if not _is_stopped(beat.pid):
                os.kill(beat.pid, child.STACKS)
        time.sleep(_STACKS_S)
        names = ", ".join(f"{b.rank} (pid {b.pid}{_stopped_words(b.pid)})" for b in guilty)
        counts = ", ".join(f"rank {b.rank}: {b.steps}" for b in beats)
        return (
            f"rank{'s' * (len(guilty) > 1)} {names} made no step for {guilty[0].idle_s:.0f} s; "
            f"steps made: {counts}"
        )

    def _beat(self, local_rank: int, rank: int, pid: int) -> _Beat:
        found = _read(os.path.join(self._directory, str(local_rank)))
        made, last = found if found is not None else (0, self._started)
        return _Beat(rank, pid, made, time.monotonic() - last)


def steps(directory: str) -> int:
    """Number of steps that every process has made."""
    found = [_read(entry.path) for entry in os.scandir(directory) if entry.name.isdecimal()]
    return min((beat[0] if beat is not None else 0 for beat in found), default=0)


def _read(path: str) -> tuple[int, float] | None:
    """Steps of a process and the time of the last one; None if the process has not begun to write."""
    try:
        with open(path, "rb") as file:
            data = file.read(_FORM.size)
    except FileNotFoundError:
        return None
    return _FORM.unpack(data) if len(data) == _FORM.size else None


def _runs(pid: int) -> bool:
    try:
        return bool(psutil.Process(pid).status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


def _is_stopped(pid: int) -> bool:
    try:
        return bool(psutil.Process(pid).status() == psutil.STATUS_STOPPED)
    except psutil.NoSuchProcess:
        return True


def _stopped_words(pid: int) -> str:
    return ", stopped by a signal" if _is_stopped(pid) else ""
