"""While a fork waits for idle devices, other threads do not cut; jobs, and the thread that forks, do."""

import threading
from collections.abc import Iterator

import pytest

from ltc_core.runtime import fork_gate
from ltc_core.runtime.worker import Job, Worker


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


def test_jobs_and_the_thread_that_forks_pass() -> None:
    fork_gate.pass_through()
    worker = Worker("worker", 2)
    job = Job(fork_gate.pass_through)
    worker.submit(job)
    assert job.wait(60.0)
    worker.stop(60.0)
