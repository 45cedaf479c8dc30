"""`torch_xla.utils.closures`: calls made one after the other, beside the training loop.

Step closures of `mark_step` have their own thread in `ltc_core.api.closures`; handlers of this file belong to a script.
"""

from __future__ import annotations

import abc
import queue
import sys
import threading
import weakref
from collections.abc import Callable, Iterable
from typing import Any

from ltc_core.errors import ExecutionError
from ltc_core.settings import settings

__all__ = ["AsyncClosureHandler", "ClosureHandler"]

Closure = Callable[[], Any]


class ClosureHandler(abc.ABC):
    """Calls closures, in its own way."""

    @abc.abstractmethod
    def run(self, closure: Closure) -> None:
        """Call a closure, now or later."""

    def run_all(self, closures: Iterable[Closure]) -> None:
        """Call the closures in order."""
        for closure in closures:
            self.run(closure)


class AsyncClosureHandler(ClosureHandler):
    """Calls closures in order in a thread that lives while there are any. The interpreter's exit waits for them.

    Args:
        max_queue_size: closures that may wait; one more blocks `run`. Default: LTC_MAX_ASYNC_QUEUE, 100.
    """

    def __init__(self, max_queue_size: int | None = None) -> None:
        limit = settings.max_async_queue if max_queue_size is None else max_queue_size
        self._places = threading.Semaphore(limit) if limit > 0 else None
        self._closures: queue.SimpleQueue[tuple[Closure, bool]] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._errors: list[Exception] = []
        weakref.finalize(self, _tell, self._errors)

    def run(self, closure: Closure) -> None:
        """Queue a closure.

        Raises:
            ExecutionError: one of those before raised; chained to what it raised. `closure` is not called.
        """
        if self._errors:
            error = self._errors[0]
            self._errors.clear()
            raise ExecutionError(
                "Cannot run asynchronous closure due to previously raised exception",
                got=f"{type(error).__name__}: {error}",
                next="look at the closure that was handed over before",
            ) from error
        # A closure that waits for room in the queue would wait for itself.
        waits = self._places is not None and threading.current_thread() is not self._thread
        if self._places is not None and waits:
            self._places.acquire()
        self._closures.put((closure, waits))
        self.start_event_loop()

    def start_event_loop(self) -> None:
        """Start the thread, unless it runs or nothing waits for it."""
        with self._lock:
            is_running = self._thread is not None and self._thread.is_alive()
            if not is_running and not self._closures.empty():
                self._thread = threading.Thread(target=self._loop, name="closures")
                self._thread.start()

    def _loop(self) -> None:
        while True:
            with self._lock:
                try:
                    closure, has_place = self._closures.get_nowait()
                except queue.Empty:
                    self._thread = None
                    return
            if self._places is not None and has_place:
                self._places.release()
            try:
                closure()
            except Exception as error:  # raised by the next `run`
                self._errors.append(error)
            finally:
                del closure


def _tell(errors: list[Exception]) -> None:
    if errors:
        print(
            f"ltc: a closure raised, and nobody was told before the end: {type(errors[0]).__name__}: {errors[0]}",
            file=sys.stderr,
        )
