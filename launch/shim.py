"""The first lines of a launched process: `python -m ltc_launch.shim PID BEATS train.py args`.

It runs the script (see `script`), and ends when its launcher, the process PID, ends. The signal `child.STACKS` makes it
print its stacks. An uncaught exception goes to the launcher, which prints it once. Started by `agent`; uses `heartbeat`
and `ltc_dist.processes`.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
import time
import traceback
from pathlib import Path
from types import TracebackType
from typing import Any

from ltc_core.api.verbs import wait_device_ops
from ltc_core.errors import (
    CheckpointError,
    CheckpointIOError,
    CollectiveTimeoutError,
    RankTimeoutError,
)
from ltc_core.live import publisher
from ltc_core.runtime.devices import abandon_work
from ltc_core.settings import settings
from ltc_dist import libraries
from ltc_dist.job import host_collectives
from ltc_dist.job.ranks import own_rank, ranks
from ltc_dist.job.store import note_served
from ltc_dist.processes import child, unconnected
from ltc_dist.processes.failures import last_line, verdict_of

from . import heartbeat, script, user_signals

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
    own_rank()
    note_served(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]))
    if beats:
        heartbeat.start(beats, ranks().local_rank)
    is_module = argv[0] == "-m"
    sys.argv = argv[1:] if is_module else argv
    if not settings.compat:
        libraries.use_device()
    unconnected.watch()
    try:
        user_signals.accept()
        if settings.peek("watch"):
            publisher.start_as_set()  # from the beginning: the device may be used much later
        try:
            script.run(sys.argv[0], is_module)
        except SystemExit as leaving:
            if leaving.code not in (None, 0):
                raise
        wait_device_ops()  # what fails in the background fails here, not unseen at the exit
        host_collectives.leave()
        _mark_left()
    except KeyboardInterrupt:
        host_collectives.abandon()
        sys.exit(128 + signal.SIGINT)
    except SystemExit as leaving:
        _report(leaving)
        _mark_left()
        raise
    except BaseException as error:
        _report(error)
        abandon_work()  # jobs that fail as a consequence are not reported
        host_collectives.exit_code = _exit_code(error)
        host_collectives.leave()
        sys.exit(host_collectives.exit_code)


def _exit_code(error: BaseException) -> int:
    return next((code for kind, code in _EXIT_CODES if isinstance(error, kind)), 1)


def _mark_left() -> None:
    """Make the file by which the launcher knows that the script has ended: `os._exit(0)` gives exit code 0, too."""
    error_file = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if error_file:
        with contextlib.suppress(OSError):
            Path(child.left_mark(error_file)).touch()


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
    """The traceback without the frames of this file and of `script`."""
    rest = trace
    while rest is not None and rest.tb_frame.f_code.co_filename in (
        __file__,
        script.__file__,
    ):
        rest = rest.tb_next
    return rest or trace


if __name__ == "__main__":
    main(sys.argv[1:])
