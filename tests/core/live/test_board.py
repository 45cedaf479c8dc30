"""The directory of states: who has ended is known, what killed processes leave is removed, others' files are not."""

import os
import stat
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from ltc_core.errors import ProfilerError
from ltc_core.live.board import StateFile, directory_of, is_off, read_states
from ltc_core.live.sampler import where
from ltc_core.live.state import State, encoded

HERE = State(where=where(), pid=os.getpid(), began_s=psutil.Process().create_time())
GONE = replace(HERE, began_s=1.0)  # a process that had the same id


def put(directory: Path, number: int, state: State) -> Path:
    path = directory / f"state-{number}"
    path.write_bytes(encoded(state))
    return path


def test_a_state_is_read_and_its_file_is_the_users_alone(tmp_path: Path) -> None:
    file = StateFile(tmp_path / "new")
    file.write(HERE)
    file.write(replace(HERE, step=3))
    assert stat.S_IMODE(file.path.stat().st_mode) == 0o600
    assert stat.S_IMODE(file.path.parent.stat().st_mode) == 0o700
    (seen,) = read_states(tmp_path / "new")
    assert seen.state.step == 3 and not seen.is_ended and not seen.is_stopped
    file.remove()
    assert read_states(tmp_path / "new") == [] and not file.path.exists()


def test_the_file_of_a_dead_process_is_removed(tmp_path: Path) -> None:
    path = put(tmp_path, 1, GONE)
    huge = put(tmp_path, 2, replace(HERE, pid=2**62))
    assert read_states(tmp_path) == []
    assert not path.exists() and not huge.exists()


def test_a_killed_rank_is_there_as_long_as_its_job(tmp_path: Path) -> None:
    path = put(tmp_path, 1, replace(GONE, job="a:1", rank=1))
    put(tmp_path, 2, replace(HERE, job="a:1", rank=0))
    assert [(s.state.rank, s.is_ended) for s in read_states(tmp_path)] == [(0, False), (1, True)]
    assert path.exists()
    (tmp_path / "state-2").unlink()
    assert read_states(tmp_path) == [] and not path.exists()


def test_the_earlier_attempt_of_a_rank_is_not_shown(tmp_path: Path) -> None:
    put(tmp_path, 1, replace(GONE, job="a:1", rank=0))
    put(tmp_path, 2, replace(HERE, job="a:1", rank=0))
    assert [s.is_ended for s in read_states(tmp_path)] == [False]


def test_files_of_other_hosts_and_of_nobody_are_left_alone(tmp_path: Path) -> None:
    other = put(tmp_path, 1, replace(GONE, where="elsewhere"))
    (tmp_path / "state-2").write_text("no state")
    (tmp_path / "state-x").touch()
    (tmp_path / "state-3").symlink_to("/dev/zero")
    os.mkfifo(tmp_path / "state-4")
    assert read_states(tmp_path) == [] and other.exists()
    assert len(list(tmp_path.iterdir())) == 5
    assert read_states(tmp_path / "none") == []


def test_a_directory_that_others_can_write_to_is_refused(tmp_path: Path) -> None:
    tmp_path.chmod(0o777)
    with pytest.raises(ProfilerError, match=r"(?s)cannot be published in .*got: .*Next: let LTC_W"):
        StateFile(tmp_path)
    with pytest.raises(ProfilerError, match=r"(?s)got: No such file or directory"):
        StateFile(tmp_path / "none" / "none")


def test_what_ltc_watch_names(monkeypatch: pytest.MonkeyPatch) -> None:
    assert is_off(None) and is_off("0") and is_off("off") and not is_off("1")
    assert directory_of("/a/b") == Path("/a/b")
    assert (
        directory_of("1")
        == directory_of(None)
        == Path(os.environ["TMPDIR"]) / directory_of("1").name
    )
