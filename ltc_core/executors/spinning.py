"""How long OpenMP threads spin where they wait for each other: as long as libgomp likes, or briefly on busy cores.

At each end of a parallel region libgomp's threads spin for a good part of a millisecond. That is quickest where each of
them has a core. Where other processes use the cores, as those that load the next batches do, a thread spins through its
time slice, while the one it waits for has no core: on two cores a Transformer takes 48 ms a step beside one busy
process and 500 beside three, and 20 to 25 with threads that spin briefly.

So `follow` compares, a few times a second, what all processes use of the cores with what this one does. `spin_briefly`
has libgomp count more threads than cores, for all OpenMP threads of the process: those of eager operations, too.
Called by `runtime.device_context`.
"""

from __future__ import annotations

import os
import queue
import threading
import time
from collections.abc import Callable, Mapping

import torch

from ltc_core import metrics
from ltc_core.executors import openmp
from ltc_core.executors.processor import num_cores

__all__ = [
    "OthersWork", "after_fork_in_child", "can_spin_briefly", "follow", "is_brief", "sentences",
    "spin_briefly",
]  # fmt: skip

_EVERY_NS = 100_000_000
_SOON_NS = 50_000_000
_LONG_NS = 250_000_000
_MOST_COST = 0.003  # of the time, to look
_BUSY = 0.25  # of a core, beyond those that this process leaves free
_AT_WORK = 0.1  # of a core, at least, that this process must have used, however many others want it
_THROUGHOUT = 0.8  # the same, of a process that is never idle
_LEAST_NS = 25_000_000  # of a core: the kernel counts in ticks
_QUIET_TIMES = 3  # in a row that nobody else needs the cores until threads spin as usual
_LOOKS, _BUSY_LOOKS = "LooksAtCores", "LooksAtBusyCores"  # counters
_MANY, _OFTEN = 20, 0.1  # looks at busy cores, and their share: then the user is told
_NS_PER_TICK = 1_000_000_000 // os.sysconf("SC_CLK_TCK")
# Columns of a row of /proc/stat that count: user, nice, system, irq, softirq, steal.
_USED, _NICE = (1, 3, 6, 7, 8), 2


class _Crowd:
    """A thread with one OpenMP thread more than there are cores, all idle: it makes libgomp spin briefly."""

    def __init__(self) -> None:
        self._wanted: queue.SimpleQueue[bool] = queue.SimpleQueue()
        self._done: queue.SimpleQueue[None] = queue.SimpleQueue()
        threading.Thread(target=self._serve, name="ltc-openmp", daemon=True).start()

    def set(self, is_there: bool) -> None:
        self._wanted.put(is_there)
        self._done.get()

    def _serve(self) -> None:
        while True:
            if self._wanted.get():
                openmp.use_threads(num_cores() + 1)
                torch.zeros(1 << 16).add_(1)  # opens a parallel region
            else:
                openmp.release_team()
            self._done.put(None)


_crowd: _Crowd | None = None
_is_crowded = False


