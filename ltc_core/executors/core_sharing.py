"""The thread that records and the programs in the worker share the cores: replay leaves one while a step is recorded.

Where programs have a thread on each core, recording has none of its own. One of the threads waits for it, and the
others for that one, in each parallel loop (a small T5 on two cores: 30 ms a step; 22 where recording and running take
turns, 11 where they share). So a replay that shares computes with one thread less, and with all of them while a
thread of the process waits for a program (`reference/csrc/team.h`); or it has one thread less all the time, if
`runtime.placement` finds that quicker. How many threads an op gets is a matter of time then, and some ops round by it:
nothing is shared where each run of the script is to round alike.

A team that is made anew is spread over the cores first (`reference/csrc/cores.h`). `runtime.worker` says who waits, and
who is about to go on: that a thread has been woken is known to who wakes it, not to the thread, which has no core yet.
`sharing` calls what runs in the worker.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

import torch

from ltc_core.executors import openmp
from ltc_core.executors.processor import num_cores
from ltc_core.settings import settings

__all__ = [
    "LARGE_OP_NS",
    "after_fork_in_child",
    "begin_wait",
    "bind",
    "end_wait",
    "leave_out",
    "may_share",
    "sharing",
    "takes_all_cores",
    "threads_of_script",
    "wake",
]

P = ParamSpec("P")
R = TypeVar("R")

# For a core, by who has waited: an instruction may take longer, or block.
_MOST_WAIT_MS = 2
# Of a program's ops, on average: where they take so long, a thread less is likely to cost more than recording does.
LARGE_OP_NS = 100_000

_left_out = threading.local()  # .count: threads
_native: Any = None  # the C++ part that runs programs, once it is loaded


def bind(native: Any) -> None:
    """Hand to the C++ part what sets OpenMP's and MKL's threads, the time limit of `end_wait`, and `LARGE_OP_NS`."""
    global _native
    native.set_team(*openmp.addresses(), _MOST_WAIT_MS, LARGE_OP_NS)
    openmp.release_by(native.release)
    _native = native


def begin_wait(waiting: list[None]) -> None:
    """The calling thread waits for a program, and needs no core until it is woken, or leaves. Cost: 0.1 us.

    Args:
        waiting: gets an element for it.
    """
    if _native is not None:
        _native.begin_wait(waiting)


def wake(waiting: list[None]) -> None:
    """Those that wait are about to go on: a run that computes with all threads is to leave a core. Cost: 0.1 us."""
    if waiting:
        _native.wake(waiting)


def end_wait(waiting: list[None]) -> None:
    """The calling thread goes on, woken or not, once no run computes on its core.

    Cost: 0.1 us; 2 ms at most where one does.
    """
    if _native is not None:
        _native.end_wait(waiting)


def after_fork_in_child() -> None:
    """The threads that waited and the runs that computed are the parent's."""
    if _native is not None:
        _native.after_fork()


def may_share(num_threads: int) -> bool:
    """Whether a program with so many threads should leave a core to recording, and may round by time. Cost: 2 us."""
    if settings.compile != "async" or torch.are_deterministic_algorithms_enabled():
        return False
    return takes_all_cores(num_threads)


def takes_all_cores(num_threads: int) -> bool:
    """Whether a program with so many threads leaves no core to recording, unless it shares."""
    return num_threads >= num_cores() > 1


def leave_out(count: int) -> None:
    """The calling thread computes with so many threads less than the script has set. Cost: 0.1 us."""
    _left_out.count = count


def threads_of_script() -> int:
    """Threads that the script has set, of which the calling thread may leave some out. Cost: 0.2 us."""
    return torch.get_num_threads() + getattr(_left_out, "count", 0)


def sharing(num_threads: int, function: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
    """Call a function whose replays leave out one of so many threads while nobody waits; 0: they leave out none."""
    if not num_threads or _native is None:
        return function(*args, **kwargs)
    _native.share(num_threads)
    try:
        return function(*args, **kwargs)
    finally:
        _native.share(0)
