"""Temporary directories of launchers: a dead one's is removed, another host's is left alone."""

import dataclasses
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import psutil
import pytest

from ltc_launch import temporary
from ltc_launch.temporary import Owner
from tests.launching import Job, launcher


@pytest.fixture
def dead() -> Owner:
    """A process of this host that has ended."""
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    began = int(psutil.Process(process.pid).create_time())
    process.communicate(b"\n")
    return dataclasses.replace(Owner.here(), pid=process.pid, began_s=began)


def test_the_name_says_whose_it_is() -> None:
    here = Owner.here()
    assert Owner.of(f"{here.prefix()}abc_d1") == here
    assert (Owner.of("ltc-launch-123-abcdefgh"), Owner.of("other")) == (None, None)


def test_who_is_known_to_be_dead(dead: Owner) -> None:
    here = Owner.here()
    assert dead.is_known_dead(here) and not here.is_known_dead(here)
    recycled = dataclasses.replace(here, began_s=here.began_s - 100)  # another process had the id
    assert recycled.is_known_dead(here)
    for name in ("host", "boot"):
        assert not dataclasses.replace(dead, **{name: "0" * 8}).is_known_dead(here)


def test_only_what_is_known_to_be_dead_is_removed(
    dead: Owner, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    other_host = dataclasses.replace(dead, host="0" * 8)
    kept = [tmp_path / f"{owner.prefix()}x" for owner in (Owner.here(), other_host)]
    removed = tmp_path / f"{dead.prefix()}x"
    for path in (*kept, removed, tmp_path / "ltc-launch-of-somebody-else"):
        path.mkdir()
        (path / "file").touch()
    with temporary.directory() as found:
        assert not removed.exists() and all((path / "file").exists() for path in kept)
        assert (tmp_path / "ltc-launch-of-somebody-else").exists()
        assert Owner.of(os.path.basename(found)) == Owner.here()
    assert not os.path.exists(found)


@pytest.mark.dist
def test_beats_are_not_written_where_another_host_may_write(tmp_path: Path) -> None:
    """They hold times of this host's clock."""
    (tmp_path / "train.py").write_text("import os; print(sorted(os.listdir('logs')))")
    options = ["--log-dir", "logs", "--tee", "--hang-timeout", "100"]
    code, out, err = Job([*launcher(*options), "train.py"], tmp_path).end()
    assert code == 0 and out.count(",") == 0 and "beats" not in out, err  # the job's own folder
