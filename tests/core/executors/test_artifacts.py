"""Artifacts on disk: whole or not found, one builder at a time, the longest unused go first."""

import contextlib
import fcntl
import json
import os
import signal
import stat
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from ltc_core import metrics
from ltc_core.executors import artifacts as module
from ltc_core.executors.artifacts import WORK, Artifacts
from tests.core import child

KEY = "a" * 64
OTHER = "b" * 64
DAY_S = 24 * 3600


PRELUDE = """
import os, time
from pathlib import Path
from tests.core import bare_package
from ltc_core.executors.artifacts import Artifacts
artifacts = Artifacts(Path(os.environ["ROOT"]))
"""


@pytest.fixture
def artifacts(tmp_path: Path) -> Artifacts:
    made = Artifacts(tmp_path / "cache" / "compiled")
    made.prepare()
    return made


def build(artifacts: Artifacts, key: str = KEY, size: int = 1000, **facts: Any) -> Path:
    with artifacts.scratch(key) as scratch:
        built = scratch / "built"
        (built / "more").mkdir(parents=True)
        (built / "model.so").write_bytes(os.urandom(size))
        (built / "more" / "model.json").write_text("{}")
        (scratch / "temporary").write_text("left behind")
        return artifacts.commit(key, built, facts)


def names(artifacts: Artifacts) -> set[str]:
    return {path.name for path in artifacts.root.iterdir()}


def counted(name: str) -> int:
    return metrics.counter_value(name) or 0


def age(path: Path, seconds: float) -> None:
    then = time.time() - seconds
    os.utime(path, (then, then))


