"""The compile service and its process, in good weather and bad, with builders that need no compiler.

The service is in this process; test_compiler_process.py has it in others. The compiler's process imports no
PyTorch here (bare_package.py), so it starts quickly.
"""

import os
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from ltc_core import metrics
from ltc_core.executors.artifacts import Artifacts
from ltc_core.executors.inductor.compiler import service as module
from ltc_core.executors.inductor.compiler.service import CompileService, Outcome
from ltc_core.settings import settings
from tests.core.executors.inductor.fake_builder import BUILDER, LIBRARY, do_check, request
from tests.core.runtime.process_ends import WAIT_S, all_gone, pids_in

KEYS = [f"{k:02x}" * 32 for k in range(20)]


class Asker:
    """A service with one root, and the outcomes it gave, by key, in order."""

    def __init__(self, root: Path, builder: str) -> None:
        self.root = root
        self.service = CompileService(builder, root)
        self.outcomes: dict[str, Outcome] = {}

    def submit(self, key: str, do: str = "", urgent: bool = False, **more: Any) -> None:
        def done(outcome: Outcome) -> None:
            assert threading.current_thread().name == "ltc-compiler"
            self.outcomes[key] = outcome

        self.service.submit(key, request(do, **more), done, urgent)

    def ask(self, key: str, do: str = "", **more: Any) -> Outcome:
        self.submit(key, do, **more)
        assert self.service.wait_idle(WAIT_S)
        return self.outcomes[key]


@pytest.fixture(autouse=True)
def _share_of_the_cores() -> Iterator[None]:
    """At idle priority a test would last as long as anybody else computes."""
    with settings.override(compile_priority="normal"):
        yield


@pytest.fixture
def new_asker() -> Iterator[Callable[..., Asker]]:
    """Makes askers, whose services end with the test."""
    made: list[Asker] = []

    def make(root: Path, builder: str = BUILDER) -> Asker:
        made.append(Asker(root, builder))
        return made[-1]

    yield make
    for asker in made:
        asker.service.shutdown()


@pytest.fixture
def asker(tmp_path: Path, new_asker: Callable[..., Asker]) -> Asker:
    return new_asker(tmp_path / "cache" / "compiled")


def left_in(root: Path) -> set[str]:
    return {path.name for path in root.iterdir() if path.name != "work"}


