"""Keep the memory that a step frees for the next one.

A large block of malloc is mapped anew each time, and page faults take a third of a step (MNIST CNN of design section 6,
compiled: 28 ms a step, 18 with kept memory). `keep_memory` puts an allocator of ours, `csrc/ltc_memory.cpp`, above
PyTorch's own for blocks of 128 KiB and more. It never holds more than was live at once lately, plus a slack of a
sixteenth and 16 MiB, so peak memory does not grow. Concerns all CPU tensors of the process, from the call on.
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from ltc_core.native_extension import Extension
from ltc_core.settings import settings

__all__ = ["Figures", "extension", "figures", "give_back", "keep_memory"]

extension = Extension("_ltc_memory", Path(__file__).parent / "csrc" / "ltc_memory.cpp", "-O1")


class Figures(NamedTuple):
    """Bytes of large blocks: of those in use, of those kept, and what both together may reach."""

    live_bytes: int
    kept_bytes: int
    limit_bytes: int


def keep_memory() -> bool:
    """Keep memory from now on, if `settings.keep_memory` says so; later calls change nothing.

    Returns:
        Whether memory is kept: not if the C++ part cannot be built, or if somebody has already replaced PyTorch's
        allocator.
    Cost:
        The first call of a machine compiles a C++ file (a second or two).
    """
    if not settings.keep_memory:
        return False
    native = extension.load()
    return native is not None and bool(native.install())


def give_back() -> None:
    """Return kept memory to the system. Memory in use stays; memory freed later is kept as before."""
    native = extension.loaded
    if native is not None:
        native.give_back()


def figures() -> Figures:
    """Return what is held now; zeros if memory is not kept."""
    native = extension.loaded
    return Figures(*native.figures()) if native is not None else Figures(0, 0, 0)
