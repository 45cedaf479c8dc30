"""The compiler's process: it receives requests from its parent, builds and commits each, and sends the outcome.

`compiler_process` runs this file as a script; the arguments are a connection's descriptor, the parent's process id and
a priority. Before the priority is lowered and the parent is watched, only the standard library is imported: to import
PyTorch takes two seconds of a core that the training run may need. The first message is the configuration: the
directory of the artifacts and the builder, such as `build_artifact`. Every other message is a key and a payload.
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
    from ltc_core.executors.artifacts import Artifacts

_WATCH_MS = 500
# Beside steps that keep all cores busy. The threads of a step wait for each other, so whoever holds up one of them
# holds up all, and the kernel lets a nice process end its time slice. Measured on two cores with two threads (U-Net,
# waited for or not): at nice 10 the compiler gets 0.3 to 0.6 of a core and steps take 1.4 to 2.9 times as long, at nice
# 19 it gets 0.13 to 0.19 and they take 1.05 to 1.23 times, at SCHED_IDLE 0.04 to 0.07 and 1.01 to 1.03 times.
_NICE = {"low": 10, "normal": 0}
_MOST_NICE = 19
_MAX_QUOTED = 300
# Errors after which another directory may work: it may have room, or be writable.
_DISK_ERRORS = {errno.ENOSPC, errno.EDQUOT, errno.EROFS}
_NAMED = re.compile(r"\w+(Error|Exception)\b")  # a line that begins with an exception's class
_NAME_ALONE = re.compile(r"\w+(Error|Exception):?")
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
        from ltc_core.executors.artifacts import Artifacts
    except BaseException as error:  # any error means that there is no compiler
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
    """Lower the priority, be the first process that the kernel kills when memory runs out, and disable core dumps."""
    try:
        if priority == "idle":
            os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
        else:
            os.nice(_NICE[priority])
    except OSError:  # a sandbox may forbid it
        os.nice(_MOST_NICE)
    with contextlib.suppress(OSError):  # the file exists on Linux only
        Path("/proc/self/oom_score_adj").write_text("1000")
    _, most = resource.getrlimit(resource.RLIMIT_CORE)
    resource.setrlimit(resource.RLIMIT_CORE, (0, most))


def _watch(descriptor: int, parent: int) -> None:
    """Kill this process and those it started when the parent has ended or closed the connection."""
    poller = select.poll()
    poller.register(descriptor, 0)  # reports only that it was closed
    # A process that the parent forked may keep the connection open, so the parent's id is checked too.
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
    with contextlib.suppress(OSError):  # the artifact is built; the next request trims again
        evicted = artifacts.trim(limit_bytes)
    return "built", str(path), evicted


@contextlib.contextmanager
def _temporary_files_in(directory: Path) -> Any:
    """Temporary files of this process and its compilers go to `directory`, so that they are removed after a kill."""
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
        # A compiler reports such an error in its output only.
        if any(os.strerror(number) in str(error) for number in _DISK_ERRORS):
            return True
        error = error.__cause__ or error.__context__
    return False


def _op(error: BaseException) -> str:
    """Name of the refused op; "" if the builder does not know it."""
    op = getattr(error, "op", "")
    return op if isinstance(op, str) else ""


def _reason(error: BaseException) -> str:
    """The most informative line of an error."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    said_by_compiler = [line for line in lines if _COMPILER_ERROR.search(line)]
    line = (said_by_compiler or lines or [""])[0][:_MAX_QUOTED].rstrip(".")
    if said_by_compiler or _op(error):
        return line
    if not line or _NAME_ALONE.fullmatch(line):
        return f"{line or f'{type(error).__name__}:'} {_place(error)}"[:_MAX_QUOTED]
    return line if _NAMED.match(line) else f"{type(error).__name__}: {line}"


def _place(error: BaseException) -> str:
    """The line that raised an error without a text, such as a check."""
    while error.__cause__ is not None:
        error = error.__cause__
    frames = traceback.extract_tb(error.__traceback__)
    if not frames:
        return "without a text"
    return f"{frames[-1].line} ({os.path.basename(frames[-1].filename)}:{frames[-1].lineno})"


if __name__ == "__main__":
    main(*sys.argv[1:])
