"""All repairs of PyTorch's compiler: a block in which it makes right code. Used by `build_artifact`."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from ltc_core.executors.inductor.lowering import (
    alias_repair,
    dependency_repair,
    fusion_repair,
    gemm_lowering,
    index_put_lowering,
    mask_repair,
    mutation_repair,
    overlap_repair,
    tile_repair,
)

__all__ = ["repaired"]

_REPAIRS = (
    alias_repair.repaired, dependency_repair.repaired, fusion_repair.repaired, mask_repair.repaired,
    mutation_repair.repaired, overlap_repair.repaired, tile_repair.repaired,
)  # fmt: skip


@contextlib.contextmanager
def repaired() -> Iterator[None]:
    """Repair the compiler in a block; our lowerings of ops stay registered in the process."""
    gemm_lowering.register()
    index_put_lowering.register()
    with contextlib.ExitStack() as stack:
        for repair in _REPAIRS:
            stack.enter_context(repair())
        yield
