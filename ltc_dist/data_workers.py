"""The processes of a `DataLoader` live and end with the process that trains, and only with it.

A launcher ends a process together with all that it has started. Were these told to end too, the training process would
lose its data before it can save what it has learnt; and were it killed, they would look for it only seconds later. So
each leaves its parent's group, and asks the kernel to end it with its parent. Used by `parallel_loader`.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from torch.utils.data import DataLoader

from ltc_dist.worker import die_with_thread

__all__ = ["tied_to_this_process"]


@dataclass(frozen=True)
class _Begin:
    """What such a process does first; then the user's own `worker_init_fn`."""

    then: Callable[[int], Any] | None
    parent_pid: int
    dies_with_thread: bool

    def __call__(self, worker_id: int) -> None:
        os.setpgid(0, 0)
        if self.dies_with_thread and sys.platform == "linux":
            die_with_thread()
            if os.getppid() != self.parent_pid:
                os._exit(1)
        if self.then is not None:
            self.then(worker_id)


@contextlib.contextmanager
def tied_to_this_process(loader: Iterable[Any]) -> Iterator[None]:
    """Processes that `loader` starts in this block are as described above."""
    if not isinstance(loader, DataLoader) or not loader.num_workers:
        yield
        return
    # The kernel's signal comes when the thread ends that started them.
    in_main_thread = threading.current_thread() is threading.main_thread()
    user = loader.worker_init_fn
    loader.worker_init_fn = _Begin(user, os.getpid(), in_main_thread)
    try:
        yield
    finally:
        loader.worker_init_fn = user
