"""A builder for tests of the compile service: it does what its payload says, and needs no compiler.

`request(...)` makes a payload: a word for `do`, and its arguments. `build` is imported in the compiler's process, which
is why that process starts without PyTorch here.
"""

import ctypes
import errno
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from tests.core import bare_package  # noqa: F401

BUILDER = "tests.core.executors.inductor.fake_builder:build"
LIBRARY = b"not really a library" * 100


def request(do: str = "", **more: Any) -> bytes:
    return json.dumps({"do": do, **{name: str(value) for name, value in more.items()}}).encode()


class Refused(Exception):
    op = "aten::odd"


def build(payload: bytes, directory: Path) -> dict[str, Any]:
    """Write a file that is no library. Arguments that every request may have: `calls`, a file that gets a line."""
    wanted = json.loads(payload)
    if "calls" in wanted:
        with open(wanted["calls"], "a") as file:
            file.write(f"{os.getpid()}\n")
    facts = globals()[f"do_{wanted['do']}"](wanted, directory) if wanted["do"] else {}
    (directory / "model.so").write_bytes(LIBRARY)
    return {"library": "model.so", "pid": os.getpid(), **(facts or {})}


def do_describe(wanted: dict[str, str], directory: Path) -> dict[str, Any]:
    return {
        "policy": os.sched_getscheduler(0),
        "nice": os.nice(0),
        "group": os.getpgrp(),
        "session": os.getsid(0),
        "oom": Path("/proc/self/oom_score_adj").read_text().strip(),
        "core": resource.getrlimit(resource.RLIMIT_CORE)[0],
        "tmp": tempfile.gettempdir() == os.environ["TMPDIR"],
        "tmpdir": os.environ["TMPDIR"],
        "threads": os.environ["OMP_NUM_THREADS"],
        "inductor": os.environ["TORCHINDUCTOR_CACHE_DIR"],
        "torch": "torch" in sys.modules,
        "7": {7: 8},
    }


def do_print(wanted: dict[str, str], directory: Path) -> None:
    print("to stdout " * 1000)
    print("to stderr", file=sys.stderr)
    os.write(1, b"\x00\xff raw\n" * 1000)
    os.system("echo from the shell; cat")  # cat: what it inherits as stdin is empty


def do_raise(wanted: dict[str, str], directory: Path) -> None:
    raise NotImplementedError(wanted.get("text", ""))


def do_check(wanted: dict[str, str], directory: Path) -> None:
    assert not wanted


def do_check_within(wanted: dict[str, str], directory: Path) -> None:
    """As PyTorch's compiler, which raises an error of its own with the text of another one, here empty."""
    try:
        do_check(wanted, directory)
    except AssertionError as error:
        raise RuntimeError("AssertionError: \n").with_traceback(error.__traceback__) from None


def do_raise_with_op(wanted: dict[str, str], directory: Path) -> None:
    raise Refused("aten::odd: it is odd")


def do_raise_of_compiler(wanted: dict[str, str], directory: Path) -> None:
    output = "In file included from x.h\n  x.cpp:3:1: fatal error: omp.h: No such file\n compilation terminated."
    raise RuntimeError(f"C++ compile error\n\nCommand:\ng++ x.cpp\n\nOutput:\n{output}")


def do_sys_exit(wanted: dict[str, str], directory: Path) -> None:
    sys.exit("leaving")


def do_link(wanted: dict[str, str], directory: Path) -> None:
    (directory / "link").symlink_to("/etc/passwd")


def do_full_disk(wanted: dict[str, str], directory: Path) -> None:
    """There is no room below `where`: for the builder, or (`when` is 'commit') for keeping what it built."""
    if not directory.is_relative_to(wanted["where"]):
        return
    full = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    if wanted["when"] == "build":
        raise full
    if wanted["when"] == "compiler":
        raise RuntimeError(f"C++ compile error\n/tmp/x.s: fatal error: {full.strerror}")

    def sync(descriptor: int) -> None:
        raise full

    os.fsync = sync


def do_compute(wanted: dict[str, str], directory: Path) -> None:
    """Use so much processor time, with naps of so many seconds in all: who gets little of a core has others."""
    started, naps = time.process_time(), 100
    for at in range(naps):
        until = started + float(wanted["processor_s"]) * (at + 1) / naps
        while time.process_time() < until:
            pass
        time.sleep(float(wanted["naps_s"]) / naps)


def do_sleep(wanted: dict[str, str], directory: Path) -> None:
    _write(wanted["started"], [os.getpid()])
    time.sleep(float(wanted["seconds"]))


def do_sleep_with_child(wanted: dict[str, str], directory: Path) -> None:
    """Sleep as long as a compiler that is a child of this process, and holds on to what it can."""
    sleeper = subprocess.Popen(["sleep", "1000"], close_fds=False)
    _write(wanted["started"], [os.getpid(), sleeper.pid])
    sleeper.wait()


def do_segv(wanted: dict[str, str], directory: Path) -> None:
    print("about to read nothing")
    ctypes.string_at(0)


def do_segv_with_child(wanted: dict[str, str], directory: Path) -> None:
    sleeper = subprocess.Popen(["sleep", "1000"], close_fds=False)
    _write(wanted["started"], [os.getpid(), sleeper.pid])
    ctypes.string_at(0)


def do_abort(wanted: dict[str, str], directory: Path) -> None:
    os.write(2, b"terminate called\n  what():  index out of range\n")
    os.abort()


def do_kill(wanted: dict[str, str], directory: Path) -> None:
    os.kill(os.getpid(), 9)


def do_os_exit(wanted: dict[str, str], directory: Path) -> None:
    os._exit(3)


def _write(path: str, pids: list[int]) -> None:
    """All at once: who waits for the file finds it whole."""
    Path(f"{path}.new").write_text(" ".join(map(str, pids)))
    os.rename(f"{path}.new", path)
