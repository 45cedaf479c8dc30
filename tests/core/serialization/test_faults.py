"""xser.save under faults: kills at every step, other writers, full disks, failing calls."""

import errno
import fcntl
import logging
import os
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

import ltc_core.serialization as xser
from ltc_core.errors import CheckpointIOError
from ltc_core.serialization import atomic, directory, tensor_file
from tests import prepared

ROOT = Path(__file__).parents[3]


def run_script(script: str, *arguments: object) -> str:
    done = prepared.run(
        [sys.executable, "-c", script, *map(str, arguments)],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


KILLED = """
import builtins, os, signal, sys
import torch
import ltc_core.serialization as xser

path, parent = sys.argv[1], os.path.dirname(sys.argv[1])
NAMES = ["mkdir", "open", "rename", "fsync", "unlink", "rmdir", "fchmod", "close"]

def tree(tag):
    return {"tag": tag, "tensors": [torch.full((3,), float(tag)) for _ in range(2)]}

def tag_of(loaded):
    assert all(t.equal(torch.full((3,), float(loaded["tag"]))) for t in loaded["tensors"])
    return loaded["tag"]

def dying(function, calls, last):
    def call(*args, **kwargs):
        calls.append(function)
        if len(calls) == last:
            os.kill(os.getpid(), signal.SIGKILL)
        return function(*args, **kwargs)
    return call

def save_and_die(tag, last):
    "Save in a child that kills itself before its call number `last`; tell whether it died."
    child = os.fork()
    if child == 0:
        calls = []
        for name in NAMES:
            setattr(os, name, dying(getattr(os, name), calls, last))
        builtins.open = dying(builtins.open, calls, last)
        xser.save(tree(tag), path)
        os._exit(0)
    status = os.waitpid(child, 0)[1]
    assert os.waitstatus_to_exitcode(status) in (0, -signal.SIGKILL), status
    return status != 0

def check(tag, old, counts):
    found = tag_of(xser.load(path))
    assert found in (old, tag), (found, old, tag)
    counts["new" if found == tag else "old"] += 1
    counts["aside"] += not os.path.exists(path)
    return found
"""

KILLED_ONCE = (
    KILLED
    + """
tag, last, counts = 0, 0, {"old": 0, "new": 0, "aside": 0}
xser.save(tree(0), path)
died = True
while died:
    last += 1
    died = save_and_die(tag + 1, last)
    check(tag + 1, tag, counts)
    xser.save(tree(tag + 2), path)
    assert tag_of(xser.load(path)) == tag + 2
    assert os.listdir(parent) == [os.path.basename(path)], os.listdir(parent)
    tag += 2
print(last, counts["old"], counts["new"], counts["aside"])
"""
)

KILLED_AGAIN = (
    KILLED
    + """
tag, counts = 0, {"old": 0, "new": 0, "aside": 0}
xser.save(tree(0), path)
for first in range(1, 200):
    died = save_and_die(tag + 1, first)
    found = check(tag + 1, tag, counts)
    for second in range(1 + first % 4, 200, 4):
        died_again = save_and_die(tag + 2, second)
        found = check(tag + 2, found, counts)
        tag += 2
        if not died_again:
            break
    if not died:
        break
print(counts["old"], counts["new"], counts["aside"])
"""
)


def test_killed_at_every_step_leaves_the_old_or_the_new(tmp_path: Path) -> None:
    steps, old, new, aside = map(int, run_script(KILLED_ONCE, tmp_path / "c").split())
    assert steps > 20  # before each system call of a save, and the save that got through
    assert old > 10 and new > 3 and aside >= 1


def test_killed_again_after_a_kill(tmp_path: Path) -> None:
    old, new, aside = map(int, run_script(KILLED_AGAIN, tmp_path / "c").split())
    assert old > 10 and new > 10 and aside >= 1


CONCURRENT = """
import os, sys
import torch
import ltc_core.serialization as xser
path, parent = sys.argv[1], os.path.dirname(sys.argv[1])

def tree(tag):
    return [tag, *(torch.full((1000,), float(tag)) for _ in range(3))]

xser.save(tree(0), path)
writers = []
for writer in range(2):
    child = os.fork()
    if child == 0:
        for step in range(40):
            xser.save(tree(100 * writer + step), path)
        os._exit(0)
    writers.append(child)
loads = 0
while writers:
    tag, *tensors = xser.load(path)
    assert all(t.equal(torch.full((1000,), float(tag))) for t in tensors)
    loads += 1
    for child in list(writers):
        pid, status = os.waitpid(child, os.WNOHANG)
        if pid:
            assert status == 0, status
            writers.remove(child)
assert os.listdir(parent) == [os.path.basename(path)], os.listdir(parent)
print(loads)
"""


def test_two_writers_and_a_reader_never_mix_checkpoints(tmp_path: Path) -> None:
    assert int(run_script(CONCURRENT, tmp_path / "c")) > 5


def test_the_mode_is_kept_while_another_writer_swaps(tmp_path: Path) -> None:
    path = tmp_path / "c"
    path.mkdir(mode=0o750)
    with atomic.replace_directory(str(path), lambda path: None):
        parent = os.open(tmp_path, os.O_RDONLY)
        fcntl.flock(parent, fcntl.LOCK_EX)
        os.rename(path, atomic.old_name(str(path)))  # the other writer is between its two renames

        def end() -> None:
            os.rename(atomic.old_name(str(path)), path)
            os.close(parent)

        threading.Timer(0.2, end).start()
    assert path.stat().st_mode & 0o777 == 0o750


FULL_DISK = """
import errno, os, resource, sys
import torch
import ltc_core.serialization as xser
from ltc_core.errors import CheckpointIOError
from tests import prepared
path = sys.argv[1]
xser.save([torch.ones(10)], path)
resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
try:
    xser.save([torch.zeros(10), torch.zeros(3_000_000)], path)
except CheckpointIOError as error:
    assert error.errno == errno.EFBIG, error.errno
    print(error)
assert xser.load(path)[0].equal(torch.ones(10))
xser.save([torch.full((10,), 2.0)], path)  # the process goes on
assert xser.load(path)[0].equal(torch.full((10,), 2.0))
assert os.listdir(os.path.dirname(path)) == ["c"], os.listdir(os.path.dirname(path))
"""


def test_full_disk_leaves_the_old_checkpoint(tmp_path: Path) -> None:
    what, got, next_ = run_script(FULL_DISK, tmp_path / "c").splitlines()
    assert what.startswith(f"File too large while writing {tmp_path}/c (need 12 MB, free ")
    assert got.strip().startswith("got: OSError")
    assert next_.strip().startswith("Next: make room") and "Nothing was replaced" in next_


class FullFile:
    """A file on a disk that has room for `room` bytes."""

    def __init__(self, file: Any, room: int) -> None:
        self._file, self._room = file, room

    def __enter__(self) -> "FullFile":
        return self

    def __exit__(self, *exception: object) -> None:
        self._file.close()

    def write(self, data: bytes) -> None:
        self._room -= len(data)
        if self._room < 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        self._file.write(data)

    def tell(self) -> int:
        return int(self._file.tell())


@pytest.mark.parametrize("room", [0, 100, 3_999_000])
def test_no_space_left(room: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    xser.save("old", tmp_path / "c")
    with monkeypatch.context() as patch:
        full = lambda path, mode: FullFile(open(path, mode), room)  # noqa: E731
        patch.setattr(tensor_file, "open", full, raising=False)
        with pytest.raises(
            CheckpointIOError,
            match=r"^No space left on device while writing \S*/c \(need 4 MB, free \d.* MB\)\n",
        ) as caught:
            xser.save([torch.ones(1_000_000)], tmp_path / "c")
    assert caught.value.errno == errno.ENOSPC and isinstance(caught.value, OSError)
    assert xser.load(tmp_path / "c") == "old" and os.listdir(tmp_path) == ["c"]


@pytest.mark.parametrize("number", range(1, 4))
def test_a_rename_that_fails_is_undone(
    number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    xser.save("old", tmp_path / "c")
    rename, calls = os.rename, []

    def failing(source: str, target: str) -> None:
        calls.append(target)
        if len(calls) == number:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        rename(source, target)

    with monkeypatch.context() as patch:
        patch.setattr(os, "rename", failing)
        if number <= 2:
            with pytest.raises(CheckpointIOError, match="Input/output error while writing"):
                xser.save("new", tmp_path / "c")
        else:
            xser.save("new", tmp_path / "c")  # there is no third one
    assert xser.load(tmp_path / "c") == ("old" if number <= 2 else "new")
    assert os.listdir(tmp_path) == ["c"]


@pytest.mark.parametrize("raised", [KeyboardInterrupt(), RuntimeError("the device failed")])
def test_an_error_while_fetching_passes_and_leaves_the_old_checkpoint(
    raised: BaseException, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    xser.save("old", tmp_path / "c")
    fetched = []

    def fetch(tensor: torch.Tensor) -> torch.Tensor:
        fetched.append(tensor)
        if len(fetched) == 2:
            raise raised
        return tensor

    with monkeypatch.context() as patch:
        patch.setattr(directory, "cpu_copy", fetch)
        with pytest.raises(type(raised)) as caught:
            xser.save([torch.ones(1), torch.ones(2)], tmp_path / "c")
    assert caught.value is raised
    assert xser.load(tmp_path / "c") == "old" and os.listdir(tmp_path) == ["c"]


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("missing/c", "No such file or directory while writing .*/missing/c"),
        ("file/c", "Not a directory while writing .*/file/c"),
    ],
)
def test_directories_that_cannot_be_written(name: str, text: str, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointIOError, match=text):
        xser.save(1, tmp_path / name)
    assert os.listdir(tmp_path) == ["file"]


@pytest.mark.parametrize("code", [errno.EROFS, errno.EACCES])
def test_read_only_directory(code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: Any) -> None:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(os, "mkdir", refuse)
    with pytest.raises(CheckpointIOError, match=f"{os.strerror(code)} while writing"):
        xser.save(1, tmp_path / "c")


def test_reading_from_what_a_killed_save_moved_aside_says_so(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    xser.save("old", tmp_path / "c")
    os.rename(tmp_path / "c", tmp_path / ".c.ltc-old")
    with caplog.at_level(logging.WARNING):
        assert xser.load(tmp_path / "c") == "old"
    assert "its writer was killed: reading the old one" in caplog.text
