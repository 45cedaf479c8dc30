"""The compiler's process: takes requests from its parent, builds each, commits it, and says how it went.

`compiler_process` runs this file as a script, with the number of a connection, the parent's process id and a priority.
Only the standard library is imported before the priority is lowered and the parent is watched: importing PyTorch takes
two seconds of a core that the training run may need. The first message says where to build and with which function;
every other one is a key and a payload. The builder's module is imported in this process and in no other.
"""

from __future__ import annotations

import contextlib
import errno
import importlib
import os
import re
import resource
import select
import signal
import sys
import tempfile
import threading
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ltc_core.executors.inductor.artifacts import Artifacts

_WATCH_MS = 500
# Beside a step that keeps all cores busy, nice 5 gets a quarter of one, SCHED_IDLE less than a hundredth: for a compile
# of 15 s that is a minute or half an hour.
_NICE = {"low": 5, "normal": 0}
_MOST_NICE = 19
_MAX_QUOTED = 300
# Another place may have room, or may be written.
_DISK_ERRORS = {errno.ENOSPC, errno.EDQUOT, errno.EROFS}
_COMPILER_ERROR = re.compile(r"\berror: |/ld: |: undefined reference")

Build = Callable[[bytes, Path], dict[str, Any]]


def main(connection_number: str, parent: str, priority: str) -> None:
    descriptor = int(connection_number)
    os.set_inheritable(descriptor, False)
    _stand_back(priority)
    threading.Thread(target=_watch, args=(descriptor, int(parent)), daemon=True).start()
    connection: Connection[Any, Any] = Connection(descriptor)
    config: dict[str, Any] = connection.recv()
    sys.path[:] = config["path"]
    try:
        build = _find_builder(config["builder"])
        from ltc_core.executors.inductor.artifacts import Artifacts
    except BaseException as error:  # whatever it is, there is no compiler, and that is the answer
        traceback.print_exc()
        connection.send(("unusable", _reason(error)))
        return
    artifacts = Artifacts(Path(config["root"]))
    connection.send(("ready",))
    with contextlib.suppress(EOFError):
        while True:
            key, payload = connection.recv()
            connection.send(_answer(artifacts, build, key, payload, config["limit_bytes"]))


def _stand_back(priority: str) -> None:
    """Leave the cores to the training run, and be the one that goes when memory runs out."""
    try:
        if priority == "idle":
            os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
        else:
            os.nice(_NICE[priority])
    except OSError:  # a sandbox may forbid it
        os.nice(_MOST_NICE)
    with contextlib.suppress(OSError):  # the file is Linux's
        Path("/proc/self/oom_score_adj").write_text("1000")
    _, most = resource.getrlimit(resource.RLIMIT_CORE)
    resource.setrlimit(resource.RLIMIT_CORE, (0, most))


def _watch(descriptor: int, parent: int) -> None:
    """End this process and those it started when its parent is gone, or has closed the connection."""
    poller = select.poll()
    poller.register(descriptor, 0)  # only that it was closed
    # A process that the parent forked may keep a copy of the connection open: look at both.
    while not poller.poll(_WATCH_MS) and os.getppid() == parent:
        pass
    if os.getpgrp() == os.getpid():
        os.killpg(os.getpid(), signal.SIGKILL)
    os._exit(1)


def _find_builder(name: str) -> Build:
    module, _, function = name.partition(":")
    build: Build = getattr(importlib.import_module(module), function)
    return build


def _answer(
    artifacts: Artifacts, build: Build, key: str, payload: bytes, limit_bytes: int
) -> tuple[Any, ...]:
    try:
        with artifacts.scratch(key) as scratch:
            built, temporary = scratch / "built", scratch / "temporary"
            built.mkdir()
            temporary.mkdir()
            try:
                with _temporary_files_in(temporary):
                    facts = build(payload, built)
            except BaseException as error:  # a builder may raise anything, SystemExit as well
                traceback.print_exc()
                kind = "disk" if _is_of_the_disk(error) else "refused"
                return kind, _reason(error), _op(error)
            path = artifacts.commit(key, built, facts)
    except ValueError as error:
        return "refused", _reason(error), ""
    except OSError as error:
        traceback.print_exc()
        return "disk", _reason(error), ""
    evicted = 0
    with contextlib.suppress(OSError):  # it is built; the next one tries again to make room
        evicted = artifacts.trim(limit_bytes)
    return "built", str(path), evicted


@contextlib.contextmanager
def _temporary_files_in(directory: Path) -> Any:
    """Set the directory of temporary files for this process and its compilers, so that a kill leaves none behind."""
    before, tempfile.tempdir = tempfile.tempdir, str(directory)
    variable, os.environ["TMPDIR"] = os.environ["TMPDIR"], str(directory)
    try:
        yield
    finally:
        tempfile.tempdir, os.environ["TMPDIR"] = before, variable


def _is_of_the_disk(error: BaseException | None) -> bool:
    while error is not None:
        if isinstance(error, OSError) and error.errno in _DISK_ERRORS:
            return True
        if any(os.strerror(number) in str(error) for number in _DISK_ERRORS):  # a compiler's words
            return True
        error = error.__cause__ or error.__context__
    return False


def _op(error: BaseException) -> str:
    """Return the name of the op that is refused, if the builder knows it."""
    op = getattr(error, "op", "")
    return op if isinstance(op, str) else ""


def _reason(error: BaseException) -> str:
    """Return the one line of an error that says most."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    said_by_compiler = [line for line in lines if _COMPILER_ERROR.search(line)]
    line = (said_by_compiler or lines or [""])[0][:_MAX_QUOTED].rstrip(".")
    if said_by_compiler or _op(error) or re.match(r"\w+(Error|Exception)\b", line):
        return line
    return f"{type(error).__name__}: {line}" if line else type(error).__name__


if __name__ == "__main__":
    main(*sys.argv[1:])
