"""Publishes the state of this process: a thread writes it into a file a few times a second.

`start_as_set` (LTC_WATCH) is called when the first device is used, `start` by the launcher's
processes when they begin. The training threads do nothing for it but note where a slice begins and
ends (`timeline.marks`). The file is removed when the process ends by itself. Reads by `sampler`,
writes by `board`.
"""

from __future__ import annotations

import contextlib
import os
import threading
import warnings
from pathlib import Path

from ltc_core.errors import ProfilerError, SettingsError
from ltc_core.live.board import StateFile, directory_of, is_off, read_states
from ltc_core.live.sampler import Sampler
from ltc_core.settings import settings
from ltc_core.timeline import marks

__all__ = ["after_fork_in_child", "at_exit", "start", "start_as_set"]

_EVERY_S = 0.2
_JOIN_S = 2.0


class _Publisher:
    """The thread and its file."""

    def __init__(self, directory: Path) -> None:
        self.pid = os.getpid()
        self.file = StateFile(directory)
        read_states(directory)  # removes what killed processes have left
        marks.on = marks.Marks()
        self._sampler = Sampler()
        self._ending = threading.Event()
        self._thread = threading.Thread(target=self._run, name="ltc-watch", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            self.file.write(self._sampler.read())
            while not self._ending.wait(_EVERY_S):
                self.file.write(self._sampler.read())
        except Exception as error:  # the training must not end because nobody can watch it
            marks.on = None
            warnings.warn(
                f"the state of this process is published no more: {error}. Training goes on.",
                stacklevel=2,
            )

    def stop(self) -> None:
        self._ending.set()
        self._thread.join(_JOIN_S)
        marks.on = None
        with contextlib.suppress(OSError):
            self.file.remove()


_running: _Publisher | None = None
_lock = threading.Lock()


def start(directory: Path) -> None:
    """Publish the state of this process in a directory, until it ends. Does nothing if it is published already.

    Raises:
        ProfilerError: the directory cannot be written to, or others may write to it.

    Cost: 0.2 ms five times a second in a thread of its own; 1 us for each wait, cut and transfer of the others.
    """
    global _running
    with _lock:
        if _running is None:
            _running = _Publisher(directory)


def start_as_set() -> None:
    """Publish the state of this process if LTC_WATCH asks for it.

    Raises:
        SettingsError: the directory of LTC_WATCH cannot be written to.
    """
    setting = settings.watch
    if _running is not None or is_off(setting):
        return
    try:
        start(directory_of(setting))
    except ProfilerError as error:
        raise SettingsError(error.what, got=error.got, where="LTC_WATCH", next=error.next) from None


def at_exit() -> None:
    """End the thread and remove the file."""
    global _running
    with _lock:
        found, _running = _running, None
    if found is not None:
        found.stop()


def after_fork_in_child() -> None:
    """Forget the parent's thread and file: a child publishes when it uses a device for the first time."""
    global _running, _lock
    _lock = threading.Lock()
    found, _running = _running, None
    marks.on = None
    if found is not None:
        with contextlib.suppress(OSError):
            found.file.drop()
