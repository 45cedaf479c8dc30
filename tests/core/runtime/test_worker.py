"""The worker: jobs in order, in one thread, at most so many waiting; it outlives what its jobs raise.

If its thread cannot start, steps run in the thread that cuts, and the next step tries again.
"""

import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

import ltc_core as ltc
from ltc_core import errors
from ltc_core.runtime.devices import context
from ltc_core.runtime.worker import Job, Worker
from tests.core.counting import Counting

NAME = "worker-under-test"


@pytest.fixture
def worker() -> Iterator[Worker]:
    made = Worker(NAME, 2)
    yield made
    assert made.stop(10)


def held(worker: Worker) -> tuple[threading.Event, threading.Event]:
    """Keep the worker busy: gives (begun, let it go)."""
    begun, go = threading.Event(), threading.Event()

    def run() -> None:
        begun.set()
        assert go.wait(10)

    worker.submit(Job(run))
    assert begun.wait(10)
    return begun, go


def in_thread(call: Callable[[], Any]) -> tuple[threading.Thread, threading.Event]:
    returned = threading.Event()

    def run() -> None:
        call()
        returned.set()

    thread = threading.Thread(target=run)
    thread.start()
    return thread, returned


def test_a_job_runs_once_and_can_be_waited_for() -> None:
    ran: list[int] = []
    job = Job(lambda: ran.append(1))
    assert not job.is_done and not job.wait(0.01)
    job.execute()
    assert job.is_done and job.wait() and ran == [1]
    job.execute()
    assert ran == [1]


def test_a_job_lets_go_of_what_it_held() -> None:
    class Data:
        pass

    data = Data()
    job = Job(lambda data=data: None)  # type: ignore[misc]
    ref = weakref.ref(data)
    del data
    assert ref() is not None
    job.execute()
    assert ref() is None


def test_jobs_run_in_order_in_one_thread_of_that_name(worker: Worker) -> None:
    ran: list[tuple[int, str, int]] = []

    def note(i: int) -> None:
        ran.append((i, threading.current_thread().name, threading.get_ident()))

    jobs = [Job(lambda i=i: note(i)) for i in range(20)]  # type: ignore[misc]
    for job in jobs:
        worker.submit(job)
    assert worker.drain(10) and all(job.is_done for job in jobs)
    assert [i for i, _, _ in ran] == list(range(20))
    assert {name for _, name, _ in ran} == {NAME}
    assert len({ident for _, _, ident in ran}) == 1 and threading.get_ident() not in {
        ident for _, _, ident in ran
    }


def test_the_thread_begins_with_the_first_job() -> None:
    seen: list[str] = []
    worker = Worker(NAME, 2)
    assert NAME not in {t.name for t in threading.enumerate()}
    worker.submit(Job(lambda: seen.append("job")))
    assert worker.stop(10)
    assert seen == ["job"]


def test_idle_is_when_the_last_job_is_done(worker: Worker) -> None:
    assert worker.is_idle and worker.drain(0)
    _, go = held(worker)
    assert not worker.is_idle and not worker.drain(0.01)
    go.set()
    assert worker.drain(10) and worker.is_idle


def test_handing_over_does_not_wait_for_a_place(worker: Worker) -> None:
    """Who hands over may hold a lock that a job needs to end."""
    _, go = held(worker)
    for _ in range(3):  # the limit is two
        worker.submit(Job(lambda: None))
    assert worker.is_full
    go.set()
    assert worker.drain(10)


def test_a_place_can_be_waited_for_without_taking_it(worker: Worker) -> None:
    worker.wait_for_slot()
    worker.wait_for_slot()
    worker.wait_for_slot()  # none of them took one
    _, go = held(worker)
    worker.submit(Job(lambda: None))
    thread, returned = in_thread(worker.wait_for_slot)
    assert not returned.wait(0.1)
    go.set()
    assert returned.wait(10)
    thread.join()


@pytest.mark.parametrize("kind", [ValueError, SystemExit, KeyboardInterrupt])
@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_job_that_raises_does_not_end_the_worker(
    worker: Worker, kind: type[BaseException]
) -> None:
    """Jobs must not raise; one that does must not leave everybody waiting for ever."""

    def fail() -> None:
        raise kind("what a job must not do")

    ran = threading.Event()
    for _ in range(3):  # more than there are places
        failing = Job(fail)
        worker.submit(failing)
        assert failing.wait(5)
    worker.submit(Job(ran.set))
    assert ran.wait(10) and worker.drain(10)


def test_stop_finishes_what_is_queued(worker: Worker) -> None:
    ran: list[int] = []
    _, go = held(worker)
    worker.submit(Job(lambda: ran.append(1)))
    thread, stopped = in_thread(lambda: worker.stop(10))
    go.set()
    assert stopped.wait(10)
    thread.join()
    assert ran == [1] and NAME not in {t.name for t in threading.enumerate()}


def test_stop_says_if_that_takes_too_long(worker: Worker) -> None:
    _, go = held(worker)
    [thread] = [t for t in threading.enumerate() if t.name == NAME]
    assert not worker.stop(0.05)
    go.set()
    thread.join(10)
    assert not thread.is_alive()


def test_a_stopped_worker_begins_again(worker: Worker) -> None:
    ran: list[int] = []
    for i in range(3):
        worker.submit(Job(lambda i=i: ran.append(i)))  # type: ignore[misc]
        assert worker.stop(10)
    assert ran == [0, 1, 2] and worker.stop(0)


