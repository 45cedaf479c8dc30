"""Directories for built code, which no other user can write to.

A user who can write to a directory of shared libraries can run code in every process that loads one of them.
`native_extension` and the executors that compile keep built files in such directories, below `settings.cache_dir`.
"""

from __future__ import annotations

import os
import stat
from pathlib import Path

__all__ = ["private_directory", "refuse_shared"]


def private_directory(directory: Path) -> None:
    """Make the directory and its parent, for this user alone.

    Raises:
        OSError: the directory cannot be made, or another user owns it or may write to it.
    """
    for part in (directory.parent, directory):
        part.mkdir(mode=0o700, parents=True, exist_ok=True)
    refuse_shared(directory)
    if directory.stat().st_uid != os.geteuid():
        raise _writable(directory)


def refuse_shared(directory: Path) -> None:
    """Raise if other users than the owner may write to the directory.

    Raises:
        OSError: they may, or the directory does not exist.
    """
    if directory.stat().st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise _writable(directory)


def _writable(directory: Path) -> PermissionError:
    return PermissionError(
        f"the cache directory {directory} can be written by other users; LTC_CACHE_DIR names another one"
    )
