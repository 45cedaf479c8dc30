"""A directory for code that is built once and loaded later: nobody else may be able to put a file there.

Whoever can write to a directory of shared libraries runs their code in every process that loads one. `native_extension`
and the executors that compile keep what they build in such directories, below `settings.cache_dir`.
"""

from __future__ import annotations

import os
import stat
from pathlib import Path

__all__ = ["private_directory", "refuse_shared"]


def private_directory(directory: Path) -> None:
    """Make the directory, and the one it is in, for this user alone.

    Raises:
        OSError: it cannot be made; or it is there, and somebody else owns it or may write to it.
    """
    for part in (directory.parent, directory):
        part.mkdir(mode=0o700, parents=True, exist_ok=True)
    refuse_shared(directory)
    if directory.stat().st_uid != os.geteuid():
        raise _writable(directory)


def refuse_shared(directory: Path) -> None:
    """Refuse a directory that others than its owner may write to.

    Raises:
        OSError: so it is, or there is none.
    """
    if directory.stat().st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise _writable(directory)


def _writable(directory: Path) -> PermissionError:
    return PermissionError(
        f"the cache directory {directory} can be written by other users; LTC_CACHE_DIR names another one"
    )