def test_after_a_fork_nobody_waits_for_what_was_not_done(worker: Worker) -> None:
    dropped: list[int] = []
    _, go = held(worker)
    job = Job(lambda: None, lambda: dropped.append(0))
    worker.submit(job)
    [old] = [t for t in threading.enumerate() if t.name == NAME]
    queue = worker._queue
    worker.after_fork()
    assert job.wait(0) and dropped == [0] and worker.is_idle
    go.set()  # here, unlike in a child, the old thread lives
    queue.put(None)
    old.join(10)
    assert not old.is_alive() and dropped == [0]


def test_a_job_does_not_wait_for_itself(worker: Worker) -> None:
    drained: list[bool] = []
    job = Job(lambda: drained.append(worker.drain(5)))
    worker.submit(job)
    assert job.wait(10) and drained == [True]


def test_after_a_fork_it_is_as_new(worker: Worker) -> None:
    """What the child does: its thread is gone though the worker still knows it, and its places are taken."""
    _, go = held(worker)
    worker.submit(Job(lambda: None))
    [old] = [t for t in threading.enumerate() if t.name == NAME]
    queue = worker._queue
    worker.after_fork()
    assert worker.is_idle
    ran = threading.Event()
    worker.submit(Job(ran.set))
    assert ran.wait(10)
    # Here, unlike in a child, the old thread lives: two have to be ended.
    go.set()
    queue.put(None)
    assert worker.stop(10)
    old.join(10)
    assert not old.is_alive()


def refuse_threads(monkeypatch: pytest.MonkeyPatch, name: str, times: int) -> list[str]:
    """Refuse the next `times` starts of threads of this name; gives the refusals as they come."""
    refused: list[str] = []
    start = threading.Thread.start

    def refusing(thread: threading.Thread) -> None:
        if thread.name == name and len(refused) < times:
            refused.append(name)
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", refusing)
    return refused


def test_a_thread_that_cannot_start_is_started_by_a_later_job(
    worker: Worker, monkeypatch: pytest.MonkeyPatch
) -> None:
    refuse_threads(monkeypatch, NAME, 3)
    ran: list[int] = []
    lost = Job(lambda: ran.append(-1))
    for _ in range(2):  # as many as there are places
        with pytest.raises(RuntimeError, match="can't start new thread"):
            worker.submit(lost)
    assert not worker.start()
    assert worker.is_idle and worker.drain(0) and worker.stop(0)
    jobs = [Job(lambda i=i: ran.append(i)) for i in range(3)]  # type: ignore[misc]
    for job in jobs:
        worker.submit(job)
        assert job.wait(5)
    assert ran == [0, 1, 2] and not lost.is_done


@pytest.fixture
def stopped() -> Worker:
    """The worker of the device, whose thread is not running."""
    ltc.wait_device_ops()
    found = context(ltc.lazy_device().index).worker
    assert found.stop(10)
    return found


def test_a_step_without_a_worker_thread_runs_where_it_is_cut(
    stopped: Worker, monkeypatch: pytest.MonkeyPatch
) -> None:
    w = torch.ones(37, 3).to(ltc.lazy_device())
    refused = refuse_threads(monkeypatch, stopped._name, 2)
    with Counting() as counting:
        for _ in range(4):  # a later step gets a thread
            w.mul_(2).add_(1)
            ltc.mark_step()
        ltc.wait_device_ops()
    assert torch.equal(w.cpu(), torch.full((37, 3), 31.0))
    # A thread is asked for by the first step; by the second one if the first has taken long, or left an OpenMP team.
    assert 1 <= len(refused) <= 2
    assert counting.so_far()["WorkerNotStarted"] >= 1


def test_a_step_that_no_thread_can_run_is_lost_and_says_so(
    stopped: Worker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As one that blocks on other processes, of which only the worker can run the rest."""
    w, other = (torch.ones(41, 3).to(ltc.lazy_device()) for _ in range(2))
    with monkeypatch.context() as patch:
        patch.setattr(stopped, "start", lambda: True)
        refuse_threads(patch, stopped._name, 1)
        w.mul_(2)
        with pytest.raises(
            errors.LtcError, match="not handed over on .*can't start new thread"
        ) as e:
            ltc.mark_step()
    assert isinstance(e.value, RuntimeError)
    assert "Python threads in this process" in str(e.value) and "ulimit -u" in str(e.value)
    with pytest.raises(RuntimeError, match="can't start new thread"):
        w.cpu()
    ltc.mark_step(wait=True)
    assert torch.equal((other + 1).cpu(), torch.full((41, 3), 2.0))


def test_an_idle_worker_ends_also_without_time() -> None:
    """A thread that is about to end must not be parked: it waits for the GIL, which others need at exit."""
    for number in range(50):
        worker = Worker(f"ltc-test-{number}", limit=4)
        worker.submit(Job(lambda: None))
        assert worker.drain(60) and worker.stop(0.0)


class _UntilNeeded(Job):
    """A job that goes on until the worker is needed."""

    def __init__(self) -> None:
        self._needed = threading.Event()
        super().__init__(self._needed.wait)  # type: ignore[arg-type]

    def let_end(self) -> None:
        self._needed.set()


@pytest.mark.parametrize("how", ["submit", "drain", "wait_for_slot", "stop"])
def test_a_job_that_goes_on_until_the_worker_is_needed(how: str) -> None:
    worker = Worker("test", limit=1)
    job = _UntilNeeded()
    worker.submit(job)
    assert not job.wait(0.05)
    if how == "submit":
        worker.submit(Job(lambda: None))
    elif how == "stop":
        assert worker.stop(5)
    else:
        getattr(worker, how)()
    assert job.wait(5)
    assert worker.stop(5)
