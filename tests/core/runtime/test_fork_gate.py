"""While a fork waits for idle devices, other threads do not cut; jobs, and the thread that forks, do."""

import importlib
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from ltc_core.runtime import fork_gate
from ltc_core.runtime.worker import Job, Worker

has_begun, may_end = threading.Event(), threading.Event()


@pytest.fixture(autouse=True)
def closed(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(fork_gate, "_PATIENCE_S", 60.0)
    fork_gate.close()
    yield
    fork_gate.open()


def in_thread(passed: threading.Event) -> threading.Thread:
    def cut() -> None:
        fork_gate.pass_through()
        passed.set()

    thread = threading.Thread(target=cut)
    thread.start()
    return thread


def test_other_threads_wait_until_it_is_open() -> None:
    passed = threading.Event()
    thread = in_thread(passed)
    assert not passed.wait(0.2)
    fork_gate.open()
    thread.join()
    assert passed.is_set()


def test_a_cut_goes_on_when_its_patience_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fork_gate, "_PATIENCE_S", 0.01)
    passed = threading.Event()
    in_thread(passed).join()
    assert passed.is_set()


@pytest.fixture
def importing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Thread]:
    """A thread that is importing a module until `may_end` is set."""
    has_begun.clear()
    may_end.clear()
    sys.modules.pop("slow_to_import", None)
    (tmp_path / "slow_to_import.py").write_text(
        "import tests.core.runtime.test_fork_gate as test\n"
        "test.has_begun.set()\n"
        "assert test.may_end.wait(60)\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    importer = threading.Thread(target=importlib.import_module, args=("slow_to_import",))
    importer.start()
    assert has_begun.wait(60)
    yield importer
    may_end.set()
    importer.join()


def test_a_fork_waits_for_the_imports_of_other_threads(importing: threading.Thread) -> None:
    """What another thread is importing stays locked in the child."""
    threading.Timer(0.2, may_end.set).start()
    fork_gate.await_imports(60)
    assert may_end.is_set()
    importing.join()
    fork_gate.await_imports(60)


def test_an_import_that_does_not_end_is_waited_for_once(
    importing: threading.Thread, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As of a script whose module trains while it is imported."""
    monkeypatch.setattr(fork_gate, "_endless", set())
    started = time.monotonic()
    fork_gate.await_imports(0.2)
    waited = time.monotonic()
    assert waited - started >= 0.2
    fork_gate.await_imports(60)
    assert time.monotonic() - waited < 30


def test_jobs_and_the_thread_that_forks_pass() -> None:
    fork_gate.pass_through()
    worker = Worker("worker", 2)
    job = Job(fork_gate.pass_through)
    worker.submit(job)
    assert job.wait(60.0)
    worker.stop(60.0)
