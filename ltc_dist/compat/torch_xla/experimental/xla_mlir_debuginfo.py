"""`torch_xla.experimental.xla_mlir_debuginfo`: the op `torch.ops.xla.write_mlir_debuginfo`, which names ops."""

from __future__ import annotations

from typing import Any

import torch

from ltc_core.graph.composite import NAME

__all__ = ["write_mlir_debuginfo"]


def write_mlir_debuginfo(x: torch.Tensor, data: str) -> torch.Tensor:
    """Name the op that made a tensor; returns a copy of the tensor, to be used in its place.

    The name is the op's location in StableHLO that is shown or exported.
    """
    return NAME(x, data)  # type: ignore[no-any-return]


# Kept: the op is there as long as its library.
_torch_library: Any = torch.library
_library = _torch_library.Library("xla", "FRAGMENT")
_library.define("write_mlir_debuginfo(Tensor x, str data) -> Tensor")
_library.impl("write_mlir_debuginfo", write_mlir_debuginfo, "CompositeImplicitAutograd")
