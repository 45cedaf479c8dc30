"""The zygote that a process keeps: the first `spawn` starts it, the later ones have their processes forked by it.

A kept zygote is used again while a new one would be the same (`_key`); otherwise, or if it was killed, a new one takes
its place. What may change between two calls is sent with each of them: variables and standard streams by
`forked_process`, the working directory and the arguments of the script by multiprocessing.

It ends with this process. A fork of this process starts its own. Used by `spawn`.
"""

from __future__ import annotations

import atexit
import multiprocessing.spawn
import os
from collections.abc import Mapping
from multiprocessing import util
from pathlib import Path
from typing import Any

from ltc_dist.processes.sending import import_path
from ltc_dist.processes.zygote import Zygote

__all__ = ["close", "get", "pid"]

# Variables that each call has anew and no import reads. pytest sets the last one in this process.
_OF_A_CALL = {
    "RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "PYTEST_CURRENT_TEST",
}  # fmt: skip
# What a process has from its parent: rows of the kernel's status of a thread, and whole files beside it.
_STATUS = (
    "Umask", "Uid", "Gid", "Groups", "NSsid", "SigIgn", "CapEff", "NoNewPrivs", "Seccomp",
    "Cpus_allowed", "Mems_allowed",
)  # fmt: skip
_FILES = ("limits", "cgroup", "oom_score_adj")

_kept: tuple[Any, Zygote] | None = None


def get(environ: Mapping[str, str], module: str) -> Zygote:
    """Return the kept zygote, which has imported `module`; start one if there is none to use. One thread at a time.

    Args:
        environ: variables of the processes that it will fork.
    """
    global _kept
    shared = {name: value for name, value in environ.items() if name not in _OF_A_CALL}
    key = _key(shared, module)
    if _kept is None or _kept[0] != key or _kept[1].has_ended():
        close()
        _kept = key, Zygote.start(shared, module)
    return _kept[1]


def pid() -> int | None:
    """Process id of the kept zygote."""
    return None if _kept is None else _kept[1].pid


def close() -> None:
    """End the kept zygote; the next `spawn` starts another. Processes that it has forked run on."""
    global _kept
    if _kept is not None:
        _kept[1].close()
    _kept = None


atexit.register(close)
os.register_at_fork(after_in_child=close)  # it is not ended: it is no child of the fork


def _key(environ: Mapping[str, str], module: str) -> tuple[Any, ...]:
    """All that a zygote takes over from this process at its start and has for its life."""
    return (
        module,
        multiprocessing.spawn.get_executable(),
        util._args_from_interpreter_flags(),  # type: ignore[attr-defined]
        import_path(),
        environ,
        os.getpriority(os.PRIO_PROCESS, 0),
        _of_the_kernel(),
    )


def _of_the_kernel() -> Any:
    """Those of the kernel's attributes of a thread that its children have, too."""
    thread = Path("/proc/thread-self")
    try:
        rows = [line.partition(":") for line in (thread / "status").read_text().splitlines()]
        files = [(thread / name).read_text() for name in _FILES]
    except OSError:
        return object()  # equal to no other: what cannot be compared may have changed
    return {name: value for name, _, value in rows if name in _STATUS}, files
