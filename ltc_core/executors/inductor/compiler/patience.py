"""How long a compiler's process is waited for, which may get hardly any of the cores.

At idle priority it has what the steps leave: a compile of 40 s can take an hour. So its processor time counts, and that
of the processes it started. One that uses none hangs. Used by `compiler_process`.
"""

from __future__ import annotations

import time

import psutil

__all__ = ["Patience", "processor_s"]

# The least part of a core that a process at idle priority gets of a busy core is 3 of 1,027.
_HANGS = 0.001


class Patience:
    """A limit for one wait.

    Args:
        pid: the process.
        limit_s: of processor time, for it and the processes it started.
    """

    def __init__(self, pid: int, limit_s: float) -> None:
        self._pid = pid
        self._limit_s = limit_s
        self._begun_s = self._used_s = processor_s(pid)
        self._look_at_s = time.monotonic() + limit_s

    @property
    def left_s(self) -> float:
        """Seconds until the limit can be reached."""
        return max(0.0, self._look_at_s - time.monotonic())

    def is_over(self) -> bool:
        """Whether the limit is reached, or nothing was computed for so long. Cost: 0.1 us, some ms once a limit."""
        now = time.monotonic()
        if now < self._look_at_s:
            return False
        before, self._used_s = self._used_s, processor_s(self._pid)
        is_spent = self._used_s - self._begun_s >= self._limit_s
        if is_spent or self._used_s - before < _HANGS * self._limit_s:
            return True
        self._look_at_s = now + self._limit_s
        return False


def processor_s(pid: int) -> float:
    """Processor time of a process and of all that it has started; of those that have ended if they were waited for."""
    total = 0.0
    try:
        process = psutil.Process(pid)
        family = [process, *process.children(recursive=True)]
    except psutil.Error:  # it has ended, which its connection tells
        return total
    for each in family:
        try:
            times = each.cpu_times()
        except psutil.Error:  # it has just ended
            continue
        total += times.user + times.system + times.children_user + times.children_system
    return total
