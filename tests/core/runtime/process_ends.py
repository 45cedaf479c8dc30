"""Waiting for what other processes do: that they begin, and that they end."""

import time
from collections.abc import Callable
from pathlib import Path

import psutil

__all__ = ["WAIT_S", "all_gone", "is_gone", "pids_in", "until"]

WAIT_S = 40.0


def until(condition: Callable[[], object], what: str) -> None:
    deadline = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < deadline, f"never came: {what}"
        time.sleep(0.02)


def pids_in(path: Path) -> list[int]:
    """The process ids a builder wrote once it had begun."""
    until(path.exists, f"{path.name}, from the builder")
    return [int(word) for word in path.read_text().split()]


def is_gone(pid: int) -> bool:
    """Whether a process has ended; one that nobody collects (in a container) counts as ended."""
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def all_gone(pids: list[int]) -> None:
    until(lambda: all(map(is_gone, pids)), f"the end of {pids}")
