"""Planners of `torch.distributed.checkpoint` that write and read tensors by the parts of a mesh.

The files are PyTorch's own: whoever reads a checkpoint finds the parts of a tensor with their offsets. Not imported by
`ltc_dist.spmd`, because PyTorch's package takes a second.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    LoadPlan,
    ReadItem,
    SavePlan,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list
from torch.utils import _pytree as pytree

import ltc_core as ltc
from ltc_core import source
from ltc_core.api.sharding import NewParts, Part, parts_of
from ltc_core.errors import CheckpointError, CheckpointFormatError
from ltc_core.settings import settings
from ltc_dist.job.ranks import ranks
from ltc_dist.spmd.sharding import is_manual

__all__ = ["CpuShards", "SPMDLoadPlanner", "SPMDSavePlanner", "is_divided"]

# Parts of a tensor that this process writes, by their offsets.
_Own = dict[tuple[int, ...], Part]


@dataclasses.dataclass
class CpuShards:
    """Copies on the CPU of what this process's devices have of a divided tensor; in its place in a state dict.

    Attributes:
        shards: one for each device, with `data`, `indices`, and `replica_id`, which is 0 for one
            of the copies of a part on all devices.
        global_shape: of the tensor.
    """

    shards: list[Any]
    global_shape: torch.Size

    @property
    def shape(self) -> torch.Size:
        return self.global_shape

    @property
    def dtype(self) -> torch.dtype:
        return self.shards[0].data.dtype  # type: ignore[no-any-return]

    def parts(self) -> list[Part]:
        return [
            Part(
                device, _begin(shard), tuple(shard.data.shape), not shard.replica_id, _const(shard)
            )
            for device, shard in enumerate(self.shards)
        ]


def _begin(shard: Any) -> tuple[int, ...]:
    whole = shard.indices is ...
    return (0,) * shard.data.ndim if whole else tuple(one.start for one in shard.indices)


def _const(shard: Any) -> Callable[[], torch.Tensor]:
    return lambda: shard.data


def is_divided(value: Any) -> bool:
    """Whether devices of this process have parts of a value of a state dict.

    Cost: for a tensor on the device, cuts and waits for it.
    """
    if isinstance(value, CpuShards):
        return True
    if not ltc.is_lazy_tensor(value) or is_manual(value):
        return False
    return any(part.sizes != tuple(value.shape) for part in parts_of(value))


class _ByKind:
    """Which values of a planner's state dict are divided."""

    state_dict: dict[str, Any]

    @property
    def sharded_state_dict(self) -> dict[str, Any]:
        return {name: value for name, value in self.state_dict.items() if is_divided(value)}

    @property
    def unsharded_state_dict(self) -> dict[str, Any]:
        return {name: value for name, value in self.state_dict.items() if not is_divided(value)}


class SPMDSavePlanner(_ByKind, DefaultSavePlanner):
    """Writes each part of a tensor once: a process writes parts that its devices have, and reads one after the other.

    Equal parts of several devices are shared out among them. A tensor that is not divided is written by rank 0.

    Raises:
        CheckpointError: the processes have one mesh, but no process group.

    Cost: cuts, and waits for the tensors; one part after the other is copied to the CPU.

    Source: `torch_xla.experimental.distributed_checkpoint.SPMDSavePlanner`.
    """

    def __init__(self) -> None:
        super().__init__(dedup_save_to_lowest_rank=True)
        self._own: dict[str, _Own] = {}
        self._staged: dict[str, _Own] = {}

    def set_up_planner(
        self, state_dict: dict[str, Any], storage_meta: Any = None, is_coordinator: bool = False
    ) -> None:
        stand_ins: dict[int, tuple[torch.Tensor, CpuShards]] = {}

        def stand_in(leaf: Any) -> Any:
            if not isinstance(leaf, CpuShards):
                return leaf
            tensor = torch.empty(leaf.shape, device="meta")  # a dict of tensors is flattened
            stand_ins[id(tensor)] = tensor, leaf
            return tensor

        super().set_up_planner(pytree.tree_map(stand_in, state_dict), storage_meta, is_coordinator)
        self.state_dict = {
            name: stand_ins[id(value)][1] if id(value) in stand_ins else value
            for name, value in self.state_dict.items()
        }

    def stage(self, state_dict: dict[str, Any]) -> None:
        """Copy what this process writes of tensors on the device; the next save of the state dict writes the copies.

        Cost: cuts, waits for the tensors, and copies this process's parts to the CPU.
        """
        self.set_up_planner(state_dict)
        self._staged = {
            name: {offsets: _read_now(part) for offsets, part in own.items()}
            for name, own in self._found().items()
        }

    def create_local_plan(self) -> SavePlan:
        _check_group()
        self._own, self._staged = self._staged or self._found(), {}
        everything = self.state_dict
        self.state_dict = {k: v for k, v in everything.items() if k not in self._own}
        plan = super().create_local_plan()
        self.state_dict = everything
        items = [
            _write_item(name, everything[name], part)
            for name, own in self._own.items()
            for part in own.values()
        ]
        self.plan = dataclasses.replace(plan, items=[*plan.items, *items])
        return self.plan

    def lookup_object(self, index: MetadataIndex) -> Any:
        own = self._own.get(index.fqn)
        return (
            super().lookup_object(index) if own is None else own[tuple(index.offset or ())].read()
        )

    def _found(self) -> dict[str, _Own]:
        """Parts to write of each tensor on the device. All processes plan a whole one: PyTorch lets rank 0 write it."""
        return {
            name: {
                part.offsets: part
                for part in (value.parts() if isinstance(value, CpuShards) else parts_of(value))
                if part.is_chosen or part.sizes == tuple(value.shape)
            }
            for name, value in self.state_dict.items()
            if isinstance(value, CpuShards) or ltc.is_lazy_tensor(value)
        }