def can_spin_briefly() -> bool:
    """Whether `spin_briefly` has an effect: PyTorch uses libgomp, and the user has not said how its threads wait."""
    is_free = not any(name in os.environ for name in ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT"))
    return openmp.has_teams() and is_free and hasattr(os, "sched_getaffinity")


def spin_briefly(is_wanted: bool) -> None:
    """Have all OpenMP threads of this process spin for microseconds, or for a good part of a millisecond (the default).

    Cost:
        0.1 us; 0.1 ms if it changes.
    """
    global _crowd, _is_crowded
    if is_wanted == _is_crowded:
        return
    _is_crowded = is_wanted
    try:
        _crowd = _crowd or _Crowd()
        _crowd.set(is_wanted)
    except RuntimeError:  # the system gives no more threads: they spin as before
        return


def is_brief() -> bool:
    """Whether they spin for microseconds now. Cost: 0.1 us."""
    return _is_crowded


class OthersWork:
    """Compares processor times, of all processes and of this one, to see whether others use its cores.

    What is nice to others does not count: it hardly takes a core from this process, unless that is nice itself.

    Args:
        read_cores: returns the nanoseconds for which all processes have used the cores that this one may use, of which
            those of nice ones.
        read_own: returns those of this process.
    """

    def __init__(
        self,
        read_cores: Callable[[], tuple[int, int]] | None = None,
        read_own: Callable[[], int] = time.process_time_ns,
    ) -> None:
        self._read_cores = read_cores or _used_ns
        self._read_own = read_own
        self._last: tuple[int, int, int, int] | None = None
        self._was_long: bool | None = None  # the first time is that of the imports

    def need_cores(
        self, now_ns: int, num_there: int, num_threads: int, is_nice: bool
    ) -> bool | None:
        """Whether they have needed more cores since the last look than `num_threads` threads leave free of `num_there`.

        None: this process was idle, or may have been for a part of a long time, so there is no telling. Steps are long
        if a second look in a row comes late.

        Cost: 20 us on two cores, and more on many.
        """
        used_ns, nice_ns = self._read_cores()
        look = now_ns, used_ns, nice_ns, self._read_own()
        last, self._last = self._last, look
        if last is None or now_ns <= last[0]:
            return None
        took_ns, used_ns, nice_ns, own_ns = (new - old for new, old in zip(look, last, strict=True))
        is_long = took_ns > _LONG_NS
        was_long, self._was_long = self._was_long, is_long
        least = _THROUGHOUT if was_long is None else _AT_WORK
        if own_ns < least * took_ns or (is_long and was_long is False):
            return None
        others_ns = used_ns - own_ns - (0 if is_nice else nice_ns)
        free = max(num_there - num_threads, 0)
        return others_ns > free * took_ns + max(_BUSY * took_ns, _LEAST_NS)


def _used_ns() -> tuple[int, int]:
    cores = os.sched_getaffinity(0)
    used = nice = 0
    with open("/proc/stat", "rb") as file:
        for row in file:
            if not row.startswith(b"cpu"):
                break
            name, *_ = columns = row.split()
            if name != b"cpu" and int(name[3:]) in cores:
                used += sum(int(columns[k]) for k in _USED)
                nice += int(columns[_NICE])
    return (used + nice) * _NS_PER_TICK, nice * _NS_PER_TICK


class _Follower:
    """Looks at the cores now and then, and has threads spin briefly as long as others need them."""

    def __init__(self) -> None:
        self.due_ns = 0
        self._work = OthersWork()
        self._num_quiet = 0  # looks in a row

    def look(self, now_ns: int) -> None:
        num_threads = torch.get_num_threads()
        if num_threads == 1 or not can_spin_briefly():
            self.due_ns = now_ns + 10 * _EVERY_NS
            return
        is_nice = os.getpriority(os.PRIO_PROCESS, 0) > 0
        started_ns = time.perf_counter_ns()
        try:
            is_busy = self._work.need_cores(now_ns, num_cores(), num_threads, is_nice)
        except (OSError, ValueError, IndexError):  # /proc is another system's, or hidden
            self.due_ns = 1 << 63
            return
        cost_ns = time.perf_counter_ns() - started_ns
        self.due_ns = now_ns + int(cost_ns / _MOST_COST)
        self.due_ns += _SOON_NS if is_busy is None else _EVERY_NS
        if is_busy is None:
            return
        metrics.count(_LOOKS)
        metrics.count(_BUSY_LOOKS, int(is_busy))
        self._num_quiet = 0 if is_busy else self._num_quiet + 1
        if is_busy or self._num_quiet >= _QUIET_TIMES:
            spin_briefly(is_busy)


_follower = _Follower()


def follow(now_ns: int) -> None:
    """Have threads spin as long as suits what others do now. Cost: 0.1 us; a few times a second 50.

    Args:
        now_ns: of `time.perf_counter_ns`.
    """
    if now_ns >= _follower.due_ns:
        _follower.look(now_ns)


def sentences(counters: Mapping[str, int]) -> list[str]:
    """What to say of cores that others used, if they did for more than a moment."""
    looks, busy = counters.get(_LOOKS, 0), counters.get(_BUSY_LOOKS, 0)
    if busy < max(_MANY, _OFTEN * looks):
        return []
    return [
        f"For {100 * busy / looks:.0f} % of the time other processes used cores that this one computes on. Next: leave "
        f"them some by torch.set_num_threads ({torch.get_num_threads()} now), or start fewer, as loader workers."
    ]


def after_fork_in_child() -> None:
    """The thread is the parent's, and so is the time that was used; a forked child computes with one thread."""
    global _crowd, _is_crowded, _follower
    _crowd, _is_crowded = None, False
    _follower = _Follower()
