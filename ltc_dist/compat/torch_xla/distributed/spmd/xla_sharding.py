"""`torch_xla.distributed.spmd.xla_sharding`: what `ltc_dist.spmd` has, and names that only torch_xla has."""

from __future__ import annotations

import enum
from typing import Any

import torch
from torch import nn

import ltc_core as ltc
from ltc_dist.compat.absent import Absent
from ltc_dist.compat.dtensor_names import wrap_as_sharded_tensor
from ltc_dist.compat.torch_xla.runtime import use_spmd
from ltc_dist.spmd import (
    HybridMesh,
    MarkShardingFunction,
    Mesh,
    ShardingSpec,
    apply_backward_optimization_barrier,
    clear_sharding,
    disable_manual_sharding,
    enable_manual_sharding,
    get_1d_mesh,
    get_global_mesh,
    is_manual,
    mark_sharding,
    mark_sharding_with_gradients,
    set_global_mesh,
    sharding_of,
)
from ltc_dist.spmd import mark_manual_sharding as _mark_manual_sharding

__all__ = [
    "HybridMesh",
    "MarkShardingFunction",
    "Mesh",
    "ShardingSpec",
    "ShardingType",
    "XLAPatchedLinear",
    "_mark_manual_sharding",
    "annotate_custom_sharding",
    "apply_backward_optimization_barrier",
    "apply_xla_patch_to_nn_linear",
    "auto_policy",
    "clear_sharding",
    "disable_manual_sharding",
    "enable_manual_sharding",
    "get_1d_mesh",
    "get_global_mesh",
    "mark_sharding",
    "mark_sharding_with_gradients",
    "set_global_mesh",
    "shard_as",
    "sharding_type_of",
    "unwrap_sharded_tensor",
    "wrap_as_sharded_tensor",
    "wrap_if_sharded",
    "xla_patched_nn_linear_forward",
]


class ShardingType(enum.IntEnum):
    """How a tensor is divided, with torch_xla's numbers."""

    REPLICATED = 0
    MAXIMAL = 1
    TUPLE = 2
    TILED = 3
    MANUAL = 4
    PARTIAL = 5
    UNKNOWN = 6


def sharding_type_of(t: torch.Tensor) -> ShardingType:
    """TILED: each device has another part; PARTIAL: several have the same; REPLICATED: all have all of it.

    MANUAL: each device has a value of its own.
    """
    if is_manual(t):
        return ShardingType.MANUAL
    found = sharding_of(t)
    if found is None:
        return ShardingType.REPLICATED
    sharding = found[0].sharding(found[1])
    parts = 1
    for dim in range(t.ndim):
        parts *= sharding.parts(dim)
    if parts == 1:
        return ShardingType.REPLICATED
    return ShardingType.TILED if parts == found[0].size() else ShardingType.PARTIAL


def has_parts(t: torch.Tensor) -> bool:
    """Whether devices have different parts of a tensor."""
    return sharding_type_of(t) in (ShardingType.TILED, ShardingType.PARTIAL)


_CUSTOM = "an annotation is no op of its own; mark_sharding, which tells the compiler of a recorded tensor"
annotate_custom_sharding = Absent("annotate_custom_sharding", _CUSTOM)


def auto_policy(name: str, module: nn.Module, mesh: object) -> None:
    """Move a module to the device, where its large tensors are divided from now on; for `xla_distribute_module`.

    Args:
        name: accepted.
        mesh: accepted; see `use_spmd` for the mesh that divides them.
    """
    use_spmd(auto=True)
    module.to(ltc.lazy_device())


def shard_as(a: Any, b: Any) -> tuple[Any, Any]:
    """Return both: XLA's propagation divides values that are used together alike."""
    return a, b


def unwrap_sharded_tensor(t: torch.Tensor) -> torch.Tensor:
    """Return `t`: a marked tensor is a tensor like any other."""
    return t


def wrap_if_sharded(x: Any) -> Any:
    """Return `x`: a marked tensor is a tensor like any other."""
    return x


def xla_patched_nn_linear_forward(m: nn.Linear, input: torch.Tensor) -> torch.Tensor:
    """Call a linear layer. torch_xla has an einsum here so that dimensions that are divided are not merged."""
    return nn.functional.linear(input, m.weight, m.bias)


def apply_xla_patch_to_nn_linear(module: nn.Module, patched_function: object = None) -> nn.Module:
    """Return the module as it is."""
    return module


class XLAPatchedLinear:
    """A linear layer as `apply(input, weight, bias)`: see `xla_patched_nn_linear_forward`."""

    @staticmethod
    def apply(
        input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None
    ) -> torch.Tensor:
        return nn.functional.linear(input, weight, bias)
