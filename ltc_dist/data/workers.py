"""The worker processes of a `DataLoader` end with the training process, and not before.

A launcher signals a whole process group. If the workers ended on that signal, the training process would lose its data
before it can save a checkpoint. If it is killed, they notice only seconds later. So each worker leaves its parent's
group, ignores SIGTERM, and has the kernel end it with its parent. SIGTERM is blocked until a worker has come so far,
which takes seconds with spawn. A fork server would end on SIGTERM, and its workers with it: workers have a server of
their own, in which SIGTERM stays blocked. A parent ends a worker that does not answer with SIGKILL. `loader` starts its
loaders' workers so; while a `Checkpointer` listens for SIGTERM, each `DataLoader` of the process does (`keep_all`).
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from multiprocessing import connection, forkserver, resource_tracker
from multiprocessing.util import get_temp_dir
from types import FrameType
from typing import Any

import torch
from torch.utils.data import DataLoader
from torch.utils.data._utils import signal_handling
from torch.utils.data.dataloader import _MultiProcessingDataLoaderIter

from ltc_dist.processes.child import die_with_thread

__all__ = ["begin", "keep_all"]

_torch_iterator: Any = DataLoader._get_iterator
_num_keepers = 0
_ENDING_S = 5.0  # the kernel has closed the files of a process; soon it has ended


@dataclass(frozen=True)
class _Begin:
    """What a worker does first; then the user's `worker_init_fn` runs.

    Attributes:
        parent_pid: of the training process; 0 if a fork server starts the worker, which ends with that one.
        dies_with_thread: the thread that starts it lives as long as its process.
        ends_block: SIGTERM is blocked only while workers are started.
    """

    then: Callable[[int], Any] | None
    parent_pid: int
    dies_with_thread: bool
    ends_block: bool

    def __call__(self, worker_id: int) -> None:
        os.setpgid(0, 0)
        # A handler, not SIG_IGN: programs that the dataset starts would inherit that. PyTorch's own ends the process.
        signal.signal(signal.SIGTERM, _Passed(os.getpid()))
        signal.siginterrupt(signal.SIGTERM, False)
        if self.ends_block:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGTERM])
        if self.dies_with_thread and sys.platform == "linux":
            die_with_thread()
            is_orphan = self.parent_pid != os.getppid() if self.parent_pid else _has_lost_parent()
            if is_orphan:
                os._exit(1)
        if self.then is not None:
            self.then(worker_id)


def _has_lost_parent() -> bool:
    parent = multiprocessing.parent_process()
    return parent is not None and not parent.is_alive()


@dataclass(frozen=True)
class _Passed:
    """Handler that ignores a signal in the process it was made for; processes forked from that one end."""

    pid: int

    def __call__(self, number: int, frame: FrameType | None) -> None:
        if os.getpid() != self.pid:
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)


def begin(loader: Iterable[Any]) -> Iterator[Any]:
    """Iterate over `loader`; its workers start as described above."""
    return _begun(loader, lambda: iter(loader)) if _has_workers(loader) else iter(loader)


def keep_all() -> Callable[[], None]:
    """Make every `DataLoader` of this process start its workers as `begin` does, until the returned function is called.

    Loaders that have started before are not changed. With several such functions, the last call ends it.
    """
    global _num_keepers, _torch_iterator
    if DataLoader._get_iterator is not _iterator_of:
        _torch_iterator = DataLoader._get_iterator
    _num_keepers += 1
    DataLoader._get_iterator = _iterator_of  # type: ignore[assignment, method-assign]
    return _keep_no_more


def _keep_no_more() -> None:
    global _num_keepers
    _num_keepers -= 1
    if not _num_keepers and DataLoader._get_iterator is _iterator_of:
        DataLoader._get_iterator = _torch_iterator  # type: ignore[method-assign]


def _iterator_of(loader: Any) -> Any:
    if not _has_workers(loader) or isinstance(loader.worker_init_fn, _Begin):
        return _torch_iterator(loader)
    return _begun(loader, lambda: _torch_iterator(loader))


def _has_workers(loader: Any) -> bool:
    return isinstance(loader, DataLoader) and loader.num_workers > 0


def _begun(loader: Any, begin: Callable[[], Iterator[Any]]) -> Iterator[Any]:
    # The kernel sends its signal when the thread that started them ends.
    in_main_thread = threading.current_thread() is threading.main_thread()
    user = loader.worker_init_fn
    if isinstance(user, _Begin):  # another thread begins it
        return begin()
    get_temp_dir()  # made here, it is this process's to remove: a worker that is killed would leave its own
    context = loader.multiprocessing_context or multiprocessing
    has_server = context.get_start_method() == "forkserver"
    with (
        _blocked_sigterm() as was_blocked,
        _own_server() if has_server else contextlib.nullcontext(),
    ):
        loader.worker_init_fn = _Begin(
            user, 0 if has_server else os.getpid(), in_main_thread or has_server, not was_blocked
        )
        try:
            batches = begin()
        finally:
            loader.worker_init_fn = user
    if isinstance(batches, _MultiProcessingDataLoaderIter):
        _name_ended_worker(batches)
    for process in getattr(batches, "_workers", ()):
        _end_by_force(process, batches)
    return batches


def _name_ended_worker(batches: _MultiProcessingDataLoaderIter) -> None:
    """Have the end of a worker told by PyTorch's error, not by that of the connection it leaves behind.

    The kernel closes the files of a process before the process counts as ended, and PyTorch looks only once.
    """
    iterator = weakref.ref(batches)

    def try_get_data(*args: Any, **kwargs: Any) -> Any:
        alive = iterator()
        assert alive is not None
        try:
            return type(alive)._try_get_data(alive, *args, **kwargs)  # type: ignore[no-untyped-call]
        except (EOFError, ConnectionError):
            is_ending = connection.wait([process.sentinel for process in alive._workers], _ENDING_S)
            deadline = time.monotonic() + _ENDING_S
            while (
                is_ending and time.monotonic() < deadline
            ):  # its files are closed, it has not ended
                torch._C._error_if_any_worker_fails()
                time.sleep(0.01)
            raise

    batches._try_get_data = try_get_data  # type: ignore[method-assign]


@contextlib.contextmanager
def _blocked_sigterm() -> Iterator[bool]:
    """Block SIGTERM in this thread, for the processes that it starts; yields whether it was blocked before."""
    resource_tracker.ensure_running()  # else it would unblock the signal in the midst
    before = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])
    try:
        yield signal.SIGTERM in before
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


_server: Any = None
_server_of_pid = 0


@contextlib.contextmanager
def _own_server() -> Iterator[None]:
    """Have the processes that this thread starts by forkserver started by a server that is there for workers only."""
    global _server, _server_of_pid
    if _server is None or _server_of_pid != os.getpid():
        _server, _server_of_pid = forkserver.ForkServer(), os.getpid()
        _server._preload_modules = forkserver._forkserver._preload_modules  # type: ignore[attr-defined]
    thread = threading.get_ident()
    others = forkserver.connect_to_new_process

    def connect(fds: Any) -> Any:
        return (_server.connect_to_new_process if threading.get_ident() == thread else others)(fds)

    forkserver.connect_to_new_process = connect
    try:
        yield
    finally:
        if forkserver.connect_to_new_process is connect:
            forkserver.connect_to_new_process = others


def _end_by_force(process: Any, batches: Iterator[Any]) -> None:
    """Make `process.terminate()`, and the interpreter's exit, send SIGKILL.

    The method is replaced: the start method's context makes the process, and PyTorch starts it as soon as it is made.
    """
    popen = process._popen
    iterator = weakref.ref(batches)

    def terminate() -> None:
        alive = iterator()
        if getattr(alive, "_worker_pids_set", False):  # else PyTorch takes its end for a failure
            signal_handling._remove_worker_pids(id(alive))  # type: ignore[attr-defined]
            alive._worker_pids_set = False  # type: ignore[union-attr]
        popen.kill()

    popen.terminate = terminate
