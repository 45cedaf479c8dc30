"""FSDP by annotation: each parameter is divided over the devices; XLA gathers it where it is used, and frees it."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

import ltc_core as ltc
from ltc_core import errors, source
from ltc_dist.fully_sharded.policy import wrap_below
from ltc_dist.fully_sharded.transparent import Transparent
from ltc_dist.spmd.mesh import Mesh, get_global_mesh
from ltc_dist.spmd.sharding import mark_sharding, sharding_of

__all__ = ["SpmdFullyShardedDataParallel"]

ShardOutput = Callable[[Any, Mesh], None]


class SpmdFullyShardedDataParallel(Transparent):
    """A module whose parameters, gradients and optimizer state are divided over the axis 'fsdp' of a mesh.

    Args:
        module: the module; it is moved to the device. Parameters that are marked already stay as they are.
        mesh: a mesh with an axis 'fsdp'; the global one by default.
        shard_output: called with the output and the mesh; divides the output. By default the first tensor of it is
            divided along its first dimension.
        auto_wrap_policy: called with a module, whether to look below it, and its number of elements, as those of
            `torch.distributed.fsdp.wrap`; modules for which it is true are wrapped.
        auto_wrapper_callable: wraps them; this class by default.
        extra_data_axis: another axis that divides batches.

    Raises:
        RuntimeError: the module is wrapped already, or has no `forward`.
        ShardingError: there is no mesh, or it has no such axis.

    Source: `torch_xla.experimental.spmd_fully_sharded_data_parallel`.
    """

    HELD = "_orig_module"

    def __init__(
        self,
        module: nn.Module,
        *,
        mesh: Mesh | None = None,
        shard_output: ShardOutput | None = None,
        auto_wrap_policy: Callable[..., bool] | None = None,
        auto_wrapper_callable: Callable[..., nn.Module] | None = None,
        extra_data_axis: str | None = None,
    ) -> None:
        if isinstance(module, SpmdFullyShardedDataParallel):
            raise RuntimeError(
                "Cannot wrap a module that is already wrapped with FSDP. For nested FSDP, first wrap the inner child "
                "modules before wrapping the outer parent module."
            )
        if type(module).forward is nn.Module.forward:
            raise RuntimeError(
                f"The module wrapped by FSDP *must define a `forward` method*; {type(module).__name__} has none."
            )
        mesh = mesh or get_global_mesh()
        if mesh is None:
            raise errors.ShardingError(
                "No mesh is provided and no global mesh is set. Please provide a mesh.",
                where=source.user_line(),
                next="pass mesh=get_1d_mesh('fsdp'), or call set_global_mesh before",
            )
        if "fsdp" not in (mesh.axis_names or ()):
            raise errors.ShardingError(
                "The mesh must have an axis named 'fsdp'.",
                got=f"axis names {mesh.axis_names}",
                where=source.user_line(),
                next="name the axis that divides parameters 'fsdp': Mesh(ids, shape, ('fsdp', 'model'))",
            )
        if extra_data_axis and extra_data_axis not in (mesh.axis_names or ()):
            raise errors.ShardingError(
                f"The provided {extra_data_axis} axis is not in the mesh.",
                got=f"axis names {mesh.axis_names}",
                where=source.user_line(),
                next="pass one of these names as extra_data_axis",
            )
        super().__init__()
        if auto_wrap_policy is not None:
            wrapper = auto_wrapper_callable or SpmdFullyShardedDataParallel
            wrap = functools.partial(wrapper, mesh=mesh, shard_output=shard_output)
            wrap_below(
                module,
                auto_wrap_policy,
                SpmdFullyShardedDataParallel,
                wrap,
                lambda p: sharding_of(p) is None,
            )
        self._orig_module = module.to(ltc.lazy_device())
        self._mesh = mesh
        for parameter in module.parameters():
            if sharding_of(parameter) is None:
                largest = max(range(parameter.ndim), key=lambda k: parameter.shape[k], default=0)
                mark_sharding(parameter, mesh, _spec(parameter, largest, None))
        self._shard_output = shard_output or functools.partial(_shard_first, axis=extra_data_axis)

    @property
    def module(self) -> nn.Module:
        """The module that is wrapped."""
        return self._orig_module

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        output = self.module(*args, **kwargs)
        self._shard_output(output, self._mesh)
        return output


def _spec(t: torch.Tensor, dim: int, axis: str | None) -> tuple[Any, ...]:
    """A spec that divides one dimension."""
    spec: list[Any] = [None] * t.ndim
    if spec:
        spec[dim] = (axis, "fsdp") if axis else "fsdp"
    return tuple(spec)


def _shard_first(output: Any, mesh: Mesh, axis: str | None) -> None:
    first = output[0] if isinstance(output, tuple) else output
    if isinstance(output, tuple):
        warnings.warn(
            "The output is a tuple, but only the first element is sharded. If this is not intended, please provide "
            "your own shard_output callable.",
            stacklevel=3,
        )
    if not isinstance(first, torch.Tensor):
        raise RuntimeError(
            f"The output type is not supported: {type(output)}. Please provide your own shard_output callable."
        )
    mark_sharding(first, mesh, _spec(first, 0, axis))
