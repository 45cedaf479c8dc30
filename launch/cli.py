"""The command `ltc-launch`."""

from __future__ import annotations

import gc
import importlib
import os
import shlex
import signal
import sys
from collections.abc import Sequence
from multiprocessing import util

from . import early, user_signals
from .spec import Spec, parse

__all__ = ["main"]

_SECRETS = ("TOKEN", "KEY", "SECRET", "PASSWORD")


def main(argv: Sequence[str] | None = None) -> int:
    """Launch what the command line says; return the exit code."""
    _open_streams()
    spec = parse(sys.argv[1:] if argv is None else argv)
    if argv is None and not sys.flags.safe_path:
        _begin_again()
    user_signals.hold()
    # Mistakes in the command line are reported before PyTorch is imported, which takes seconds. Without the garbage
    # collector it is quicker, and frozen its objects are not looked through at the exit.
    gc.disable()
    with early.as_in_the_processes(spec):
        importlib.import_module("torch")
    fork = None if spec.dry_run or sys.platform != "linux" else early.fork()
    if callable(fork):  # this is a process of the job
        fork()
        return 0
    from . import agent

    gc.freeze()
    gc.enable()
    if spec.dry_run:
        print(shlex.join([sys.executable, *agent.command(spec, os.getpid())]))
        _show(spec, agent.variables(spec))
        return 0
    code = agent.run(spec, fork)
    # All has ended. Ctrl-C, pressed again while this process goes, does not change its exit code.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    return code


def _open_streams() -> None:
    """Have stdin, stdout and stderr go nowhere where they are closed, as a daemon's: no file gets their numbers."""
    for descriptor, name in enumerate(("stdin", "stdout", "stderr")):
        try:
            os.fstat(descriptor)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # the lowest number that is free
            os.set_inheritable(descriptor, True)
        if getattr(sys, name) is None:
            setattr(sys, name, open(descriptor, "r" if name == "stdin" else "w", closefd=False))


def _begin_again() -> None:
    """Start Python anew in this process, with the option -P.

    The processes are forks of this one, and the option has to reach theirs: the working directory may have a file of
    the name of a module that they import.
    """
    options = util._args_from_interpreter_flags()  # type: ignore[attr-defined]
    os.execv(sys.executable, [sys.executable, *options, "-P", "-m", __package__, *sys.argv[1:]])


def _show(spec: Spec, variables: dict[str, str]) -> None:
    size = spec.nprocs * spec.nnodes
    for local_rank in range(spec.nprocs):
        rank = spec.node_rank * spec.nprocs + local_rank
        contract = {
            "RANK": rank,
            "WORLD_SIZE": size,
            "LOCAL_RANK": local_rank,
            "LOCAL_WORLD_SIZE": spec.nprocs,
        }
        rows = {**contract, **variables}
        print(f"rank {rank}: " + " ".join(f"{k}={_shown(k, v)}" for k, v in rows.items()))


def _shown(name: str, value: object) -> str:
    is_secret = any(word in name.upper() for word in _SECRETS)
    return "(hidden)" if is_secret else shlex.quote(str(value))
