"""What a process of a job does first: it ties itself to its parent, and can show where it hangs.

`STACKS` is the signal for the latter. SIGUSR1 does it, too, until the script has a handler of its own for that.

`begin` is called before any code of the user. `variables` are the environment variables of a process. Used by `spawn`
and by the launcher.
"""

from __future__ import annotations

import ctypes
import faulthandler
import io
import os
import select
import signal
import sys
import threading
import time
from collections.abc import Mapping

from ltc_core.executors.processor import num_cores
from ltc_dist.job.ranks import Ranks
from ltc_dist.job.store import LOOPBACK
from ltc_dist.processes.whole_lines import write_whole_lines

__all__ = [
    "STACKS",
    "begin",
    "die_with_thread",
    "end_with",
    "left_mark",
    "variables",
    "write_lines",
]

# Not one of those that scripts and schedulers use.
STACKS = signal.SIGRTMIN + 3 if hasattr(signal, "SIGRTMIN") else signal.SIGUSR1

_PR_SET_PDEATHSIG = 1
_POLL_S = 0.5


def _num_threads(local_world_size: int) -> int:
    """Return the threads of one process: the cores this one may use, divided among the processes of the host."""
    return max(1, num_cores() // local_world_size)


def variables(
    of: Ranks, master_addr: str, master_port: int, environ: Mapping[str, str]
) -> dict[str, str]:
    """Return the variables of a process: PyTorch's contract, and what belongs to one host.

    A number of threads that the user has set stays.
    """
    found = {
        "RANK": str(of.rank),
        "WORLD_SIZE": str(of.world_size),
        "LOCAL_RANK": str(of.local_rank),
        "LOCAL_WORLD_SIZE": str(of.local_world_size),
        "MASTER_ADDR": master_addr,
        "MASTER_PORT": str(master_port),
    }
    if "OMP_NUM_THREADS" not in environ:
        found["OMP_NUM_THREADS"] = str(_num_threads(of.local_world_size))
    if master_addr == LOOPBACK:
        found["GLOO_SOCKET_IFNAME"] = "lo"
    return found


def left_mark(error_file: str) -> str:
    """Path of the file that a launched process makes when its script has ended, beside its error file."""
    return f"{error_file}.left"


def write_lines() -> None:
    """Write each line of stdout when it ends, into pipes and files, too: people watch a job while it runs."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(line_buffering=True)


def begin(parent_pid: int, dies_with_thread: bool = True) -> None:
    """Tie this process to its parent; lines go out as they end; `STACKS` prints the stacks of all threads to stderr.

    Args:
        parent_pid: of the process that started this one. If it is gone already, this one ends.
        dies_with_thread: whether the thread that started this process lives as long as its process. The kernel's
            death signal follows the thread; without it the parent is checked twice a second.
    """
    if dies_with_thread and sys.platform == "linux":
        die_with_thread()
    else:
        threading.Thread(
            target=_end_with_parent, args=(parent_pid,), name="ltc-parent-watch", daemon=True
        ).start()
    if os.getppid() != parent_pid:
        os._exit(1)
    write_whole_lines()
    faulthandler.enable()
    for number in {STACKS, signal.SIGUSR1}:
        faulthandler.register(number, all_threads=True)


def die_with_thread() -> None:
    """Make the kernel kill this process when the thread that started it ends. On Linux."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def _end_with_parent(parent_pid: int) -> None:
    while os.getppid() == parent_pid:
        time.sleep(_POLL_S)
    os.kill(os.getpid(), signal.SIGKILL)


def end_with(pid: int) -> None:
    """End this process with another one that is not its parent.

    A fork server does not end with the process that it works for as long as its own children hold a pipe of that one.
    """
    try:
        descriptor = os.pidfd_open(pid) if hasattr(os, "pidfd_open") else None
    except ProcessLookupError:
        os._exit(1)
    threading.Thread(
        target=_end_with, args=(pid, descriptor), name="ltc-parent-watch", daemon=True
    ).start()


def _end_with(pid: int, descriptor: int | None) -> None:
    if descriptor is not None:
        select.select([descriptor], [], [])
    else:
        while _is_there(pid):
            time.sleep(_POLL_S)
    os.kill(os.getpid(), signal.SIGKILL)


def _is_there(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True
