"""A caching allocator for CPU memory: a step reuses the memory that the step before it freed.

malloc maps a large block anew each time, and the page faults take a third of a step (MNIST CNN,
compiled: 28 ms a step, 18 with kept memory). `keep_memory` installs the allocator `csrc/ltc_memory.cpp` above PyTorch's
own, for blocks of 128 KiB and more and all CPU tensors that the process allocates from then on. Live and kept bytes
stay below the recent peak of live bytes plus a sixteenth and 16 MiB, so peak memory hardly grows.
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from ltc_core.native_extension import Extension
from ltc_core.settings import settings

__all__ = ["Figures", "extension", "figures", "keep_memory", "release_kept"]

extension = Extension("_ltc_memory", Path(__file__).parent / "csrc" / "ltc_memory.cpp", "-O1")


class Figures(NamedTuple):
    """Bytes of large blocks: in use, kept, and the limit of both together."""

    live_bytes: int
    kept_bytes: int
    limit_bytes: int


def keep_memory() -> bool:
    """Install the allocator, if `settings.keep_memory` is on; later calls change nothing.

    Returns:
        Whether memory is kept. False also if the C++ part cannot be built, or if another library has replaced
        PyTorch's allocator.
    Cost:
        The first call on a machine compiles a C++ file (a second or two).
    """
    if not settings.keep_memory:
        return False
    native = extension.load()
    return native is not None and bool(native.install())


def release_kept() -> None:
    """Return kept memory to the system. Memory that is freed later is kept as before."""
    native = extension.loaded
    if native is not None:
        native.release_kept()


def figures() -> Figures:
    """Current bytes; zeros if the allocator is not installed."""
    native = extension.loaded
    return Figures(*native.figures()) if native is not None else Figures(0, 0, 0)
