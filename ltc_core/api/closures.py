"""Step closures: functions of a script that run with a step's values after its cut.

`add_step_closure` queues a call, `run_step_closures` makes the calls, in order, after the cut. Asynchronous ones
run in a thread of their own, on the values the tensors have at that step.
"""

from __future__ import annotations

import functools
import queue
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any

from torch.utils import _pytree as pytree

from ltc_core.errors import ExecutionError
from ltc_core.settings import settings
from ltc_core.tensor.handles import Cell, Value, View, base_of, lens_of
from ltc_core.tensor.lazy_tensor import LazyTensor, wrap

__all__ = ["add_step_closure", "run_step_closures"]

Closure = Callable[[], Any]
_Queued = deque[tuple[Callable[..., Any], tuple[Any, ...], bool]]
_local = threading.local()


def add_step_closure(
    closure: Callable[..., Any], args: tuple[Any, ...] = (), run_async: bool = False
) -> None:
    """Call `closure(*args)` once, after the next `mark_step` of this thread.

    Closures that an asynchronous closure adds are called after the next `mark_step` of the thread that added it, unless
    the closure calls `mark_step` itself.

    Args:
        closure: what to call.
        args: passed by position; a tensor among them keeps the value it has at that step.
        run_async: call it in the closure thread, so that the training loop goes on.

    Source: torch_xla's `xm.add_step_closure`.
    """
    _queued().append((closure, args, run_async))


def _queued() -> _Queued:
    """This thread's queue: a deque, since a closure's thread may add to it, too."""
    found: _Queued | None = getattr(_local, "queued", None)
    if found is None:
        found = _local.queued = deque()
    return found


def _snapshot(item: Any) -> Any:
    """Return a tensor that keeps the current value when the other is written."""
    if type(item) is not LazyTensor:
        return item
    handle = item._h
    base = base_of(handle)
    kept = Cell(handle.trace, base.value, base.meta)
    if type(handle) is Cell:
        return wrap(kept)
    return wrap(View(kept, lens_of(handle), handle.meta, Value(-1, -1)))


def run_step_closures() -> None:
    """Call the queued closures; called by `mark_step` after the cut.

    Closures that a closure adds are called by the next `mark_step`, maybe one of its own. If one raises, those behind
    it are called by the next `mark_step`, too.

    Raises:
        RuntimeError: an asynchronous closure of an earlier step raised; chained to its exception.
    """
    queued = _queued()
    closures: _Queued = deque()
    while queued:
        closures.append(queued.popleft())
    try:
        while closures:
            closure, args, run_async = closures.popleft()
            if run_async:
                kept = pytree.tree_map(_snapshot, args)
                _thread.put(functools.partial(closure, *kept), queued)
            else:
                closure(*args)
    finally:
        queued.extendleft(reversed(closures))


class _ClosureThread:
    """Runs asynchronous closures one after the other; ends when it has been idle for a while."""

    _IDLE_S = 5.0

    def __init__(self) -> None:
        self.after_fork()

    def after_fork(self) -> None:
        """Reset in a forked child, which has none of the parent's threads."""
        self._lock = threading.Lock()
        # Each with the queue of the thread it comes from, and whether it counts towards the limit.
        self._queue: queue.Queue[tuple[Closure, _Queued, bool]] = queue.Queue()
        self._places: threading.Semaphore | None = None  # made for the first closure
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None

    @property
    def _is_current(self) -> bool:
        return threading.current_thread() is self._thread

    def put(self, closure: Closure, queued: _Queued) -> None:
        """Queue a closure of the thread whose step closures are `queued`; blocks while too many wait."""
        with self._lock:
            error, self._error = self._error, None
            if self._places is None:
                self._places = threading.Semaphore(max(settings.max_async_queue, 1))
            places = self._places
        if error is not None:
            raise ExecutionError(
                "Cannot run asynchronous closure due to previously raised exception",
                got=f"{type(error).__name__}: {error}",
                next="look at the closure that was added in an earlier step",
            ) from error
        waits = not self._is_current  # a closure that waited for a place would wait for itself
        if waits:
            places.acquire()
        self._queue.put((closure, queued, waits))
        with self._lock:
            if self._thread is None:
                self._thread = threading.Thread(target=self._loop, name="ltc-closures", daemon=True)
                self._thread.start()

    def _loop(self) -> None:
        while True:
            try:
                closure, queued, has_place = self._queue.get(timeout=self._IDLE_S)
            except queue.Empty:
                with self._lock:
                    if self._queue.empty():
                        self._thread = None
                        return
                continue
            if has_place and self._places is not None:
                self._places.release()
            try:
                closure()
            except BaseException as error:  # raised by the next asynchronous closure
                with self._lock:
                    self._error = self._error or error
            finally:
                del closure  # and the tensors it was given
                self._pass_on(queued)
                del queued
                self._queue.task_done()

    @staticmethod
    def _pass_on(queued: _Queued) -> None:
        """Make the thread of a closure call the closures that it added and did not call itself."""
        added = _queued()
        while added:
            queued.append(added.popleft())

    def drain(self) -> None:
        """Wait for all closures handed over so far; a closure does not wait for itself and those behind it."""
        if not self._is_current:
            self._queue.join()

    def at_exit(self) -> None:
        """Wait for the closures; warn if one does not end, or raised and nobody was told."""
        deadline = time.monotonic() + settings.exit_timeout_s
        while self._queue.unfinished_tasks and time.monotonic() < deadline:
            time.sleep(0.01)
        if self._queue.unfinished_tasks:
            print(
                f"ltc: {self._queue.unfinished_tasks} step closures were still to be run after "
                f"{settings.exit_timeout_s:g} s and are dropped. Next: call wait_device_ops() before the end, or "
                "set LTC_EXIT_TIMEOUT_S.",
                file=sys.stderr,
            )
        if self._error is not None:
            error = self._error
            print(
                f"ltc: a step closure raised, and nobody was told before the end: {type(error).__name__}: {error}",
                file=sys.stderr,
            )


_thread = _ClosureThread()
at_exit, after_fork_in_child = _thread.at_exit, _thread.after_fork


def drain_closures() -> None:
    """Wait until asynchronous closures are done."""
    _thread.drain()
