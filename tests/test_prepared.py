"""Tests of the fork server for tests: a program cannot tell it from an interpreter of its own."""

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests import prepared

ROOT = Path(__file__).parents[1]
SEEN = """
import json, os, pathlib, re, signal, sys, tempfile, warnings
import torch, torch._dynamo, torch.distributed.tensor  # some of what they import adds a filter
seen = {
    "argv": sys.argv, "orig_argv": sys.orig_argv, "path": sys.path, "name": __name__, "file": globals().get("__file__"),
    "main": sys.modules["__main__"].__dict__ is globals(), "directory": os.getcwd(), "temporary": tempfile.gettempdir(),
    "environ": {k: v for k, v in os.environ.items() if k != "TORCHINDUCTOR_CACHE_DIR"},  # that import sets it
    "filters": [str(each) for each in warnings.filters], "stdin": sys.stdin.read(),
    "mark": re.findall("TEST_JOB=[01]+", pathlib.Path("/proc/self/environ").read_text()),
    "session": os.getsid(0) == os.getpid(), "interrupt": signal.getsignal(signal.SIGINT) is signal.SIG_IGN,
    "descriptors": sorted(os.readlink(f"/proc/self/fd/{n}").split(":")[0] for n in os.listdir("/proc/self/fd")[:-1]),
    "signals": re.findall("Sig[BCI].*", pathlib.Path("/proc/self/status").read_text()),
}
print(json.dumps(seen))
"""


def environ(**more: str) -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(ROOT), **more}


def both(arguments: list[str], **options: Any) -> list[subprocess.CompletedProcess[str]]:
    """What a program does when the server forks it, and what it does alone."""
    command = [sys.executable, *options.pop("flags", ["-W", "error"]), *arguments]
    options = {
        "env": environ(LTC_SOME="1", TEST_JOB="1" * 32, TMPDIR=str(ROOT / "tests")),
        "capture_output": True,
        "text": True,
        "timeout": 60,
        **options,
    }
    return [prepared.run(command, **options), subprocess.run(command, **options)]


@pytest.mark.parametrize(
    ("flags", "how"),
    [
        *((["-W", "error"], how) for how in ("code", "script", "module")),
        *(([], how) for how in ("code", "script", "module", "input")),
    ],
)
def test_a_program_sees_what_it_sees_alone(how: str, flags: list[str], tmp_path: Path) -> None:
    (tmp_path / "seeing.py").write_text(SEEN)
    arguments = {
        "code": ["-c", SEEN],
        "script": ["seeing.py"],
        "module": ["-m", "seeing"],
        "input": ["-"],
    }[how]
    given = SEEN if how == "input" else ""
    done = both([*arguments, "an", "argument"], flags=flags, cwd=tmp_path, input=given)
    forked, alone = (json.loads(each.stdout) for each in done)
    assert forked == alone and forked["environ"]["LTC_SOME"] == "1"


@pytest.mark.parametrize(
    "code",
    [
        "raise SystemExit(3)",
        "def f():\n    raise ValueError('no')\nf()",
        "import atexit; atexit.register(print, 'at exit'); print('before')",
        "import warnings; warnings.warn('an error here')",
        "import os; os.abort()",
        "import os, signal; os.kill(os.getpid(), signal.SIGTERM)",
        "import signal; signal.raise_signal(signal.SIGINT)",
        "import threading, time; threading.Thread(target=lambda: (time.sleep(0.1), print('late'))).start()",
        "syntax error",
    ],
)
def test_a_program_ends_as_it_ends_alone(code: str) -> None:
    forked, alone = both(["-c", code])
    assert (forked.returncode, forked.stdout) == (alone.returncode, alone.stdout)
    assert forked.stderr.splitlines()[-1:] == alone.stderr.splitlines()[-1:]
    if "ValueError" in code:
        assert forked.stderr == alone.stderr


def test_a_program_is_waited_for_killed_and_talked_to() -> None:
    command = [sys.executable, "-W", "error", "-c", "print(input()); input()"]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with prepared.start(command, env=environ(), **pipes) as program:
        assert program.poll() is None
        with pytest.raises(subprocess.TimeoutExpired):
            program.wait(timeout=0.1)
        print("hello", file=program.stdin, flush=True)
        assert program.stdout.readline() == "hello\n" and program.pid in _children()
        program.kill()
        assert program.wait() == program.poll() == -signal.SIGKILL
    assert program.pid not in _children()


def _children() -> list[int]:
    files = [Path(f"/proc/{server}/task/{server}/children") for server in prepared.server_pids()]
    return [int(pid) for file in files for pid in file.read_text().split()]


def test_a_job_has_a_session_and_a_mark_and_may_ignore_interrupts() -> None:
    options = {
        "env": environ(TEST_JOB="1" * 32), "stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE,
        "start_new_session": True,
    }  # fmt: skip
    done = []
    for start in (prepared.start, prepared.start_alone):
        with start([sys.executable, "-c", SEEN], ignores_interrupts=True, **options) as program:
            done.append(json.loads(program.communicate(timeout=60)[0]))
    assert done[0] == done[1]
    assert done[0]["mark"] == ["TEST_JOB=" + "1" * 32]
    assert done[0]["session"] and done[0]["interrupt"]


