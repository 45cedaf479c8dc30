"""The first lines of a launched process: `python -m ltc_launch.shim PID BEATS train.py args`.

It runs the script as `__main__`, and ends when its launcher, the process PID, ends. SIGUSR1 makes it print its stacks.
If the script defines `_mp_fn(index)` and does not call it under a main guard, it is called with the rank. An uncaught
exception goes to the launcher, which prints it once. Started by `agent`; uses `heartbeat` and `ltc_dist.processes`.
"""

from __future__ import annotations

import ast
import json
import os
import runpy
import signal
import sys
import time
import traceback
from pathlib import Path
from types import TracebackType
from typing import Any

from ltc_core.errors import (
    CheckpointError,
    CheckpointIOError,
    CollectiveTimeoutError,
    RankTimeoutError,
)
from ltc_core.runtime.devices import abandon_work
from ltc_dist.job import host_collectives
from ltc_dist.job.ranks import ranks
from ltc_dist.processes import child
from ltc_dist.processes.failures import last_line, verdict_of
from ltc_dist.processes.main_guard import is_guard

from . import heartbeat

__all__ = ["main"]

# Exit codes that a scheduler may act upon; other exceptions give 1. The first match counts.
_EXIT_CODES: tuple[tuple[type[BaseException], int], ...] = (
    (CheckpointIOError, os.EX_IOERR),
    (CheckpointError, os.EX_DATAERR),
    (RankTimeoutError, os.EX_TEMPFAIL),
    (CollectiveTimeoutError, 124),
)


def main(argv: list[str]) -> None:
    parent_pid, beats, *argv = argv
    child.begin(int(parent_pid))
    if beats:
        heartbeat.start(beats, ranks().local_rank)
    is_module = argv[0] == "-m"
    sys.argv = argv[1:] if is_module else argv
    try:
        _run(sys.argv[0], is_module)
        host_collectives.leave()
    except KeyboardInterrupt:
        host_collectives.abandon()
        sys.exit(128 + signal.SIGINT)
    except SystemExit as leaving:
        if leaving.code not in (None, 0):
            _report(leaving)
        raise
    except BaseException as error:
        _report(error)
        abandon_work()  # jobs that fail as a consequence are not reported
        host_collectives.leave()
        sys.exit(_exit_code(error))


def _exit_code(error: BaseException) -> int:
    return next((code for kind, code in _EXIT_CODES if isinstance(error, kind)), 1)


def _run(target: str, is_module: bool) -> None:
    if is_module:
        names = runpy.run_module(target, run_name="__main__", alter_sys=True)
        source = names.get("__file__") or ""
    else:
        sys.path.insert(0, os.path.dirname(os.path.abspath(target)))
        names = runpy.run_path(target, run_name="__main__")
        source = target
    function = names.get("_mp_fn")
    if callable(function) and not _has_guard(source):
        function(ranks().rank)


def _has_guard(source: str) -> bool:
    """Whether the script has an `if __name__ == "__main__"` block."""
    return any(map(is_guard, ast.parse(Path(source).read_bytes()).body))


def _report(error: BaseException) -> None:
    """Write how this process ends into the error file of PyTorch's elastic agent; without one, print the traceback."""
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    info: dict[str, Any] = {"verdict": verdict_of(error), "time_s": time.monotonic()}
    info["timestamp"] = str(int(time.time()))
    text = ""
    if not isinstance(error, SystemExit):
        trace = _of_script(error.__traceback__)
        text = "".join(traceback.format_exception(type(error), error, trace))
        # The agent may kill this process before it exits, so the exit code is written, too.
        info |= {"py_callstack": text, "exit_code": _exit_code(error)}
    message = {"message": {"message": last_line(error), "extraInfo": info}}
    try:
        if path is None:
            raise FileNotFoundError("no launcher reads it")
        # By rename: the agent may kill this process while it writes, and fails itself on half a file.
        Path(f"{path}.part").write_text(json.dumps(message), "ascii")
        os.replace(f"{path}.part", path)
    except OSError:
        print(text, file=sys.stderr, end="")


def _of_script(trace: TracebackType | None) -> TracebackType | None:
    """The traceback without the frames of this file and of runpy."""
    rest = trace
    while rest is not None and rest.tb_frame.f_code.co_filename in (
        __file__,
        runpy.__file__,
        "<frozen runpy>",
    ):
        rest = rest.tb_next
    return rest or trace


if __name__ == "__main__":
    main(sys.argv[1:])
