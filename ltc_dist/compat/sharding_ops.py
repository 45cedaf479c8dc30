"""`torch.ops.xla.dynamo_mark_sharding`: `mark_sharding` as an op, whose mesh and spec are texts."""

from __future__ import annotations

import ast
from typing import Any

import torch

from ltc_core.tensor.lazy_tensor import LazyTensor
from ltc_dist.spmd import Mesh, mark_sharding

__all__ = ["register"]

_library: Any = torch.library.Library("xla", "FRAGMENT")  # type: ignore[no-untyped-call]


def register() -> None:
    """Define the op. It returns the tensor itself; that of another device is not marked."""
    _library.define(
        "dynamo_mark_sharding(Tensor(a!) input, int[] device_ids, int[] mesh_shape, str axis_names, "
        "str partition_spec) -> Tensor(a!)"
    )
    _library.impl("dynamo_mark_sharding", _mark, "CompositeImplicitAutograd")


def _mark(
    t: torch.Tensor,
    device_ids: list[int],
    mesh_shape: list[int],
    axis_names: str,
    partition_spec: str,
) -> torch.Tensor:
    if not isinstance(t, LazyTensor):
        return t
    mesh = Mesh(device_ids, tuple(mesh_shape), ast.literal_eval(axis_names))
    return mark_sharding(t, mesh, ast.literal_eval(partition_spec))
