"""A process keeps its zygote for the next `spawn`, which finds all that has changed since. It ends with its process."""

import contextlib
import json
import os
import resource
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from ltc_dist.processes import kept_zygote
from ltc_dist.processes import spawn as xmp
from tests.launching import ROOT, Job

pytestmark = pytest.mark.dist

# What a user changes between two calls. The function prints to the stdout of the moment.
CHANGES = """
import json, os, sys, tempfile
import ltc_dist as ltd
from ltc_dist.processes import kept_zygote

def found(rank):
    umask = os.umask(0)
    import added
    print(json.dumps([
        os.environ.get("LEARNING_RATE"), os.getcwd(), umask, added.WHERE, sys.argv[1:], tempfile.gettempdir(),
        sys.path[0],
    ]), flush=True)

def call():
    ltd.spawn(found, nprocs=2)
    sys.stdout.flush()

if __name__ == "__main__":
    here = os.getcwd()
    for name in ("one", "two"):
        os.makedirs(f"{name}/tmp")
        with open(f"{name}/added.py", "w") as file:
            file.write(f"WHERE = {name!r}")
    for name in ("one", "two"):
        os.environ["LEARNING_RATE"] = name
        os.environ["TMPDIR"] = f"{here}/{name}/tmp"
        os.chdir(f"{here}/{name}")
        os.umask({"one": 0o22, "two": 0o77}[name])
        sys.path.insert(0, f"{here}/{name}")
        sys.argv[1:] = [name]
        with open(f"{here}/{name}/out", "w") as file:
            os.dup2(file.fileno(), 1)
        call()
"""


@pytest.mark.parametrize("is_kept", [True, False])
def test_a_later_call_finds_what_has_changed(tmp_path: Path, is_kept: bool) -> None:
    (tmp_path / "train.py").write_text(CHANGES)
    job = Job([sys.executable, "train.py"], tmp_path, LTC_ZYGOTE=str(int(is_kept)))
    code, out, err = job.end()
    assert (code, out, err) == (0, "", "")
    for name, umask in {"one": 0o22, "two": 0o77}.items():
        place = str(tmp_path / name)
        expected = [name, place, umask, name, [name], f"{place}/tmp", place]
        lines = (tmp_path / name / "out").read_text().splitlines()
        assert [json.loads(line) for line in lines] == [expected] * 2


def tell(rank: int, *words: str) -> None:
    print("here", os.getppid(), os.getcwd(), os.environ.get("PYTEST_CURRENT_TEST"), *words)


def test_what_is_sent_with_a_call_leaves_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    xmp.spawn(tell, nprocs=2)
    before = kept_zygote.pid()
    capfd.readouterr()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTEST_CURRENT_TEST", "another")
    monkeypatch.setattr(sys, "argv", ["another"])
    xmp.spawn(tell, ("again",), nprocs=3)
    line = f"here {os.getpid()} {tmp_path} another again"
    assert capfd.readouterr() == ("\n".join([line] * 3) + "\n", "")
    assert kept_zygote.pid() == before is not None


@contextlib.contextmanager
def umask() -> Iterator[None]:
    before = os.umask(0o27)
    yield
    os.umask(before)


@contextlib.contextmanager
def limit() -> Iterator[None]:
    soft, hard = resource.getrlimit(resource.RLIMIT_CORE)
    other = 4096 if soft != 4096 else 8192
    if hard != resource.RLIM_INFINITY and other > hard:
        pytest.skip("the limit of core files cannot be raised here")
    resource.setrlimit(resource.RLIMIT_CORE, (other, hard))
    yield
    resource.setrlimit(resource.RLIMIT_CORE, (soft, hard))


@contextlib.contextmanager
def affinity() -> Iterator[None]:
    before = os.sched_getaffinity(0)
    if len(before) == 1:
        pytest.skip("there is one core")
    os.sched_setaffinity(0, {min(before)})
    yield
    os.sched_setaffinity(0, before)


@contextlib.contextmanager
def ignored_signal() -> Iterator[None]:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    yield
    signal.signal(signal.SIGHUP, before)


@contextlib.contextmanager
def warning_option() -> Iterator[None]:
    sys.warnoptions.append("error::BytesWarning")
    yield
    sys.warnoptions.remove("error::BytesWarning")


@contextlib.contextmanager
def path() -> Iterator[None]:
    sys.path.append("/nowhere")
    yield
    sys.path.remove("/nowhere")


@contextlib.contextmanager
def variable() -> Iterator[None]:
    os.environ["A_LIBRARY_READS_IT"] = "1"
    yield
    del os.environ["A_LIBRARY_READS_IT"]


@pytest.mark.parametrize(
    "change", [umask, limit, affinity, ignored_signal, warning_option, path, variable]
)
def test_what_it_took_over_at_its_start_replaces_it(
    monkeypatch: pytest.MonkeyPatch, change: Callable[[], Any]
) -> None:
    monkeypatch.setattr(kept_zygote, "Zygote", StandIn)
    monkeypatch.setattr(kept_zygote, "_kept", None)
    first = kept_zygote.get(os.environ, "json")
    assert kept_zygote.get(os.environ, "json") is first
    with change():
        second = kept_zygote.get(os.environ, "json")
        assert second is not first and first.has_ended()
    assert kept_zygote.get(os.environ, "json") is not second


