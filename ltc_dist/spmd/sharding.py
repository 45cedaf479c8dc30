"""Marks on tensors: how each is divided over a mesh.

A mark changes no value. It is kept with the tensor object, for whoever asks (`sharding_of`); what decides is where the
tensor's memory lies, which all later values of it keep.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, NoReturn

import torch
from torch import nn
from torch.utils import _pytree as pytree

from ltc_core import errors, source
from ltc_core.api import sharding
from ltc_core.settings import settings
from ltc_core.tensor.lazy_tensor import LazyTensor
from ltc_dist.job.ranks import ranks
from ltc_dist.spmd.mesh import Mesh

__all__ = [
    "MarkShardingFunction",
    "Shard",
    "ShardingSpec",
    "apply_backward_optimization_barrier",
    "check_spec",
    "clear_sharding",
    "divide",
    "is_manual",
    "local_shards",
    "mark_sharding",
    "mark_sharding_with_gradients",
    "note",
    "note_manual",
    "sharding_of",
]

_MARK = "_ltc_sharding"
_MANUAL = "_ltc_is_manual"
_USES = {
    "mark_sharding": "mark_sharding(tensor, mesh, (axis, None))",
    "enable_manual_sharding": "enable_manual_sharding(tensor, (axis, None), mesh=mesh)",
    "disable_manual_sharding": "disable_manual_sharding(tensor, (axis, None), full_shape, mesh=mesh)",
}


def mark_sharding(t: torch.Tensor, mesh: Mesh, partition_spec: Sequence[Any]) -> torch.Tensor:
    """Divide a tensor over a mesh, in place; returns it.

    Args:
        t: a tensor on the device: a parameter, a batch, an activation.
        partition_spec: for each dimension the number or the name of a mesh axis, a tuple of them, or None: each device
            has all of it.

    Raises:
        ShardingError: `mesh` is no mesh, or the spec does not fit the mesh or the tensor.
        DeviceError: `t` is not a tensor on the device.

    Cost: a tensor that is computed is moved at once; for one that is only recorded the compiler is told.

    Source: `torch_xla.distributed.spmd.mark_sharding`. Unlike there, a dimension whose size the axis does not divide
    evenly is not divided, where torch_xla pads it.
    """
    check_spec("mark_sharding", t, mesh, partition_spec)
    _refuse_manual(t)
    sharding.shard(t, mesh.sharding(partition_spec))
    return note(t, mesh, partition_spec)


def note(t: torch.Tensor, mesh: Mesh, partition_spec: Sequence[Any]) -> torch.Tensor:
    """Note how a tensor is divided, for `sharding_of`; returns it."""
    setattr(t, _MARK, (mesh, tuple(partition_spec)))
    return t


def note_manual(t: torch.Tensor) -> torch.Tensor:
    """Note that a tensor is manual; returns it."""
    setattr(t, _MANUAL, True)
    return t


def is_manual(t: torch.Tensor) -> bool:
    """Whether a tensor object was noted as manual."""
    return getattr(t, _MANUAL, False)


def _refuse_manual(t: torch.Tensor) -> None:
    if isinstance(t, torch.Tensor) and is_manual(t):
        raise errors.ShardingError(
            "a manual tensor cannot be divided over a mesh: it is the part of one device",
            got=f"a manual tensor of shape {tuple(t.shape)}",
            where=source.user_line(),
            next="disable_manual_sharding(t, partition_spec, full_shape) divides the whole tensor",
        )


def check_spec(name: str, t: object, mesh: object, spec: object) -> None:
    """Check a mesh and a spec that the function `name` was given.

    Raises:
        ShardingError: it is no mesh, or the spec has no entry for each dimension.
    """
    what = ""
    if not isinstance(mesh, Mesh):
        place = "as its second argument" if name == "mark_sharding" else "as its mesh"
        what = f"{name} takes a Mesh {place}, not {type(mesh).__name__}"
    elif not isinstance(spec, Sequence) or isinstance(spec, str):
        what = f"partition_spec is a tuple with an entry for each dimension, not {spec!r}"
    elif isinstance(t, torch.Tensor) and t.ndim != len(spec):
        what = f"Partition spec length ({len(spec)}) should be equal to the input rank ({t.ndim})."
    if what:
        sizes = f"a tensor of shape {tuple(t.shape)}" if isinstance(t, torch.Tensor) else repr(t)
        raise errors.ShardingError(
            what,
            got=f"{sizes}, partition_spec {spec!r}",
            where=source.user_line(),
            next=f"{_USES[name]}: for each dimension the name or number of a mesh axis, "
            "a tuple of them, or None",
        )


def clear_sharding(t: torch.Tensor) -> torch.Tensor:
    """Remove the mark of a tensor: each device holds the whole tensor. Returns the tensor."""
    _refuse_manual(t)
    found = sharding_of(t)
    if found is not None:
        sharding.shard(t, found[0].sharding([None] * t.ndim))
        delattr(t, _MARK)
    return t


def sharding_of(t: torch.Tensor) -> tuple[Mesh, tuple[Any, ...]] | None:
    """Mesh and spec that a tensor object was marked with, or None."""
    return getattr(t, _MARK, None)


class MarkShardingFunction(torch.autograd.Function):
    """`mark_sharding_with_gradients` as `apply(t, mesh, partition_spec)`.

    Source: `torch_xla.distributed.spmd.xla_sharding.MarkShardingFunction`.
    """

    @staticmethod
    def forward(ctx: Any, t: torch.Tensor, mesh: Mesh, spec: Any) -> torch.Tensor:
        ctx.mesh, ctx.spec = mesh, spec
        return mark_sharding(t.clone(), mesh, spec)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return mark_sharding(gradients[0].clone(), ctx.mesh, ctx.spec), None, None


def mark_sharding_with_gradients(
    t: torch.Tensor, mesh: Mesh, partition_spec: Sequence[Any]
) -> torch.Tensor:
    """A copy of a tensor that is divided over a mesh, and so is its gradient.

    Source: `torch_xla.distributed.spmd.mark_sharding_with_gradients`.
    """
    return MarkShardingFunction.apply(t, mesh, tuple(partition_spec))  # type: ignore[no-any-return, no-untyped-call]


@dataclasses.dataclass(frozen=True)
class Shard:
    """A part of a tensor: the number of its device, a copy of the part on the CPU, and where the part begins."""

    device: int
    data: torch.Tensor
    offsets: tuple[int, ...]


def local_shards(t: torch.Tensor) -> list[Shard]:
    """The parts of a tensor on the devices of this process; of a manual one each device's value.

    Cost: waits for the tensor.
    """
    parts = sharding.parts_of(t, takes_manual=True)
    return [Shard(part.device, part.read(), part.offsets) for part in parts]


def _write_items(t: LazyTensor) -> NoReturn:
    """PyTorch's planner asks a tensor for its parts by a method of this name, before any process writes.

    Raises:
        CheckpointError: several processes have parts of the tensor, so no process can write it by itself.
        AttributeError: the tensor has no such method: it is written whole.
    """
    if settings.spmd and ranks().world_size > 1:
        if any(part.sizes != tuple(t.shape) for part in sharding.parts_of(t)):
            raise errors.CheckpointError(
                "torch.distributed.checkpoint cannot write a tensor that several processes have parts of",
                got=f"a divided tensor of shape {tuple(t.shape)}, and PyTorch's own planner",
                where=source.user_line(),
                next="pass planner=SPMDSavePlanner(), from ltc_dist.spmd.planners: each process writes its parts",
            )
    raise AttributeError("__create_write_items__")


LazyTensor.__create_write_items__ = property(_write_items)  # type: ignore[attr-defined]


@dataclasses.dataclass(frozen=True)
class ShardingSpec:
    """How the batches of a loader are divided.

    Attributes:
        mesh: the mesh.
        partition_spec: as for `mark_sharding`.
        minibatch: with `use_spmd` in a job of several processes each loads its own part of the batch: these parts
            become one tensor, of the size of all of them together. Otherwise each process loads the whole batch.

    Source: `torch_xla.distributed.spmd.ShardingSpec`.
    """

    mesh: Mesh
    partition_spec: Sequence[Any]
    minibatch: bool = False

    def can_apply(self, t: torch.Tensor) -> bool:
        """Whether a tensor has as many dimensions as the spec."""
        return t.ndim == len(self.partition_spec)

    def apply(self, t: torch.Tensor) -> None:
        """Divide a tensor, which is whole in each process."""
        mark_sharding(t, self.mesh, self.partition_spec)

    def divided(self, t: torch.Tensor) -> torch.Tensor:
        """The tensor of a batch, divided; a new one if each process has a part of it.

        Raises:
            MinibatchError: each process has a part of the batch, and its devices cannot have equal parts of that.
        """
        count = self.mesh.size() // max(ranks().world_size, 1) or 1
        if self.minibatch and t.ndim and t.shape[0] % count:
            raise errors.MinibatchError(
                "When minibatch is configured, the per-host batch size must be divisible by "
                "local runtime device count. "
                f"Per host input data shape = {tuple(t.shape)}, local_runtime_device_count = {count}",
                where=source.user_line(),
                next="drop the last batch of the loader (drop_last=True), or pass minibatch=False",
            )
        if self.minibatch and settings.spmd and ranks().world_size > 1:
            whole = sharding.join(t, self.mesh.sharding(self.partition_spec))
            setattr(whole, _MARK, (self.mesh, tuple(self.partition_spec)))
            return whole
        self.apply(t)
        return t


def divide(batch: Any, spec: ShardingSpec | dict[str, ShardingSpec]) -> Any:
    """Divide the tensors of a batch whose number of dimensions fits; returns the batch.

    A dict of specs has one for each name.

    Raises:
        ShardingError: the specs are a dict, and the batch is none.
        MissingShardingError: the specs are a dict, and the batch has tensors of names without a spec.
    """
    if isinstance(spec, dict):
        _check_names(batch, spec)
        for name, own in spec.items():
            if name in batch and own is not None:
                batch[name] = divide(batch[name], own)
        return batch

    def divided(t: Any) -> Any:
        return spec.divided(t) if isinstance(t, torch.Tensor) and spec.can_apply(t) else t

    return pytree.tree_map(divided, batch)


def _check_names(batch: Any, specs: dict[str, ShardingSpec]) -> None:
    if not isinstance(batch, dict):
        raise errors.ShardingError(
            "input batch should be a dict when input sharding is a dict.",
            got=f"a {type(batch).__name__}",
            where=source.user_line(),
            next="pass one ShardingSpec as input_sharding, for all tensors of its number of dimensions",
        )
    missing = [
        name
        for name, value in batch.items()
        if name not in specs and any(isinstance(t, torch.Tensor) for t in pytree.tree_leaves(value))
    ]
    if missing:
        raise errors.MissingShardingError(
            f"Keys: {missing} are missing from input_sharding.",
            got=f"specs for {list(specs)}",
            where=source.user_line(),
            next="give each name a ShardingSpec, or None, which leaves its tensors whole",
        )


def apply_backward_optimization_barrier(m: nn.Module) -> None:
    """Accepted for old scripts: XLA schedules the collectives of backward by itself."""
    del m
