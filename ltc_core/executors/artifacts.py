"""Cache of compiled programs on disk, with checksums, a lock for each build, and least-recently-used eviction.

An artifact is a directory named after its key; its `manifest.json` has the size and digest of each file, and the facts
its builder returned. It is built in a scratch directory and renamed, so a partial artifact is never visible. `find`
reads and checks all of it, because mapping a damaged library kills the process. `service` finds and claims artifacts;
the compiler's process (`child`) commits and trims. The compiler's own caches are under `WORK` in the same root.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import json
import os
import shutil
import time
import uuid
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
# An artifact used within this time is not evicted: a process may have found it and not loaded it yet.
_RECENT_S = 3600.0
_NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)

_held: set[int] = set()  # descriptors of the locks this process holds


def after_fork_in_child() -> None:
    """Close the inherited descriptors of the parent's locks: open copies would keep the locks after the parent ends."""
    while _held:
        os.close(_held.pop())


class Artifacts:
    """The artifacts in one directory. Keys are words of letters and digits.

    Args:
        root: the directory.
        is_read_only: only find artifacts; nothing is written or removed.
    """

    def __init__(self, root: Path, is_read_only: bool = False) -> None:
        self.root = root
        self.is_read_only = is_read_only

    def prepare(self) -> None:
        """Make the directory, or check that it exists if it is read-only.

        Raises:
            OSError: it cannot be made, does not exist, or is writable by other users.
        """
        (refuse_shared if self.is_read_only else private_directory)(self.root)

    def has(self, key: str) -> bool:
        """Whether there is an artifact, damaged or not. Cost: one system call."""
        return (self.root / key / _MANIFEST).exists()

    def find(self, key: str) -> Path | None:
        """Directory of an undamaged artifact, or None. A damaged one is removed and counted.

        Cost: reads the whole artifact, about 1 ms a megabyte.
        """
        path = self.root / key
        if not path.is_dir():
            return None
        try:
            damage = _damage(path)
        except OSError:  # not readable now; the process that builds it again reports the error
            return None
        if damage:
            if not self.is_read_only and self._remove(path):
                metrics.count("DamagedArtifact")
            return None
        if not self.is_read_only:
            with contextlib.suppress(OSError):  # not writable: the time of use is not noted
                os.utime(path / _MANIFEST)
        return path

    def facts(self, path: Path) -> dict[str, Any]:
        """Facts that an artifact was committed with."""
        facts: dict[str, Any] = _read_manifest(path)["facts"]
        return facts

    # -- making one --------------------------------------------------------------------------------

    @contextlib.contextmanager
    def claim(self, key: str) -> Iterator[bool]:
        """Hold the lock for building `key` in a `with` block; yields False if another process holds it.

        The lock is released when the process ends. On a file system without locks it always yields True.

        Raises:
            OSError: the lock file cannot be made.
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
                # Removed while still locked: a process that has opened the file sees that it is gone.
                with contextlib.suppress(OSError):
                    path.unlink()
                os.close(descriptor)

    @contextlib.contextmanager
    def scratch(self, key: str) -> Iterator[Path]:
        """Empty directory to build `key` in, for a `with` block; removed at its end, except for what `commit` moved.

        It is locked while the block runs, so no other process sweeps it.

        Raises:
            OSError: it cannot be made.
        """
        name = f"{key}.{uuid.uuid4().hex}"
        path = self.root / f"{name}{_SCRATCH}"
        with self.claim(name):
            path.mkdir(0o700)
            try:
                yield path
            finally:
                shutil.rmtree(path, ignore_errors=True)

    def commit(self, key: str, built: Path, facts: dict[str, Any]) -> Path:
        """Rename the directory `built`, which is on the same disk, to the artifact of `key`; returns its path.

        An undamaged artifact that is already there is kept and returned.

        Raises:
            OSError: it cannot be written.
            ValueError: `built` is empty or contains links.
        """
        _write_manifest(key, built, facts)
        path = self.root / key
        try:
            built.rename(path)
        except OSError as error:
            if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                raise
            winner = self.find(key)  # removes a damaged artifact
            if winner is not None:
                return winner
            built.rename(path)
        _sync(self.root)
        return path

    # -- making room -------------------------------------------------------------------------------

    def trim(self, limit_bytes: int) -> int:
        """Remove the least recently used artifacts and work files until the rest fits; number of artifacts removed.

        Nothing that was used in the last hour is removed, so the rest can exceed the limit.
        """
        self.sweep()
        entries = [*self._artifacts(), *self._work_files()]
        total = sum(entry.size for entry in entries)
        oldest_kept = time.time() - _RECENT_S
        evicted = 0
        for entry in sorted(entries, key=lambda entry: entry.used):
            if total <= limit_bytes or entry.used > oldest_kept:
                break
            if not entry.is_artifact:
                entry.path.unlink(missing_ok=True)
            elif not self._remove(entry.path):
                continue
            else:
                evicted += 1
            total -= entry.size
        return evicted

    def sweep(self) -> None:
        """Remove files and directories left by killed processes."""
        for path in self.root.glob(f"*{_REMOVED}"):
            shutil.rmtree(path, ignore_errors=True)
        for path in [*self.root.glob(f"*{_SCRATCH}"), *self.root.glob(f"*{_LOCK}")]:
            with self.claim(path.stem) as is_mine:
                if is_mine and path.suffix == _SCRATCH:
                    shutil.rmtree(path, ignore_errors=True)

    def _artifacts(self) -> Iterator[_Entry]:
        for path in self.root.iterdir():
            if path.name.isalnum():
                with contextlib.suppress(FileNotFoundError):  # no artifact, or just removed
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
        """Rename an artifact, then delete it; False if the rename fails or another process has removed the artifact."""
        removed = path.with_name(f"{path.name}.{os.getpid()}{_REMOVED}")
        try:
            path.rename(removed)
        except OSError:
            return False
        shutil.rmtree(removed, ignore_errors=True)
        return True


class _Entry(NamedTuple):
    """An artifact or work file that `trim` may remove."""

    used: float
    size: int
    path: Path
    is_artifact: bool


def _try_lock(path: Path) -> int | None:
    """Descriptor of a file, opened and locked; None if another process holds the lock."""
    while True:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.path.samestat(os.fstat(descriptor), os.stat(path)):
                return descriptor
        except BlockingIOError:
            os.close(descriptor)
            return None
        except FileNotFoundError:  # the last holder removed the file after it was opened here
            pass
        except OSError as error:
            if error.errno in _NO_LOCKS:
                return descriptor
            os.close(descriptor)
            raise
        os.close(descriptor)


# -- manifests -------------------------------------------------------------------------------------


def _read_manifest(path: Path) -> dict[str, Any]:
    """Body of a manifest.

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
    """Write the manifest of a directory, and sync all of its files to the disk."""
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
    body = json.loads(json.dumps(body))  # as it will be read: dict keys become strings
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
