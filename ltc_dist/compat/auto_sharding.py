"""Dividing what nobody marks: `xr.use_spmd(auto=True)` and `auto_policy`.

From then on each large tensor is divided when it comes to the device, along its longest dimensions, and XLA divides
what is computed from it. torch_xla has XLA's solver choose instead; JAX does not offer that. Used by
`torch_xla.runtime`, `_XLAC`, `counters` and `torch_xla.distributed.spmd`.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping

import ltc_core as ltc
from ltc_core.api.sharding import divide_uploads
from ltc_core.errors import ShardingError
from ltc_dist.spmd import num_devices

__all__ = ["begin", "count_compiles", "is_on", "mesh_shape"]

_VARIABLE = "XLA_AUTO_SPMD_MESH"
_compiles_before = -1  # programs that were made before it began; -1: it has not


def begin() -> None:
    """Divide large tensors that come to the device from now on."""
    global _compiles_before
    if not is_on():
        _compiles_before = ltc.metrics.counter_value("UncachedCompile") or 0
        divide_uploads(ltc.lazy_device(), mesh_shape)


def is_on() -> bool:
    """Whether `begin` was called."""
    return _compiles_before >= 0


def count_compiles(totals: Mapping[str, int]) -> int:
    """Programs that were made since then, from the totals of all counters."""
    return totals.get("UncachedCompile", 0) - _compiles_before if is_on() else 0


def mesh_shape() -> tuple[int, ...]:
    """Devices along each axis of the mesh: what XLA_AUTO_SPMD_MESH says, such as 2,4, or one axis.

    Raises:
        ShardingError: it does not name all devices.
    """
    text, count = os.environ.get(_VARIABLE, ""), num_devices()
    if not text:
        return (count,)
    sizes = text.split(",")
    shape = tuple(int(size) for size in sizes if size.strip().isdecimal())
    if len(shape) != len(sizes) or math.prod(shape) != count:
        raise ShardingError(
            f"{_VARIABLE} has to name a mesh of all {count} devices",
            got=text,
            next=f"{_VARIABLE}={count} is a mesh of one axis; leave it unset for that",
        )
    return shape
