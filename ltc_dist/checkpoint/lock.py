"""One writer in a checkpoint directory: `claim` takes its lock, for this process against others and within it.

The kernel's lock is flock: it belongs to the open file, so that reading or copying `lock` elsewhere in this process
does not release it, as it would with POSIX locks. A forked child shares the open file and closes it at once, so that
processes of a DataLoader that outlive this one do not keep it. The package filelock has no descriptor to close there,
does not see that the lock file was replaced, and cannot say who holds it. Used by `checkpointer`.
"""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import re
import socket
import stat
import threading
from typing import NoReturn

from ltc_core.errors import CheckpointIOError
from ltc_dist.checkpoint.layout import LOCK

__all__ = ["Claim", "claim"]

_log = logging.getLogger("ltc")

_OWNER = re.compile(rb"(pid [0-9]+ on [^\n]*\n[ \n]*)?")
_OWNER_BYTES = 128  # always so many are written, over what was there: nothing is truncated
_ATTEMPTS = 5

_guard = threading.Lock()
_held: dict[tuple[int, int], Claim] = {}  # by device and inode of the directory


class Claim:
    """The right to write in a directory, until `release`."""

    def __init__(self, directory: tuple[int, int], lock: int) -> None:
        self._directory = directory
        self._lock = lock
        self._pid = os.getpid()

    def release(self) -> None:
        """Release the lock. Further calls, and calls in a forked child, do nothing."""
        # Without the guard: a finalizer may call this while its own thread holds it.
        if self._pid == os.getpid() and _held.get(self._directory) is self:
            if _held.pop(self._directory, None) is self:
                os.close(self._lock)

    def close_in_child(self) -> None:
        """Close the child's copy of the lock; the parent's stays."""
        os.close(self._lock)


def claim(root: str) -> Claim:
    """Lock a directory against other jobs and other Checkpointers of this process.

    Raises:
        CheckpointIOError: somebody else writes here, or what stands in the place of the lock is none of ours.
        OSError: from the operating system, as it is.
    """
    directory = os.open(root, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        found = os.fstat(directory)
        key = found.st_dev, found.st_ino
        with _guard:
            if key in _held:
                raise CheckpointIOError(
                    f"another Checkpointer of this process writes in {root}",
                    got="it has not been closed",
                    next="close() it first, or give this one another directory.",
                )
            _held[key] = made = Claim(key, _locked(root, directory))
            return made
    finally:
        os.close(directory)


def _locked(root: str, directory: int) -> int:
    for _ in range(_ATTEMPTS):
        lock = _opened(root, directory)
        try:
            _take(root, lock)
            try:
                is_there = os.path.samestat(
                    os.fstat(lock), os.stat(LOCK, dir_fd=directory, follow_symlinks=False)
                )
            except FileNotFoundError:
                is_there = False
            if is_there:
                owner = f"pid {os.getpid()} on {socket.gethostname()[:80]}\n"
                os.pwrite(lock, owner.encode().ljust(_OWNER_BYTES - 1) + b"\n", 0)
                return lock
        except BaseException:
            os.close(lock)
            raise
        os.close(
            lock
        )  # the file was removed between the two calls: another process may hold the new one
    raise CheckpointIOError(
        f"the lock in {root} is replaced again and again",
        next="let only jobs of this library change the directory.",
    )


def _opened(root: str, directory: int) -> int:
    """Descriptor of the lock; a link is not followed, a pipe does not block, nothing is truncated."""
    flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    try:
        lock = os.open(LOCK, flags, 0o666, dir_fd=directory)
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.EISDIR, errno.ENXIO):
            _refuse(root, "a link, a directory or a device")
        raise
    found = os.fstat(lock)
    if not stat.S_ISREG(found.st_mode):
        os.close(lock)
        _refuse(root, "a device or a pipe")
    if found.st_size > 4096 or not _OWNER.fullmatch(os.pread(lock, 4096, 0)):
        os.close(lock)
        _refuse(root, f"a file of {found.st_size} bytes with other content")
    return lock


def _refuse(root: str, got: str) -> NoReturn:
    raise CheckpointIOError(
        f"{os.path.join(root, LOCK)} is not the lock of a checkpoint directory",
        got=f"{got}; expected a file that names a process, or none",
        next="move it away, or give another directory.",
    )


def _take(root: str, lock: int) -> None:
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (BlockingIOError, PermissionError):
        owner = os.pread(lock, 200, 0).decode(errors="replace").strip()
        raise CheckpointIOError(
            f"another job writes checkpoints in {root}",
            got=owner or "its lock is held",
            next="end that job, or give this one another directory.",
        ) from None
    except OSError as error:  # some network file systems have no locks
        _log.debug("%s cannot be locked: %s", root, error)


def after_fork_in_child() -> None:
    global _guard
    _guard = threading.Lock()  # another thread of the parent may have held it
    for held in _held.values():
        held.close_in_child()
    _held.clear()