def _check_group() -> None:
    if not settings.spmd or ranks().world_size == 1:
        return
    there = dist.get_world_size() if dist.is_initialized() else 0
    if there != ranks().world_size:
        raise CheckpointError(
            f"a checkpoint of {ranks().world_size} processes needs a process group of all of them",
            got=f"one of {there}" if there else "none",
            where=source.user_line(),
            next="call torch.distributed.init_process_group('gloo') before",
        )


def _read_now(part: Part) -> Part:
    values = part.read()
    return dataclasses.replace(part, read=lambda: values)


def _write_item(name: str, tensor: torch.Tensor | CpuShards, part: Part) -> WriteItem:
    chunk = ChunkStorageMetadata(torch.Size(part.offsets), torch.Size(part.sizes))
    is_whole = chunk.sizes == tensor.shape
    return WriteItem(
        index=MetadataIndex(name, chunk.offsets, part.device),
        type=WriteItemType.TENSOR if is_whole else WriteItemType.SHARD,
        tensor_data=TensorWriteData(
            chunk, TensorProperties(dtype=tensor.dtype), torch.Size(tensor.shape)
        ),
    )


class SPMDLoadPlanner(_ByKind, DefaultLoadPlanner):
    """Reads into tensors of the state dict what this process's devices have of them; they stay divided as they are.

    It does not matter how the tensors were divided when they were saved.

    Raises:
        CheckpointFormatError: the checkpoint has not all of a tensor.

    Source: `torch_xla.experimental.distributed_checkpoint.SPMDLoadPlanner`.
    """

    def __init__(self) -> None:
        super().__init__()
        self._new: dict[str, NewParts] = {}
        self._read: dict[MetadataIndex, torch.Tensor] = {}  # parts that are being read
        self._num_left: dict[MetadataIndex, int] = {}  # elements of each part that are not read yet

    def create_local_plan(self) -> LoadPlan:
        plan = super().create_local_plan()
        assert self.metadata is not None
        saved = self.metadata.state_dict_metadata
        self._new = {
            name: NewParts(value)
            for name, value in self.state_dict.items()
            if NewParts.takes_parts(value) and isinstance(saved[name], TensorStorageMetadata)
        }
        # The others come first: writing them is recorded, and so has one order in all processes.
        items = [item for item in plan.items if item.dest_index.fqn not in self._new]
        for name, new in self._new.items():
            items += self._read_items(name, new, saved[name])
        return dataclasses.replace(plan, items=items)

    def _read_items(self, name: str, new: NewParts, saved: Any) -> list[ReadItem]:
        chunks = [
            ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes))
            for offsets, sizes in new.sizes.items()
        ]
        for chunk in chunks:
            self._num_left[MetadataIndex(name, chunk.offsets)] = math.prod(chunk.sizes)
        items = create_read_items_for_chunk_list(name, saved, chunks)
        there = sum(math.prod(item.lengths) for item in items)
        asked = sum(math.prod(chunk.sizes) for chunk in chunks)
        if there != asked:
            raise CheckpointFormatError(
                f"the checkpoint has not all of the tensor {name!r}",
                got=f"{there} of the {asked} elements that this process reads",
                next="save it again; each part has to be written once",
            )
        return items

    def lookup_tensor(self, index: MetadataIndex) -> torch.Tensor:
        new = self._new.get(index.fqn)
        if new is None:
            return super().lookup_tensor(index)
        if index not in self._read:
            dtype = self.state_dict[index.fqn].dtype
            self._read[index] = torch.empty(new.sizes[tuple(index.offset or ())], dtype=dtype)
        return self._read[index]

    def commit_tensor(self, read_item: ReadItem, tensor: torch.Tensor) -> None:
        index = read_item.dest_index
        if index.fqn in self._new:
            self._num_left[index] -= math.prod(read_item.lengths)
            if self._num_left[index] == 0:
                self._new[index.fqn].put(tuple(index.offset or ()), self._read.pop(index))
