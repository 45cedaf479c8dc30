"""Replace a file or a directory atomically.

`replace_file` and `replace_directory` return a temporary sibling to write into. When the block
ends, it is on the disk (fsync) and takes the place of what was there; when the block raises, it is
removed. A temporary is locked (flock) while its writer lives, so a stale one of a killed process
differs from one in use. `io_errors` reports errors of the operating system.

A directory cannot be renamed onto a full one. So directories, here and in a job's checkpoints
(`ltc_dist.checkpoint.commit`), are replaced in these steps:

    1. a temporary sibling is filled; `sync_directory` writes it to the disk
    2. `swap`: `path` -> the aside name
    3. `swap`: the temporary -> `path`; then fsync of the parent
    4. what stands at the aside name is removed

A crash before 2 or after 3 leaves `path` whole, the old one or the new one. Between 2 and 3 there
is no `path`: readers take the aside name, and the next writer calls `recover` first.
"""

import fcntl
import logging
import os
import re
import secrets
import shutil
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import BinaryIO

from ltc_core.errors import CheckpointIOError, LtcError

_log = logging.getLogger(__name__)


def old_name(path: str) -> str:
    """The aside name: where the old directory stands while the new one takes its place."""
    parent, name = os.path.split(path)
    return os.path.join(parent, f".{name}.ltc-old")


@contextmanager
def io_errors(path: str, need_bytes: int | None = None) -> Iterator[None]:
    """Turn an OSError of the block into a CheckpointIOError about writing `path`.

    `need_bytes` is what the block writes into the file system of `path`, if `path` is in one.
    """
    try:
        yield
    except LtcError:  # before OSError: some LtcErrors are OSErrors, too
        raise
    except OSError as error:
        room, old = "", ""
        if need_bytes is not None:
            room = f" ({_room(path, need_bytes)})"
            old = " Nothing was replaced: a checkpoint that was there still is."
        raise CheckpointIOError(
            f"{error.strerror or error} while writing {path}{room}",
            got=f"{type(error).__name__}: {error}",
            next=f"make room or a writable directory, or save elsewhere.{old}",
            errno=error.errno,
        ) from error


def _room(path: str, need_bytes: int) -> str:
    parent = os.path.dirname(path)
    while not os.path.isdir(parent):
        parent = os.path.dirname(parent)
    return f"need {_megabytes(need_bytes)}, free {_megabytes(shutil.disk_usage(parent).free)}"


def _megabytes(count: int) -> str:
    return f"{count / 1e6:.0f} MB" if count >= 10e6 else f"{count / 1e6:.3g} MB"


@contextmanager
def replace_file(path: str) -> Iterator[BinaryIO]:
    """Return a file to write; it becomes `path` when the block ends without an error."""
    with _lock_parent(path):
        _remove_stale(path)
        temporary, descriptor = _new_temporary(path, _create_file)
    try:
        with open(descriptor, "wb") as file:  # closing it, last of all, drops the lock
            yield file
            file.flush()
            _keep_mode(path, descriptor)
            os.fsync(descriptor)
            os.replace(temporary, path)
    except BaseException:
        discard(temporary)
        raise
    fsync(os.path.dirname(path))


@contextmanager
def replace_directory(path: str, check: Callable[[str], None]) -> Iterator[str]:
    """Return a directory to fill; it becomes `path` when the block ends without an error.

    The aside name is `old_name(path)`. `check` is called with `path` before anything is written and
    again before it is moved; it raises if what is there may not be replaced.
    """
    aside = old_name(path)
    with _lock_parent(path):
        recover(aside, path, discard)
        check(path)
        _remove_stale(path)
        temporary, descriptor = _new_temporary(path, _create_directory)
    try:
        yield temporary
        # Only now, so that the kernel writes one file while the block makes the next.
        sync_directory(temporary)
        with _lock_parent(path) as parent:
            recover(aside, path, discard)
            check(path)
            # In the lock, because another writer's swap has a moment without `path`.
            _keep_mode(path, descriptor)
            os.fsync(descriptor)
            swap(temporary, path, aside)
            os.fsync(parent)
            discard(aside)
    except BaseException:
        discard(temporary)
        raise
    finally:
        os.close(descriptor)


def swap(temporary: str, path: str, aside: str) -> None:
    """Steps 2 and 3; if 3 fails, 2 is undone."""
    try:
        if os.path.lexists(path):
            os.rename(path, aside)
        os.rename(temporary, path)
    except BaseException:
        if os.path.lexists(aside) and not os.path.lexists(path):
            os.rename(aside, path)
        raise


def recover(aside: str, path: str, remove: Callable[[str], None]) -> None:
    """Complete the replacement of a writer that was killed between step 2 and the end of step 4."""
    if not os.path.lexists(aside):
        return
    if os.path.lexists(path):
        remove(aside)
    else:
        os.rename(aside, path)


@contextmanager
def _lock_parent(path: str) -> Iterator[int]:
    """Lock the parent of `path` against other writers, because a swap is two renames."""
    descriptor = os.open(os.path.dirname(path), os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        except OSError as error:  # some network file systems have no locks
            _log.debug("%s cannot be locked: %s", os.path.dirname(path), error)
        yield descriptor
    finally:
        os.close(descriptor)


def _create_file(path: str) -> int:
    return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)


def _create_directory(path: str) -> int:
    os.mkdir(path)
    return os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)


def _prefix(path: str) -> str:
    return f".{os.path.basename(path)}.ltc-new-"


def _new_temporary(path: str, create: Callable[[str], int]) -> tuple[str, int]:
    """Create a sibling of `path` and lock it; return its name and its descriptor.

    The parent is locked meanwhile, so that no writer takes the sibling for stale before it is locked itself.
    """
    name = os.path.join(os.path.dirname(path), _prefix(path) + secrets.token_hex(4))
    descriptor = create(name)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:  # without locks no writer removes stale temporaries either
        _log.debug("%s cannot be locked: %s", name, error)
    return name, descriptor


def _remove_stale(path: str) -> None:
    """Remove the temporaries that killed writers of `path` left."""
    temporary = re.compile(re.escape(_prefix(path)) + "[0-9a-f]{8}")
    for entry in list(os.scandir(os.path.dirname(path))):
        if not temporary.fullmatch(entry.name) or entry.is_symlink():
            continue
        try:
            descriptor = os.open(entry.path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
        except OSError as error:
            _log.debug("%s may be stale, but cannot be opened: %s", entry.path, error)
            continue
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            discard(entry.path)
        except OSError as error:
            _log.debug("%s is being written: %s", entry.path, error)
        finally:
            os.close(descriptor)


def discard(path: str) -> None:
    """Remove a temporary file or directory; a failure is reported as a warning, not raised."""
    try:
        if os.path.isdir(path) and not os.path.islink(path):
            shutil.rmtree(path)
        else:
            os.unlink(path)
    except FileNotFoundError:
        return
    except OSError as error:
        _log.warning("%s is left over and could not be removed: %s", path, error)


def sync_directory(path: str, progress: Callable[[], None] = lambda: None) -> None:
    """Wait until the files of a directory, and the directory, are on the disk; `progress` is called after each."""
    for name in os.listdir(path):
        fsync(os.path.join(path, name))
        progress()
    fsync(path)


def _keep_mode(path: str, descriptor: int) -> None:
    """Copy the permissions of the file or directory that is replaced."""
    try:
        mode = os.stat(path).st_mode
    except FileNotFoundError:
        return
    os.fchmod(descriptor, stat.S_IMODE(mode))


def fsync(path: str) -> None:
    """Wait until a file or a directory is on the disk."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
