"""What a process of a job has started itself ends with it: all are in the process group that it leads.

Used by `spawn` and by the launcher after a failure, when the leaders have ended.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Iterable

import psutil

__all__ = ["end_groups"]

_LOOK_S = 0.02


def end_groups(leaders: Iterable[int], within_s: float) -> None:
    """End the processes that are left of some process groups: by SIGTERM, after `within_s` seconds by SIGKILL.

    Args:
        leaders: ids of their first processes, which have ended.
    """
    groups = {leader for leader in leaders if leader != os.getpgrp()}
    deadline = time.monotonic() + within_s
    _send(_left(groups), signal.SIGTERM)
    while left := _left(groups):
        if time.monotonic() >= deadline:
            _send(left, signal.SIGKILL)
            return
        time.sleep(_LOOK_S)


def _left(groups: set[int]) -> set[int]:
    """Those of the groups that have a process. A zombie is none: in a container nobody may wait for it."""
    found, reused = set[int](), set[int]()
    for pid in psutil.pids():
        with contextlib.suppress(ProcessLookupError, PermissionError, psutil.Error):
            group = os.getpgid(pid)
            if group in groups and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
                found.add(group)
                if pid == group:  # another process has the id of a leader that has ended
                    reused.add(group)
    return found - reused


def _send(groups: Iterable[int], number: int) -> None:
    for group in groups:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(group, number)
