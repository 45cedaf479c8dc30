"""The worker of one device: a thread that runs jobs in the order they were handed over.

`Job.wait` blocks until a job is done. A job may go on until the worker is needed: `Job.let_end` tells it so. The thread
starts with the first job; after a fork the child starts its own. Nothing here knows what a job does.

Where the main thread waits, a signal handler may run that waits too. So it waits in C, for a lock or a queue, and holds
nothing meanwhile; an event or a semaphore of `threading` holds a lock of its own, which the handler would wait for.
"""

from __future__ import annotations

import contextlib
import ctypes
import queue
import signal
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator

from ltc_core.executors import core_sharing
from ltc_core.timeline import slices

__all__ = ["Job", "Worker", "held_up", "is_worker"]

# A wait looks this often whether its job is done: the waiter that was to pass the lock on may have been interrupted.
_LOOK_S = 1.0
_TO_THE_NEXT_WAIT_S = 0.02
_CANNOT_START = (RuntimeError, MemoryError)  # what `Thread.start` raises if there is no new thread


_this_thread = threading.local()


def is_worker() -> bool:
    """Whether this is the thread of a worker: what it does is a part of a job."""
    return hasattr(_this_thread, "worker")


@contextlib.contextmanager
def held_up() -> Iterator[None]:
    """Mark the calling worker while it waits for other threads of this process: one of them may fork first."""
    worker = getattr(_this_thread, "worker", None)
    if worker is None:
        yield
        return
    worker.is_held_up = True
    try:
        yield
    finally:
        worker.is_held_up = False


class Job:
    """One call for a worker. `run` must not raise; it stores errors where they are raised later.

    `drop` is called instead in a forked child, if the job was not done at the fork.
    """

    __slots__ = ("_done", "_drop", "_is_done", "_run", "_waiting")

    def __init__(self, run: Callable[[], None], drop: Callable[[], None] | None = None) -> None:
        self._run: Callable[[], None] | None = run
        self._drop = drop
        self._is_done = False
        self._waiting: list[None] = []  # one for each thread that waits, and needs no core
        self._done = threading.Lock()  # free once the job is done
        self._done.acquire()

    def wait(self, timeout_s: float | None = None) -> bool:
        """Wait until the job is done; False if that took longer than the time given. Raises what a handler raises."""
        if self._is_done:
            return True
        end = None if timeout_s is None else time.monotonic() + timeout_s
        try:
            core_sharing.begin_wait(self._waiting)
            while not self._is_done:
                rest = _LOOK_S if end is None else min(_LOOK_S, end - time.monotonic())
                if rest <= 0:
                    return False
                if self._done.acquire(timeout=rest):
                    self._done.release()
        finally:
            core_sharing.end_wait(self._waiting)
        return True

    @property
    def is_done(self) -> bool:
        return self._is_done

    def _mark_done(self) -> None:
        if not self._is_done:
            self._is_done = True
            core_sharing.wake(self._waiting)
            self._done.release()

    def let_end(self) -> None:
        """Somebody is going to wait for the worker, or has more for it to do: end, if the job can."""

    def drop(self) -> None:
        """Fail the waiting jobs in a forked child, where the worker's thread is gone."""
        drop, self._run, self._drop = self._drop, None, None
        if drop is not None:
            drop()
        self._mark_done()

    def cancel(self) -> None:
        """Mark the job as done without running it; the caller has resolved its outputs."""
        self._run = self._drop = None
        self._mark_done()

    def execute(self) -> None:
        run, self._run = self._run, None
        try:
            if run is not None:
                run()
        finally:
            self._drop = None  # there may be a fork while it runs
            self._mark_done()


