"""Caches for tests that compile: without compiled programs, and with what takes long to build and is always the same.

PyTorch's precompiled headers are shared by all of them. They are made for the first program: they take 20 s of a core
once, and each program without them takes 5 to 9 s more.
"""

import os
import shutil
from pathlib import Path

from torch._inductor.runtime.cache_dir_utils import default_cache_dir

from ltc_core.build import EXTENSIONS
from ltc_core.executors.artifacts import WORK
from ltc_core.private_directory import private_directory
from ltc_core.settings import settings

__all__ = ["empty_cache", "put_extensions"]


def empty_cache(directory: Path) -> str:
    """Make `directory` a cache of compiled programs (LTC_COMPILED_CACHE_DIR) with no program in it.

    What the compiler makes for itself, half a minute of a core, is kept from one test to the next.
    """
    shared = Path(settings.cache_dir).expanduser() / "tests"
    private_directory(shared)
    # Where there is a header already, the compiler's process makes those of its own for the first program.
    headers = shared / os.path.basename(default_cache_dir()) / "precompiled_headers"
    headers.mkdir(mode=0o700, parents=True, exist_ok=True)
    (headers / "of_no_program.h.gch").touch()
    directory.mkdir(mode=0o700, exist_ok=True)
    (directory / WORK).symlink_to(shared)
    return str(directory)


def put_extensions(cache: Path) -> None:
    """Put the built C++ parts in a directory that becomes LTC_CACHE_DIR: to build them takes two minutes of a core."""
    directory = cache / "extensions"
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    for extension in EXTENSIONS:
        assert extension.load() is not None
        shutil.copy(extension.library_path(), directory)
