"""Compiled programs on disk: found only when whole, built by one process at a time, the longest unused removed.

An artifact is a directory named after its key; `manifest.json` in it has the size and digest of each file, and what its
builder said. It is made in a scratch directory beside it and renamed, so nobody sees half of one. All of it is read
before it is given out: mapping a damaged library kills the process. `service` finds and claims, the compiler's process
(`child`) commits and trims; the root also holds what the compiler itself keeps, under `WORK`.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import json
import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from ltc_core import metrics
from ltc_core.private_directory import private_directory, refuse_shared

__all__ = ["WORK", "Artifacts"]

WORK = "work"
_MANIFEST = "manifest.json"
_FORMAT = 1
_SCRATCH = ".scratch"
_REMOVED = ".removed"
_LOCK = ".lock"
# What was used so recently is not removed: a process may have found it and not loaded it yet.
_RECENT_S = 3600.0
_NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)

_held: set[int] = set()  # descriptors of the locks this process holds


def after_fork_in_child() -> None:
    """The locks are the parent's, and would outlive it in our copies of their descriptors."""
    while _held:
        os.close(_held.pop())


class Artifacts:
    """The artifacts below one directory. Keys are words of letters and digits.

    Args:
        root: the directory.
        is_read_only: only look for them; nothing there is changed or removed.
    """

    def __init__(self, root: Path, is_read_only: bool = False) -> None:
        self.root = root
        self.is_read_only = is_read_only

    def prepare(self) -> None:
        """Make the directory; one that is only read must be there.

        Raises:
            OSError: it cannot be made, is not there, or others may write to it.
        """
        (refuse_shared if self.is_read_only else private_directory)(self.root)

    def has(self, key: str) -> bool:
        """Whether there is an artifact, whole or not. Cost: one system call."""
        return (self.root / key / _MANIFEST).exists()

    def find(self, key: str) -> Path | None:
        """Return the directory of a whole artifact; a damaged one is removed and counted.

        Cost: reads all of it, about 1 ms a megabyte.
        """
        path = self.root / key
        if not path.is_dir():
            return None
        try:
            damage = _damage(path)
        except OSError:  # cannot be read just now; whoever builds it again will say why
            return None
        if damage:
            if not self.is_read_only and self._remove(path):
                metrics.count("DamagedArtifact")
            return None
        if not self.is_read_only:
            with contextlib.suppress(
                OSError
            ):  # where nothing can be written there is no order of use
                os.utime(path / _MANIFEST)
        return path

    def facts(self, path: Path) -> dict[str, Any]:
        """Return the facts an artifact was committed with."""
        facts: dict[str, Any] = _read_manifest(path)["facts"]
        return facts

    # -- making one --------------------------------------------------------------------------------

    @contextlib.contextmanager
    def claim(self, key: str) -> Iterator[bool]:
        """Hold the lock for building `key` for a `with` block; yields False if another process holds it.

        The right ends with the process. Where the file system has no locks everybody is given it.

        Raises:
            OSError: the lock's file cannot be made.
        """
        path = self.root / f"{key}{_LOCK}"
        descriptor = _try_lock(path)
        if descriptor is None:
            yield False
            return
        _held.add(descriptor)
        try:
            yield True
        finally:
            if descriptor in _held:
                _held.discard(descriptor)
                # While it is still locked: whoever waits for the old file then sees that it is gone.
                with contextlib.suppress(OSError):
                    path.unlink()
                os.close(descriptor)

    @contextlib.contextmanager
    def scratch(self, key: str) -> Iterator[Path]:
        """Return an empty directory to build `key` in; what `commit` did not take of it is removed.

        Raises:
            OSError: it cannot be made.
        """
        path = Path(tempfile.mkdtemp(_SCRATCH, f"{key}.", self.root))
        try:
            yield path
        finally:
            shutil.rmtree(path, ignore_errors=True)

    def commit(self, key: str, built: Path, facts: dict[str, Any]) -> Path:
        """Make the directory `built`, which is on the same disk, the artifact of `key`.

        If there is a whole one already, that one is kept and given back.

        Raises:
            OSError: it cannot be written.
            ValueError: there are links in it, or nothing.
        """
        _write_manifest(key, built, facts)
        path = self.root / key
        try:
            built.rename(path)
        except OSError as error:
            if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                raise
            winner = self.find(key)  # removes what is damaged
            if winner is not None:
                return winner
            built.rename(path)
        _sync(self.root)
        return path

    # -- making room -------------------------------------------------------------------------------

    def trim(self, limit_bytes: int) -> int:
        """Remove what was not used for longest, until the rest fits; give how many artifacts went.

        What was used in the last hour stays, so the rest can be larger than the limit.
        """
        self.sweep()
        entries = [*self._artifacts(), *self._work_files()]
        total = sum(entry.size for entry in entries)
        oldest_kept = time.time() - _RECENT_S
        evicted = 0
        for entry in sorted(entries, key=lambda entry: entry.used):
            if total <= limit_bytes or entry.used > oldest_kept:
                break
            if entry.is_artifact:
                evicted += self._remove(entry.path)
            else:
                entry.path.unlink(missing_ok=True)
            total -= entry.size
        return evicted

    def sweep(self) -> None:
        """Remove what processes left that were killed."""
        for path in self.root.glob(f"*{_REMOVED}"):
            shutil.rmtree(path, ignore_errors=True)
        for path in [*self.root.glob(f"*{_SCRATCH}"), *self.root.glob(f"*{_LOCK}")]:
            with self.claim(path.name.partition(".")[0]) as is_mine:
                if is_mine and path.suffix == _SCRATCH:
                    shutil.rmtree(path, ignore_errors=True)

    def _artifacts(self) -> Iterator[_Entry]:
        for path in self.root.iterdir():
            if path.name.isalnum():
                with contextlib.suppress(FileNotFoundError):  # no artifact, or removed meanwhile
                    used = (path / _MANIFEST).stat().st_mtime
                    files = (file for file in path.rglob("*") if file.is_file())
                    size = sum(file.stat().st_size for file in files)
                    yield _Entry(used, size, path, True)

    def _work_files(self) -> Iterator[_Entry]:
        for directory, _, names in os.walk(self.root / WORK):
            for name in names:
                path = Path(directory, name)
                with contextlib.suppress(FileNotFoundError):
                    status = path.lstat()
                    used = max(status.st_atime, status.st_mtime)
                    yield _Entry(used, status.st_size, path, False)

    def _remove(self, path: Path) -> bool:
        """Remove an artifact by one rename; False if another process was faster, or if that fails."""
        removed = path.with_name(f"{path.name}.{os.getpid()}{_REMOVED}")
        try:
            path.rename(removed)
        except OSError:
            return False
        shutil.rmtree(removed, ignore_errors=True)
        return True