class StandIn:
    """A zygote without a process."""

    pid = 0

    def __init__(self) -> None:
        self._is_closed = False

    @classmethod
    def start(cls, *_: Any) -> "StandIn":
        return cls()

    def has_ended(self) -> bool:
        return self._is_closed

    def close(self) -> None:
        self._is_closed = True


def test_one_that_was_killed_is_replaced(capfd: pytest.CaptureFixture[str]) -> None:
    xmp.spawn(tell, nprocs=2)
    before = kept_zygote.pid()
    assert before is not None
    os.kill(before, signal.SIGKILL)
    os.waitid(os.P_PID, before, os.WEXITED | os.WNOWAIT)
    xmp.spawn(tell, nprocs=2)
    out, err = capfd.readouterr()
    assert (out.count("here"), err) == (4, "")
    assert kept_zygote.pid() not in (None, before)
    with pytest.raises(ProcessLookupError):  # nor is it a zombie
        os.kill(before, 0)


def test_what_cannot_be_sent_leaves_it(capfd: pytest.CaptureFixture[str]) -> None:
    lock = threading.Lock()
    with pytest.raises(Exception, match="cannot be sent"):
        xmp.spawn(lambda rank: lock, nprocs=2)
    before = kept_zygote.pid()
    xmp.spawn(tell, nprocs=2)
    assert kept_zygote.pid() == before is not None and capfd.readouterr().out.count("here") == 2


def test_two_threads_at_a_time(capfd: pytest.CaptureFixture[str]) -> None:
    failed: list[BaseException] = []

    def call(word: str, nprocs: int) -> None:
        try:
            for _ in range(2):
                xmp.spawn(tell, (word,), nprocs=nprocs)
        except BaseException as error:
            failed.append(error)

    threads = [threading.Thread(target=call, args=(f"of {n}", n)) for n in (2, 3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    out, err = capfd.readouterr()
    assert (failed, err) == ([], "")
    assert (out.count("of 2"), out.count("of 3")) == (4, 6)


FORK = """
import os
import ltc_dist as ltd
from ltc_dist.processes import kept_zygote

def tell(rank):
    print(os.getppid(), flush=True)

if __name__ == "__main__":
    ltd.spawn(tell, nprocs=2)
    before = kept_zygote.pid()
    fork = os.fork()
    if not fork:
        assert kept_zygote.pid() is None
        ltd.spawn(tell, nprocs=2)
        assert kept_zygote.pid() not in (None, before)
        kept_zygote.close()
        os._exit(0)
    assert os.waitpid(fork, 0)[1] == 0
    ltd.spawn(tell, nprocs=2)
    assert kept_zygote.pid() == before
    print(os.getpid(), fork, flush=True)
"""


def test_a_fork_of_its_process_starts_another(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(FORK)
    code, out, err = Job([sys.executable, "train.py"], tmp_path).end()
    assert (code, err) == (0, "")
    *lines, last = out.splitlines()
    parent, fork = last.split()
    assert lines == [parent] * 2 + [fork] * 2 + [parent] * 2


# It ends as its argument says, while the zygote imports PyTorch or waits for requests.
ENDS = """
import os, signal, sys, time
import ltc_dist as ltd
from ltc_dist.processes import kept_zygote

def tell(rank):
    print("here", flush=True)

if __name__ == "__main__":
    how, when = sys.argv[1:]
    if when == "waits":
        ltd.spawn(tell, nprocs=2)
        assert kept_zygote.pid()
    else:
        kept_zygote.get(os.environ, "ltc_dist.processes.spawn")
    if how == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    if how == "leaves":
        os._exit(0)
    print("done", flush=True)
"""


@pytest.mark.parametrize("when", ["imports", "waits"])
@pytest.mark.parametrize("how", ["ends", "leaves", "killed"])
def test_it_ends_with_its_process(tmp_path: Path, how: str, when: str) -> None:
    (tmp_path / "train.py").write_text(ENDS)
    job = Job([sys.executable, "train.py", how, when], tmp_path)
    code, out, err = job.end(is_killed=how == "killed")
    assert (code, err) == (-signal.SIGKILL if how == "killed" else 0, "")
    assert out.count("here") == (2 if when == "waits" else 0)


@pytest.mark.parametrize("how", ["ends", "killed"])
def test_who_reads_the_output_sees_its_end(tmp_path: Path, how: str) -> None:
    (tmp_path / "train.py").write_text(ENDS)
    done = subprocess.run(
        ["sh", "-c", f"{sys.executable} train.py {how} waits 2>&1 | cat"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        timeout=50,
        text=True,
    )
    assert done.stdout.splitlines() == ["here"] * 2 + ["done"] * (how == "ends")