class TestFind:
    def test_gives_what_was_committed(self, artifacts: Artifacts) -> None:
        assert artifacts.find(KEY) is None and not artifacts.has(KEY)
        path = build(artifacts, returned=[1, 2], by_number={10: "x", 9: {"y": None}})
        assert artifacts.has(KEY) and artifacts.find(KEY) == path == artifacts.root / KEY
        assert artifacts.facts(path) == {
            "returned": [1, 2],
            "by_number": {"10": "x", "9": {"y": None}},
        }
        assert artifacts.find(OTHER) is None
        assert names(artifacts) == {KEY}  # no scratch, no lock
        assert stat.S_IMODE(artifacts.root.stat().st_mode) == 0o700

    @pytest.mark.parametrize(
        "damage",
        ["truncated", "longer", "flipped", "file gone", "manifest gone", "manifest cut", "facts changed",
         "another format", "another key's", "a link", "a list"],
    )  # fmt: skip
    def test_what_is_damaged_is_not_found_and_removed(
        self, artifacts: Artifacts, damage: str
    ) -> None:
        path = build(artifacts, returned=[1])
        library, manifest = path / "model.so", path / "manifest.json"
        if damage == "truncated":
            os.truncate(library, 500)
        elif damage == "longer":
            os.truncate(library, 5000)
        elif damage == "flipped":
            data = bytearray(library.read_bytes())
            data[500] ^= 1
            library.write_bytes(data)
        elif damage == "file gone":
            (path / "more" / "model.json").unlink()
        elif damage == "manifest gone":
            manifest.unlink()
        elif damage == "manifest cut":
            os.truncate(manifest, 20)
        elif damage == "facts changed":
            manifest.write_text(manifest.read_text().replace("[1]", "[2]"))
        elif damage == "another format":
            body = {"format": 0, "key": KEY}
            manifest.write_text(json.dumps({"digest": module._body_digest(body), "body": body}))
        elif damage == "another key's":
            path.rename(path.with_name(OTHER))
            path = path.with_name(OTHER)
        elif damage == "a link":
            library.rename(artifacts.root.parent / "elsewhere")
            library.symlink_to(artifacts.root.parent / "elsewhere")
        else:
            manifest.write_text("[]")
        before = counted("DamagedArtifact")
        assert artifacts.find(path.name) is None and not path.exists()
        assert counted("DamagedArtifact") == before + 1
        assert names(artifacts) == set()
        assert artifacts.find(build(artifacts, path.name).name) is not None

    def test_what_cannot_be_read_is_not_found(self, tmp_path: Path) -> None:
        """A root that is a file, and one that is not there."""
        (tmp_path / "file").write_text("")
        for root in (tmp_path / "file", tmp_path / "nothing"):
            assert Artifacts(root).find(KEY) is None and not Artifacts(root).has(KEY)
        (tmp_path / "nothing").mkdir()
        (tmp_path / "nothing" / KEY).write_text("")
        assert Artifacts(tmp_path / "nothing").find(KEY) is None

    def test_a_disk_that_fails_for_a_moment_damages_nothing(
        self, artifacts: Artifacts, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        path = build(artifacts)

        def fail(path: Path) -> str:
            raise OSError(5, "Input/output error")

        with monkeypatch.context() as patch:
            patch.setattr(module, "_digest", fail)
            assert artifacts.find(KEY) is None
        assert artifacts.find(KEY) == path

    def test_others_may_not_write(self, tmp_path: Path) -> None:
        root = tmp_path / "shared"
        root.mkdir()
        root.chmod(0o777)
        with pytest.raises(PermissionError, match="can be written by other users; LTC_CACHE_DIR"):
            Artifacts(root).prepare()


class TestCommit:
    def test_the_first_one_stays(self, artifacts: Artifacts) -> None:
        first = build(artifacts, by="first")
        assert build(artifacts, by="second") == first
        assert artifacts.facts(first) == {"by": "first"} and names(artifacts) == {KEY}

    def test_a_damaged_one_is_replaced(self, artifacts: Artifacts) -> None:
        os.truncate(build(artifacts, by="first") / "model.so", 1)
        path = build(artifacts, by="second")
        assert artifacts.facts(path) == {"by": "second"} and artifacts.find(KEY) == path

    def test_what_is_refused(self, artifacts: Artifacts) -> None:
        with artifacts.scratch(KEY) as scratch:
            with pytest.raises(ValueError, match="nothing was built"):
                artifacts.commit(KEY, scratch, {})
            (scratch / "link").symlink_to("/etc/passwd")
            with pytest.raises(ValueError, match="link is a link"):
                artifacts.commit(KEY, scratch, {})
        assert names(artifacts) == set()


class TestClaim:
    def test_is_held_by_one(self, artifacts: Artifacts) -> None:
        with artifacts.claim(KEY) as first:
            with artifacts.claim(KEY) as second, artifacts.claim(OTHER) as other:
                assert (first, second, other) == (True, False, True)
            with artifacts.claim(KEY) as third:
                assert not third
        with artifacts.claim(KEY) as again:
            assert again
        assert names(artifacts) == set()

    def test_is_held_by_one_of_many_threads(self, artifacts: Artifacts) -> None:
        """The lock's file is made and removed all the time: nobody may lock one that is gone."""
        inside: list[int] = []
        most = [0]

        def hammer(number: int) -> None:
            claimed = 0
            while claimed < 75:  # somebody always can
                with artifacts.claim(KEY) as is_mine:
                    if is_mine:
                        inside.append(number)
                        most[0] = max(most[0], len(inside))
                        claimed += 1
                        inside.remove(number)

        threads = [threading.Thread(target=hammer, args=(k,)) for k in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert most == [1] and names(artifacts) == set()

    def test_of_a_lock_file_that_was_replaced(
        self, artifacts: Artifacts, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Between opening and locking it, its holder removed it and another process made one anew."""
        path, flock = artifacts.root / f"{KEY}.lock", fcntl.flock
        with contextlib.ExitStack() as others:

            def lock_late(descriptor: int, how: int) -> None:
                monkeypatch.undo()
                path.unlink()
                assert others.enter_context(artifacts.claim(KEY))
                flock(descriptor, how)

            monkeypatch.setattr(fcntl, "flock", lock_late)
            with artifacts.claim(KEY) as is_mine:
                assert not is_mine

    def test_ends_with_its_process(self, artifacts: Artifacts) -> None:
        holder = child.start(
            """
            with artifacts.claim("a" * 64) as is_mine:
                print(is_mine, flush=True)
                time.sleep(1000)
            """,
            prelude=PRELUDE,
            ROOT=str(artifacts.root),
        )
        with holder:
            assert holder.stdout is not None and holder.stdout.readline() == "True\n"
            with artifacts.claim(KEY) as is_mine:
                assert not is_mine
            holder.send_signal(signal.SIGKILL)
            holder.wait()
            with artifacts.claim(KEY) as is_mine:
                assert is_mine

    def test_does_not_live_on_in_a_forked_child(self, artifacts: Artifacts) -> None:
        out, err = child.run(
            """
            ready, done = os.pipe(), os.pipe()
            with artifacts.claim("key"):
                pid = os.fork()
                if pid == 0:
                    os.write(ready[1], b"x")
                    os.read(done[0], 1)
                    os._exit(3)
                os.read(ready[0], 1)
            with artifacts.claim("key") as is_mine:
                print(is_mine)
            os.write(done[1], b"x")
            print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
            """,
            prelude=PRELUDE,
            ROOT=str(artifacts.root),
        )
        assert (out, err) == ("True\n3\n", "")

    def test_where_there_are_no_locks(
        self, artifacts: Artifacts, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def fail(descriptor: int, how: int) -> None:
            raise OSError(37, "No locks available")

        monkeypatch.setattr(fcntl, "flock", fail)
        with artifacts.claim(KEY) as is_mine:
            assert is_mine
        assert names(artifacts) == set()

    def test_a_root_that_cannot_be_written(self, tmp_path: Path) -> None:
        with pytest.raises(OSError), Artifacts(tmp_path / "nothing").claim(KEY):
            pass


class TestTrim:
    def test_the_longest_unused_go(self, artifacts: Artifacts) -> None:
        for key, days in (("old", 3), ("older", 4), ("oldest", 5), ("new", 0)):
            age(build(artifacts, key, size=10_000) / "manifest.json", days * DAY_S)
        assert artifacts.find("oldest") is not None  # and so it is used now
        assert artifacts.trim(100_000) == 0
        assert artifacts.trim(32_000) == 1
        assert names(artifacts) == {"old", "oldest", "new"}
        assert artifacts.trim(0) == 1
        assert names(artifacts) == {"oldest", "new"}  # used within the hour

    def test_the_compilers_own_files_count_and_go(self, artifacts: Artifacts) -> None:
        work = artifacts.root / WORK
        (work / "deep").mkdir(parents=True)
        for name, days in (("deep/headers.gch", 9), ("recent.cpp", 0)):
            (work / name).write_bytes(bytes(50_000))
            age(work / name, days * DAY_S)
        age(build(artifacts, size=1000) / "manifest.json", 2 * DAY_S)
        assert artifacts.trim(60_000) == 0
        assert not (work / "deep" / "headers.gch").exists() and artifacts.has(KEY)
        assert artifacts.trim(10_000) == 1
        assert names(artifacts) == {WORK} and (work / "recent.cpp").exists()

    def test_what_killed_processes_left_goes(self, artifacts: Artifacts) -> None:
        build(artifacts)
        (artifacts.root / f"{OTHER}.xyz.scratch").mkdir()
        (artifacts.root / f"{OTHER}.xyz.scratch" / "part.cpp").write_text("half a f")
        (artifacts.root / f"{OTHER}.1.removed").mkdir()
        (artifacts.root / f"{OTHER}.lock").write_text("")
        artifacts.sweep()
        assert names(artifacts) == {KEY}

    def test_what_is_being_built_stays(self, artifacts: Artifacts) -> None:
        """Also where several build the same key, and one is done before the other."""
        with artifacts.scratch(KEY) as slow:
            (slow / "built").mkdir()
            (slow / "built" / "program").write_text("first")
            build(artifacts)
            artifacts.trim(1_000_000)
            assert (slow / "built" / "program").exists()
            assert artifacts.commit(KEY, slow / "built", {}) == artifacts.root / KEY
        assert names(artifacts) == {KEY}

    def test_the_directory_of_a_killed_build_goes(self, artifacts: Artifacts) -> None:
        holder = child.start(
            """
            with artifacts.scratch("a" * 64):
                print("in", flush=True)
                time.sleep(1000)
            """,
            prelude=PRELUDE,
            ROOT=str(artifacts.root),
        )
        with holder:
            assert holder.stdout is not None and holder.stdout.readline() == "in\n"
            artifacts.sweep()
            assert len(names(artifacts)) == 2
            holder.send_signal(signal.SIGKILL)
            holder.wait()
        artifacts.sweep()
        assert names(artifacts) == set()