class Worker:
    """Runs jobs one after the other in a thread of its own.

    Args:
        name: of the thread.
        limit: number of jobs in the queue at which it is full.
        begin: called first in the thread.
    """

    def __init__(self, name: str, limit: int, begin: Callable[[], None] = lambda: None) -> None:
        self._name = name
        self._limit = limit
        self._begin = begin
        self._unfinished: deque[Job] = deque()
        self.after_fork()

    def after_fork(self) -> None:
        """Reset in a forked child, which has no worker thread: unfinished jobs are dropped."""
        unfinished, self._unfinished = self._unfinished, deque()
        for job in unfinished:
            job.drop()
        self._lock = threading.Lock()
        self._queue: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
        self._last: Job | None = None
        self._thread: threading.Thread | None = None
        self._stopping: threading.Thread | None = None
        self.is_held_up = False

    @property
    def is_this_thread(self) -> bool:
        """Whether the caller runs in the worker's thread: it must not wait for the worker."""
        return self._thread is not None and getattr(_this_thread, "worker", None) is self

    @property
    def is_idle(self) -> bool:
        last = self._last
        return last is None or last.is_done

    @property
    def num_unfinished(self) -> int:
        """Jobs that were handed over and are not done, the running one included."""
        return len(self._unfinished)

    @property
    def is_full(self) -> bool:
        return len(self._unfinished) >= self._limit

    def wait_for_slot(self) -> None:
        """Block while the queue is full. Each of several threads that have waited may submit a job then.

        It waits for a job and takes nothing: an interrupt at any point leaves the queue as it is.
        """
        jobs = list(self._unfinished)
        if len(jobs) >= self._limit:
            jobs[-self._limit].let_end()
            jobs[-self._limit].wait()

    def start(self) -> bool:
        """Start the thread if it does not run; False if the system gives no more threads."""
        if self._thread is not None:  # each cut asks
            return True
        with self._lock:
            try:
                self._start_thread()
            except _CANNOT_START:
                return False
            return True

    def submit(self, job: Job) -> None:
        """Queue a job, and start the thread if it does not run. Does not wait for a slot: the caller may hold a lock.

        Raises:
            RuntimeError, MemoryError: the thread could not be started; the job was not queued, and the next one
                tries again.
        """
        with self._lock:
            self._start_thread()
            if self._last is not None:
                self._last.let_end()
            self._last = job
            self._unfinished.append(job)
            self._queue.put(job)
        self._note_queue()

    def _note_queue(self) -> None:
        if slices.on is not None:
            slices.on.note_counter(f"{self._name} queue", len(self._unfinished))

    def _start_thread(self) -> None:
        if self._thread is not None:
            return
        self._thread = threading.Thread(target=self._loop, name=self._name, daemon=True)
        try:
            self._thread.start()
        except _CANNOT_START:  # after any other exception, an interrupt, the thread does run
            self._thread = None
            raise

    def _loop(self) -> None:
        _this_thread.worker = self
        self._begin()
        jobs, unfinished = self._queue, self._unfinished
        while True:
            job = jobs.get()
            if job is None:
                return
            try:
                job.execute()
            except (
                BaseException
            ):  # a bug of ours: report it and go on, else all waits would last for ever
                threading.excepthook(
                    threading.ExceptHookArgs((*sys.exc_info(), threading.current_thread()))
                )
            finally:
                unfinished.popleft()
            self._note_queue()
            del job

    def park(self) -> None:
        """Stop the thread for ever inside an op, so that the interpreter can exit.

        CPython unwinds a daemon thread that takes the GIL at exit, and PyTorch then aborts the process. A signal
        handler that never returns keeps the thread from taking it. Call this only at exit.

        A thread that waits for the GIL must not be stopped there: those that take it afterwards would wait for ever. So
        it gets the GIL first, and goes on to its next wait or into an op.
        """
        if self._stopping is None or self._stopping.ident is None:
            return
        self._stopping.join(_TO_THE_NEXT_WAIT_S)
        if not self._stopping.is_alive():
            return
        libc = ctypes.CDLL(None)
        libc.signal.argtypes = [ctypes.c_int, ctypes.c_void_p]
        number = signal.SIGRTMIN + 7
        libc.signal(number, ctypes.cast(libc.pause, ctypes.c_void_p))
        signal.pthread_kill(self._stopping.ident, number)

    def drain(self, timeout_s: float | None = None) -> bool:
        """Wait for all jobs handed over so far; False if that took longer than the time given.

        A job does not wait for itself.
        """
        if self.is_this_thread:
            return True
        last = self._last
        if last is None:
            return True
        last.let_end()
        return last.wait(timeout_s)

    def stop(self, timeout_s: float) -> bool:
        """Finish what is queued and end the thread; False if that took longer than the time given.

        A thread that has nothing to do ends at once, and is waited for also without any time.
        """
        with self._lock:
            if self._last is not None:
                self._last.let_end()
            thread, self._thread = self._thread, None
            self._stopping = thread
        if thread is None:
            return True
        self._queue.put(None)
        thread.join(timeout_s if self._unfinished else max(timeout_s, _LOOK_S))
        return not thread.is_alive()
