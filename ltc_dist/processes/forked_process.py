"""multiprocessing's process of the start method 'spawn', as a fork of a zygote instead of a new interpreter.

All else is that method's: what is pickled and in which order, the import of the script, the exit. See `zygote`. Used by
`spawn`.
"""

from __future__ import annotations

import contextlib
import io
import multiprocessing as mp
import multiprocessing.spawn
import os
import sys
from multiprocessing import reduction, resource_tracker, util
from multiprocessing.context import SpawnProcess, set_spawning_popen
from multiprocessing.popen_spawn_posix import Popen as _SpawnPopen
from typing import Any

from ltc_dist.processes import zygote
from ltc_dist.processes.zygote import Call, Zygote

__all__ = ["ForkedProcess", "begin"]

Popen: Any = _SpawnPopen  # the stubs lack most of it


class ForkedProcess(SpawnProcess):
    """A process that `of` forks; a new interpreter if it cannot."""

    def __init__(self, of: Zygote, **options: Any) -> None:
        super().__init__(**options)
        self._of = of

    @staticmethod
    def _Popen(process: Any) -> Any:
        try:
            return _Forked(process)
        except _NotForked:
            return Popen(process)

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name != "_of"}


class _NotForked(Exception):
    """The zygote cannot fork, or was killed."""


class _Descriptor:
    """A descriptor of the parent, as it is pickled for the fork."""

    def __init__(self, index: int) -> None:
        self._index = index

    def detach(self) -> int:
        return zygote.inherited[self._index]


class _Forked(Popen):  # type: ignore[misc]
    """The fork, as its parent sees it."""

    DupFd = _Descriptor

    def duplicate_for_child(self, fd: int) -> int:
        self._fds.append(fd)
        return len(self._fds) - 1

    def _launch(self, process: Any) -> None:
        tracker_fd = resource_tracker.getfd()
        assert tracker_fd is not None
        tracker = self.duplicate_for_child(tracker_fd)
        data = io.BytesIO()
        set_spawning_popen(self)
        try:
            reduction.dump(mp.spawn.get_preparation_data(process._name), data)
            reduction.dump(process, data)
        finally:
            set_spawning_popen(None)
        ended_r, ended_w = os.pipe()  # the fork holds the second one as long as it lives
        data_r, data_w = os.pipe()
        self.finalizer = util.Finalize(self, _close, (ended_r, data_w))
        try:
            pipe = self.duplicate_for_child(data_r)
            self.duplicate_for_child(ended_w)
            call = Call(__name__, begin.__name__, (tracker, pipe))
            pid = process._of.fork(call, os.environ, self._fds, _open_streams())
        finally:
            os.close(ended_w)
            os.close(data_r)
        if pid is None:
            self.finalizer()
            raise _NotForked
        self.pid, self.sentinel = pid, ended_r
        with open(data_w, "wb", closefd=False) as file:
            file.write(data.getbuffer())


def _open_streams() -> dict[int, int]:
    """Stdin, stdout and stderr of this process as they are now, less those that are closed."""
    found = {}
    for number in range(3):
        with contextlib.suppress(OSError):
            os.fstat(number)
            found[number] = number
    return found


def _close(*descriptors: int) -> None:
    for descriptor in descriptors:
        os.close(descriptor)


def begin(tracker: int, pipe: int) -> None:
    """What the fork does: as a new interpreter of multiprocessing, given the places of two descriptors."""
    sys.argv = [sys.argv[0], "--multiprocessing-fork"]
    mp.spawn.spawn_main(tracker_fd=zygote.inherited[tracker], pipe_handle=zygote.inherited[pipe])