class _Entry(NamedTuple):
    """Something that can be removed."""

    used: float
    size: int
    path: Path
    is_artifact: bool


def _try_lock(path: Path) -> int | None:
    """Open and lock a file; None if another process has it."""
    while True:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.path.samestat(os.fstat(descriptor), os.stat(path)):
                return descriptor
        except BlockingIOError:
            os.close(descriptor)
            return None
        except FileNotFoundError:  # its last holder removed it after we had opened it
            pass
        except OSError as error:
            if error.errno in _NO_LOCKS:
                return descriptor
            os.close(descriptor)
            raise
        os.close(descriptor)


# -- manifests -------------------------------------------------------------------------------------


def _read_manifest(path: Path) -> dict[str, Any]:
    """Return the body of a manifest.

    Raises:
        ValueError: it is damaged or of another format.
    """
    outer = json.loads((path / _MANIFEST).read_bytes())
    if not isinstance(outer, dict) or outer.get("digest") != _body_digest(outer.get("body")):
        raise ValueError("the digest of the manifest is wrong")
    body: dict[str, Any] = outer["body"]
    if body.get("format") != _FORMAT:
        raise ValueError("the manifest is of another format")
    return body


def _body_digest(body: object) -> str:
    return hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()


def _write_manifest(key: str, built: Path, facts: dict[str, Any]) -> None:
    """Describe every file of a directory, and make sure that all of it is on the disk."""
    files = {}
    for path in sorted(built.rglob("*")):
        if path.is_symlink():
            raise ValueError(f"{path.name} is a link")
        if path.is_dir():
            _sync(path)
        else:
            files[str(path.relative_to(built))] = [path.stat().st_size, _digest(path)]
            _sync(path)
    if not files:
        raise ValueError("nothing was built")
    body = {"format": _FORMAT, "key": key, "facts": facts, "files": files}
    body = json.loads(json.dumps(body))  # as it will be read: keys of dicts become strings
    text = json.dumps({"digest": _body_digest(body), "body": body})
    (built / _MANIFEST).write_text(text)
    _sync(built / _MANIFEST)
    _sync(built)


def _damage(path: Path) -> str:
    """What is wrong with an artifact, or "".

    Raises:
        OSError: it cannot be read.
    """
    try:
        body = _read_manifest(path)
        if body["key"] != path.name:
            return "it is another key's"
        for name, (size, digest) in body["files"].items():
            file = path / name
            if file.is_symlink() or file.stat().st_size != size or _digest(file) != digest:
                return f"{name} is damaged"
    except (FileNotFoundError, ValueError) as error:
        return str(error)
    return ""


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