class TestBuilding:
    def test_a_request_and_what_the_process_is_like(self, asker: Asker) -> None:
        with settings.override(compile_priority="idle"):
            outcome = asker.ask(KEYS[0], "describe")
        facts = outcome.facts
        assert outcome.problem == "" and not outcome.from_cache and outcome.seconds > 0
        assert outcome.path == asker.root / KEYS[0]
        assert (outcome.path / facts["library"]).read_bytes() == LIBRARY
        assert facts["policy"] == os.SCHED_IDLE or facts["nice"] == 19
        assert facts["group"] == facts["pid"] and facts["session"] == os.getsid(0)
        assert facts["oom"] == "1000" and facts["core"] == 0 and facts["threads"] == "1"
        assert facts["tmp"] and Path(facts["tmpdir"]).is_relative_to(asker.root)
        assert not Path(facts["tmpdir"]).exists() and not facts["torch"]
        assert Path(facts["inductor"]) == asker.root / "work" and facts["7"] == {"7": 8}

    @pytest.mark.parametrize("chosen_by", ["torch", "torch, before TMPDIR was set", "the user"])
    def test_whose_directory_the_compiler_keeps_its_files_in(
        self, asker: Asker, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, chosen_by: str
    ) -> None:
        """PyTorch exports a default of its own when a process first compiles; only the user's choice counts."""
        parents = {"torch": tempfile.gettempdir(), "the user": tmp_path}
        chosen = Path(parents.get(chosen_by, "/tmp")) / "torchinductor_somebody"
        monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(chosen))
        used = Path(asker.ask(KEYS[0], "describe").facts["inductor"])
        assert used == (chosen if chosen_by == "the user" else asker.root / "work")

    def test_one_process_for_many_requests(self, asker: Asker, tmp_path: Path) -> None:
        before = metrics.counter_value("PersistentCacheMiss") or 0
        told = []
        for key in KEYS[:3] * 2:
            payload = request(calls=tmp_path / "calls", more="x" * 3_000_000)
            asker.service.submit(key, payload, told.append)
        assert asker.service.wait_idle(WAIT_S)
        assert len(told) == 6 and {o.path for o in told} == {asker.root / key for key in KEYS[:3]}
        assert len({outcome.facts["pid"] for outcome in told}) == 1
        assert len((tmp_path / "calls").read_text().split()) == 3
        assert metrics.counter_value("PersistentCacheMiss") == before + 3
        assert left_in(asker.root) == set(KEYS[:3])

    def test_what_an_earlier_run_left_needs_no_process(
        self, asker: Asker, new_asker: Callable[..., Asker]
    ) -> None:
        first = asker.ask(KEYS[0])
        later = new_asker(asker.root, "no.such:builder")
        before = metrics.counter_value("PersistentCacheHit") or 0
        assert later.service.is_cached(KEYS[0]) and not later.service.is_cached(KEYS[1])
        outcome = later.ask(KEYS[0])
        assert outcome.from_cache and outcome.path == first.path and outcome.facts == first.facts
        assert later.service._process is None
        assert metrics.counter_value("PersistentCacheHit") == before + 1

    def test_urgent_ones_go_first(self, asker: Asker, tmp_path: Path) -> None:
        asker.submit(KEYS[0], "sleep", seconds=0.5, started=tmp_path / "started")
        pids_in(tmp_path / "started")
        for key in KEYS[1:4]:
            asker.submit(key)
        asker.submit(KEYS[4], urgent=True)
        asker.submit(KEYS[3], urgent=True)  # asked for again
        assert not asker.service.wait_idle(0) and asker.service.is_busy
        assert asker.service.wait_idle(WAIT_S) and not asker.service.is_busy
        assert list(asker.outcomes) == [KEYS[k] for k in (0, 3, 4, 1, 2)]

    def test_what_lasts_is_no_passing_load(
        self, asker: Asker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        asker.submit(KEYS[0], "sleep", seconds=0.5, started=tmp_path / "started")
        pids_in(tmp_path / "started")
        assert asker.service.is_busy
        monkeypatch.setattr(module, "_BRIEFLY_S", 0.0)
        assert not asker.service.is_busy and not asker.service.wait_idle(0)

    def test_what_builders_print_is_in_nobodys_way(
        self, asker: Asker, capfd: pytest.CaptureFixture[str]
    ) -> None:
        assert asker.ask(KEYS[0], "print").path is not None
        assert asker.ask(KEYS[1], "print").path is not None
        assert capfd.readouterr() == ("", "")

    def test_an_idle_process_ends(self, asker: Asker, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(module, "_IDLE_S", 0.05)
        first = asker.ask(KEYS[0]).facts["pid"]
        all_gone([first])
        assert asker.ask(KEYS[1]).facts["pid"] != first

    def test_a_fault_of_the_caller_is_said(
        self, asker: Asker, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        said: list[Any] = []
        monkeypatch.setattr(threading, "excepthook", said.append)
        asker.service.submit(KEYS[0], request(), lambda outcome: 1 // 0)  # type: ignore[arg-type,return-value]
        asker.submit(KEYS[0])
        assert asker.ask(KEYS[1]).path is not None and asker.outcomes[KEYS[0]].path is not None
        assert [hook.exc_type for hook in said] == [ZeroDivisionError]

    def test_a_fault_of_ours_is_an_outcome(
        self, asker: Asker, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        said: list[Any] = []
        monkeypatch.setattr(threading, "excepthook", said.append)

        def fail(self: Artifacts, path: Path) -> None:
            raise KeyError("facts")

        with monkeypatch.context() as patch:
            patch.setattr(Artifacts, "facts", fail)
            assert asker.ask(KEYS[0]).problem == "compiling failed (KeyError: 'facts')"
        assert asker.ask(KEYS[0]).path is not None
        assert [hook.exc_type for hook in said] == [KeyError]

    def test_users_who_wait_get_the_cores(self, asker: Asker) -> None:
        with settings.override(compile="sync", compile_priority="idle"):
            facts = asker.ask(KEYS[0], "describe").facts
        assert facts["policy"] == os.SCHED_OTHER and facts["nice"] == os.nice(0)

    def test_more_than_fits(self, asker: Asker, new_asker: Callable[..., Asker]) -> None:
        old = asker.ask(KEYS[0]).path
        assert old is not None
        os.utime(old / "manifest.json", (1, 1))
        with settings.override(compiled_cache_bytes=len(LIBRARY)):
            before = metrics.counter_value("EvictedArtifact") or 0
            path = new_asker(asker.root).ask(KEYS[1]).path
        assert metrics.counter_value("EvictedArtifact") == before + 1
        assert left_in(asker.root) == {KEYS[1]} and path is not None


_CHECK = f"assert not wanted (fake_builder.py:{do_check.__code__.co_firstlineno + 1})"
REFUSALS = {
    "check": (f"the compiler refuses it (AssertionError: {_CHECK})", {}),
    "check_within": (f"the compiler refuses it (AssertionError: {_CHECK})", {}),
    "raise": (
        "the compiler refuses it (NotImplementedError: no rule)",
        {"text": "no rule.\n  at x"},
    ),
    "raise_of_compiler": (
        "the compiler refuses it (x.cpp:3:1: fatal error: omp.h: No such file)",
        {},
    ),
    "sys_exit": ("the compiler refuses it (SystemExit: leaving)", {}),
    "link": ("the compiler refuses it (ValueError: link is a link)", {}),
    "raise_with_op": ("the compiler refuses it (aten::odd: it is odd)", {}),
}
CRASHES = {
    "segv": "the compiler crashed (SIGSEGV; about to read nothing)",
    "abort": "the compiler crashed (SIGABRT; what():  index out of range)",
    "kill": "the compiler was killed (SIGKILL; most likely memory ran out)",
    "os_exit": "the compiler ended without an answer (exit code 3)",
}


class TestCompilersThatFail:
    def test_refusals_leave_the_process_alone(
        self, asker: Asker, capfd: pytest.CaptureFixture[str]
    ) -> None:
        for key, (do, (sentence, more)) in zip(KEYS, REFUSALS.items(), strict=False):
            outcome = asker.ask(key, do, **more)
            assert (outcome.path, outcome.problem) == (None, sentence)
            assert outcome.op == ("aten::odd" if do == "raise_with_op" else "")
        process = asker.service._process
        assert asker.ask(KEYS[10]).path is not None and asker.service._process is process
        assert capfd.readouterr() == ("", "") and left_in(asker.root) == {KEYS[10]}

    def test_crashes_end_one_request(self, asker: Asker, capfd: pytest.CaptureFixture[str]) -> None:
        for key, (do, sentence) in zip(KEYS, CRASHES.items(), strict=False):
            outcome = asker.ask(key, do)
            assert (outcome.path, outcome.problem, outcome.is_dropped) == (None, sentence, False)
            assert asker.service.available() != sentence
        assert asker.ask(KEYS[10]).path is not None
        assert capfd.readouterr() == ("", "") and left_in(asker.root) == {KEYS[10]}

    def test_a_crash_takes_along_what_the_compiler_started(
        self, asker: Asker, tmp_path: Path
    ) -> None:
        outcome = asker.ask(KEYS[0], "segv_with_child", started=tmp_path / "started")
        assert outcome.problem.startswith("the compiler crashed (SIGSEGV")
        all_gone(pids_in(tmp_path / "started"))

    def test_one_that_hangs(self, asker: Asker, tmp_path: Path) -> None:
        with settings.override(compile_timeout_s=1.0):
            outcome = asker.ask(KEYS[0], "sleep_with_child", started=tmp_path / "started")
        assert outcome.problem == "the compiler was not done after 1 s (LTC_COMPILE_TIMEOUT_S)"
        all_gone(pids_in(tmp_path / "started"))
        assert asker.ask(KEYS[1]).path is not None
        assert left_in(asker.root) == {KEYS[1]}

    def test_one_that_computes_for_ever(self, asker: Asker) -> None:
        with settings.override(compile_timeout_s=1.0):
            outcome = asker.ask(KEYS[0], "compute", processor_s=1000, naps_s=0)
        assert outcome.problem == "the compiler was not done after 1 s (LTC_COMPILE_TIMEOUT_S)"

    def test_one_that_gets_little_of_the_cores_is_waited_for(self, asker: Asker) -> None:
        with settings.override(compile_timeout_s=1.0):
            outcome = asker.ask(KEYS[0], "compute", processor_s=0.4, naps_s=3)
        assert outcome.problem == "" and outcome.path is not None and outcome.seconds > 3

    def test_one_that_cannot_be_imported(
        self, tmp_path: Path, new_asker: Callable[..., Asker]
    ) -> None:
        asker = new_asker(tmp_path / "root", "no.such.module:build")
        sentence = "the compiler cannot be started (ModuleNotFoundError: No module named 'no')"
        assert asker.ask(KEYS[0]).problem == sentence == asker.service.available()
        assert asker.service._process is not None and not asker.service._process.is_running
        assert asker.ask(KEYS[1]).problem == sentence
        assert not asker.service._process.is_running  # not tried again

    @pytest.mark.parametrize(
        ("executable", "reason"), [("/nonexistent/python", "No such file"), ("/bin/false", "exit code 1")]
    )  # fmt: skip
    def test_a_python_that_does_not_start(
        self, asker: Asker, monkeypatch: pytest.MonkeyPatch, executable: str, reason: str
    ) -> None:
        monkeypatch.setattr(sys, "executable", executable)
        problem = asker.ask(KEYS[0]).problem
        assert problem.startswith("the compiler cannot be started (") and reason in problem
        assert asker.service.available() == problem

    def test_no_python_and_no_compiler_are_reasons(
        self, asker: Asker, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
    ) -> None:
        monkeypatch.setenv("CXX", sys.executable)
        assert asker.service.available() == ""
        monkeypatch.setenv("CXX", "/nonexistent/g++")
        assert (
            asker.service.available() == "there is no C++ compiler (CXX names '/nonexistent/g++')"
        )
        monkeypatch.setenv("CXX", "")
        monkeypatch.setenv("PATH", str(tmp_path))
        assert asker.service.available() == "there is no C++ compiler (no g++ on the PATH)"
        monkeypatch.setattr(sys, "executable", "")
        assert "this Python cannot be started again" in asker.service.available()

    def test_what_it_printed_is_kept_for_those_who_debug(self, asker: Asker) -> None:
        with settings.override(debug=2):
            refused = asker.ask(KEYS[0], "raise", text="mine").problem
            crashed = asker.ask(KEYS[1], "segv").problem
        for problem, words in ((refused, "in do_raise"), (crashed, "in do_segv")):
            _, _, path = problem.partition("; what it printed is in ")
            assert words in Path(path).read_text()


class TestDisks:
    def test_a_damaged_artifact_is_built_again(self, asker: Asker, tmp_path: Path) -> None:
        path = asker.ask(KEYS[0], calls=tmp_path / "calls").path
        assert path is not None
        os.truncate(path / "model.so", 100)
        outcome = asker.ask(KEYS[0], calls=tmp_path / "calls")
        assert outcome.path == path and not outcome.from_cache
        assert (path / "model.so").read_bytes() == LIBRARY
        assert len((tmp_path / "calls").read_text().split()) == 2

    @pytest.mark.parametrize("kind", ["a file in its place", "others may write", "read-only"])
    def test_a_root_that_cannot_be_used(
        self,
        tmp_path: Path,
        new_asker: Callable[..., Asker],
        capfd: pytest.CaptureFixture[str],
        kind: str,
    ) -> None:
        """It is said once, and compiled programs go to a directory that ends with the process."""
        root = tmp_path / "root" / "compiled"
        reason = "File exists"
        if kind == "a file in its place":
            root.parent.write_text("")
        elif kind == "others may write":
            reason = "can be written by other users"
            root.mkdir(parents=True)
            root.chmod(0o777)
            (root / KEYS[0]).mkdir()  # not ours: must not be looked at
        else:
            reason = "No such file or directory"
            root = Path("/proc/ltc/compiled")  # where root, too, makes nothing
        asker = new_asker(root)
        outcomes = [asker.ask(key) for key in KEYS[:2]]
        assert outcomes[0].path is not None and outcomes[1].path is not None
        assert not outcomes[0].path.is_relative_to(root)
        [line] = capfd.readouterr().err.splitlines()
        assert f"cannot be kept in {root}, " in line and reason in line and "LTC_CACHE_DIR" in line
        asker.service.shutdown()
        assert not outcomes[0].path.parent.exists()

    def test_a_root_that_is_only_read(
        self,
        asker: Asker,
        new_asker: Callable[..., Asker],
        capfd: pytest.CaptureFixture[str],
    ) -> None:
        """What is there is found, and stays as it is; what is new ends with the process."""
        path = asker.ask(KEYS[0]).path
        assert path is not None
        with settings.override(compiled_cache_read_only=True):
            reader = new_asker(asker.root)
            found, built = reader.ask(KEYS[0]), reader.ask(KEYS[1])
            assert found.from_cache and found.path == path
            assert built.path is not None and not built.path.is_relative_to(asker.root)
            os.truncate(path / "model.so", 100)
            again = new_asker(asker.root).ask(KEYS[0])
            assert again.path is not None and not again.path.is_relative_to(asker.root)
            assert left_in(asker.root) == {KEYS[0]} and (path / "model.so").stat().st_size == 100
            assert capfd.readouterr().err == ""
            asker.root.chmod(0o777)
            assert new_asker(asker.root).ask(KEYS[2]).path is not None
            assert "can be written by other users" in capfd.readouterr().err

    @pytest.mark.parametrize("when", ["build", "compiler", "commit"])
    def test_a_full_disk(self, asker: Asker, capfd: pytest.CaptureFixture[str], when: str) -> None:
        first = asker.ask(KEYS[0])
        outcome = asker.ask(KEYS[1], "full_disk", where=asker.root, when=when)
        assert outcome.path is not None and not outcome.path.is_relative_to(asker.root)
        assert asker.ask(KEYS[2]).path == outcome.path.parent / KEYS[2]
        assert asker.ask(KEYS[0]).path == first.path  # what is on the full disk is still found
        [line] = capfd.readouterr().err.splitlines()
        assert "No space left on device" in line and "Next: make room there" in line
        assert left_in(asker.root) == {KEYS[0]}

    def test_no_room_anywhere(self, asker: Asker, capfd: pytest.CaptureFixture[str]) -> None:
        for key in KEYS[:2]:
            outcome = asker.ask(key, "full_disk", where="/", when="build")
            assert outcome.path is None and outcome.problem == (
                "the compiled program cannot be kept (OSError: [Errno 28] No space left on device)"
            )
        assert len(capfd.readouterr().err.splitlines()) == 1

    def test_another_process_builds_for_ever(self, asker: Asker) -> None:
        """Its key is put off; others are served meanwhile; in the end it is given up, for a step waits for it."""
        place = Artifacts(asker.root)
        place.prepare()
        sync = settings.override(compile="sync", compile_timeout_s=1.0)
        with sync, place.claim(KEYS[0]):
            asker.submit(KEYS[0])
            asker.submit(KEYS[1])
            assert asker.service.wait_idle(WAIT_S)
        assert list(asker.outcomes) == [KEYS[1], KEYS[0]]
        assert asker.outcomes[KEYS[1]].path is not None
        problem = asker.outcomes[KEYS[0]].problem
        assert problem == "another process was not done compiling it after 1 s"

    def test_another_process_builds_for_long_and_no_step_waits(self, asker: Asker) -> None:
        place = Artifacts(asker.root)
        place.prepare()
        with settings.override(compile="async", compile_timeout_s=1.0):
            with place.claim(KEYS[0]):
                asker.submit(KEYS[0])
                assert not asker.service.wait_idle(2.0)
            assert asker.service.wait_idle(WAIT_S)
        assert asker.outcomes[KEYS[0]].path is not None


class TestShutdown:
    def test_kills_at_once_and_drops_the_rest(self, asker: Asker, tmp_path: Path) -> None:
        asker.submit(KEYS[0], "sleep_with_child", started=tmp_path / "started")
        asker.submit(KEYS[1])
        pids = pids_in(tmp_path / "started")
        asker.service.shutdown()
        all_gone(pids)
        assert all(asker.outcomes[key].is_dropped for key in KEYS[:2])
        assert left_in(asker.root) == set() and asker.service.wait_idle(0)
        late: list[Outcome] = []
        asker.service.submit(KEYS[2], request(), late.append)
        assert late == [Outcome()] and late[0].is_dropped

    def test_at_any_moment(self, tmp_path: Path, new_asker: Callable[..., Asker]) -> None:
        """Before, while and after the process starts."""
        for delay_ms in (0, 1, 2, 5, 10, 30, 60, 90, 150):
            asker = new_asker(tmp_path / "root")
            asker.submit(KEYS[0], "sleep", seconds=1000, started=tmp_path / "started")
            time.sleep(delay_ms / 1000)
            asker.service.shutdown()
            assert asker.outcomes[KEYS[0]].is_dropped
            assert asker.service._process is None or not asker.service._process.is_running
        assert left_in(tmp_path / "root") == set()

    def test_of_a_service_that_did_nothing(
        self, tmp_path: Path, new_asker: Callable[..., Asker]
    ) -> None:
        service = new_asker(tmp_path / "root").service
        service.shutdown()
        assert not (tmp_path / "root").exists()
