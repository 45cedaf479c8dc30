"""Caches without compiled programs, for tests that compile: PyTorch's precompiled headers are shared by all of them."""

from pathlib import Path

from ltc_core.executors.artifacts import WORK
from ltc_core.private_directory import private_directory
from ltc_core.settings import settings

__all__ = ["empty_cache"]


def empty_cache(directory: Path) -> str:
    """Make `directory` a cache of compiled programs (LTC_COMPILED_CACHE_DIR) with no program in it.

    What the compiler makes for itself, half a minute of a core, is kept from one test to the next.
    """
    shared = Path(settings.cache_dir).expanduser() / "tests"
    private_directory(shared)
    directory.mkdir(mode=0o700, exist_ok=True)
    (directory / WORK).symlink_to(shared)
    return str(directory)