@pytest.mark.parametrize(
    ("options", "more", "is_forked"),
    [
        (["-W", "error"], {}, True),
        (["-W", "error"], {"LTC_NUM_DEVICES": "2", "XLA_USE_BF16": "1", "TMPDIR": "/tmp"}, True),
        ([], {}, True),
        (["-W", "ignore"], {}, False),
        (["-u"], {}, False),
        (["-W", "error"], {"OMP_SCHEDULE": "static"}, False),
        (["-W", "error"], {"LTC_AUTOLOAD": "1"}, False),
        (["-W", "error"], {"PYTHONPATH": "/"}, False),
    ],
)
def test_a_program_that_starts_otherwise_is_not_forked(
    options: list[str], more: dict[str, str], is_forked: bool
) -> None:
    command = [sys.executable, *options, "-c", "import os; print(os.getppid())"]
    done = prepared.run(command, env=environ(**more), capture_output=True, text=True)
    assert (int(done.stdout) in prepared.server_pids()) is is_forked


SPAWNS = """
import json, os, re, signal, sys, threading
import torch
import ltc_dist as ltd
from ltc_dist.processes import kept_zygote

def found(rank, path):
    seen = {
        "rank": rank, "argv": sys.argv, "path": sys.path, "environ": dict(os.environ), "directory": os.getcwd(),
        "group": os.getpgrp() == os.getpid(), "session": os.getsid(0) == os.getpid(), "umask": os.umask(0),
        "threads": (torch.get_num_threads(), threading.active_count()), "stdout": os.readlink("/proc/self/fd/1")[:4],
        "signals": re.findall("Sig[BCI].*", open("/proc/self/status").read()), "name": sys.modules["__main__"].__name__,
        "mark": re.findall("TEST_JOB=[01]+", open("/proc/self/environ").read()),
        "kept": [signal.getsignal(n) is signal.SIG_IGN for n in (signal.SIGINT, signal.SIGHUP)],
    }
    with open(f"{path}/{rank}", "w") as file:
        json.dump(seen, file)

if __name__ == "__main__":
    os.umask(0o27)
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    for method in ("spawn", "forkserver"):
        os.mkdir(f"{sys.argv[1]}/{method}")
        ltd.spawn(found, (f"{sys.argv[1]}/{method}",), nprocs=2, start_method=method)
    print(b"tests.prepared" in open(f"/proc/{kept_zygote.pid()}/cmdline", "rb").read())
"""


def test_processes_of_a_program_see_what_they_see_alone(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SPAWNS)
    options = {"cwd": tmp_path, "capture_output": True, "text": True, "timeout": 60}
    seen = []
    for is_prepared in (True, False):
        (tmp_path / "seen").mkdir()
        command = [sys.executable, "train.py", "seen"]
        variables = environ(TEST_JOB="1" * 32)
        if is_prepared:
            done = prepared.run(command, env=variables, starts_processes=True, **options)
        else:
            done = subprocess.run(command, env=variables, **options)
        assert (done.stdout, done.stderr) == (f"{is_prepared}\n", "")
        files = sorted((tmp_path / "seen").glob("*/*"))
        seen.append([json.loads(file.read_text()) for file in files])
        (tmp_path / "seen").rename(tmp_path / f"seen{is_prepared}")
    assert len(seen[0]) == 4
    for forked, alone in zip(*seen, strict=True):
        for each in (forked, alone):
            for name in ("MASTER_PORT", "TORCHELASTIC_RUN_ID", "_LTC_RANK_OWNER"):  # of a run
                del each["environ"][name]
        assert forked == alone


def test_a_program_has_as_many_threads_as_alone() -> None:
    code = "import os, torch, threading; print(torch.get_num_threads(), len(os.listdir('/proc/self/task')))"
    code += (
        "; t = threading.Thread(target=lambda: print(torch.get_num_threads())); t.start(); t.join()"
    )
    forked, alone = both(["-c", code], env=environ(OMP_NUM_THREADS="1"))
    assert forked.stdout == alone.stdout == "1 1\n1\n"


def test_the_launcher_is_forked_as_it_starts_itself_anew(tmp_path: Path) -> None:
    (tmp_path / "train.py").touch()
    code, out = [], []
    for run in (prepared.run, subprocess.run):
        done = run(
            [sys.executable, "-m", "ltc_launch", "--dry-run", "train.py"],
            cwd=tmp_path, env=environ(), capture_output=True, text=True, timeout=60,
        )  # fmt: skip
        code.append(done.returncode)
        out.append(done.stdout)
    assert code == [0, 0] and out[0] and re.sub(r"\d+", "", out[0]) == re.sub(r"\d+", "", out[1])
