"""Tensors that lie on the devices of several processes: each process writes the parts that it has.

In what rank 0 writes for all, a note with a number stands for such a tensor, and a list has the shapes. A process that
reads puts the parts together, so a job of any size and any mesh reads them. Used by `checkpointer` and `reading`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any

import torch

from ltc_core.api.sharding import Part, parts_of
from ltc_core.errors import CheckpointError, CheckpointFormatError
from ltc_core.serialization.cpu_copy import CpuCopies, is_on_device, memory_key
from ltc_core.serialization.directory import StoredTensor
from ltc_core.serialization.tree import leaves, map_leaves

__all__ = ["Divider", "put_together"]

_NOTE = "__divided_tensor__"


class Divider:
    """Takes the divided tensors out of trees; the rest comes to the CPU of the process that writes it.

    Args:
        writes_rest: whether this process does. Another one gets None for each tensor that is not divided.

    Attributes:
        tensors: what rank 0 writes of each tensor that was taken out: its shape, and an empty tensor of its kind.
        parts: what this process writes of them: number of the tensor, offsets in it, values.
    """

    def __init__(self, writes_rest: bool) -> None:
        self._writes_rest = writes_rest
        self.tensors: list[dict[str, Any]] = []
        self.parts: list[dict[str, Any]] = []
        self._copies = CpuCopies()
        self._found: dict[object, tuple[torch.Tensor, int]] = {}  # a key is the id of what it holds

    def rest_of(self, tree: Any) -> Any:
        """The tree with a note for each divided tensor. All processes have to come here with equal trees.

        Cost: cuts, and waits for the tensors; copies this process's parts to the CPU.
        """
        return map_leaves(lambda leaf: isinstance(leaf, torch.Tensor), self._taken, tree)

    def _taken(self, tensor: torch.Tensor) -> Any:
        if not is_on_device(tensor):
            return tensor
        key = memory_key(tensor)
        if key not in self._found:
            own = parts_of(tensor)
            if any(part.sizes == tuple(tensor.shape) for part in own):  # each process has all of it
                return self._copies(tensor) if self._writes_rest else None
            self._found[key] = tensor, self._note(tensor, own)
        return {_NOTE: self._found[key][1]}

    def _note(self, tensor: torch.Tensor, own: Iterable[Part]) -> int:
        number = len(self.tensors)
        kind = torch.empty(0, dtype=tensor.dtype, requires_grad=tensor.requires_grad)
        if isinstance(tensor, torch.nn.Parameter):
            kind = torch.nn.Parameter(kind, requires_grad=tensor.requires_grad)
        self.tensors.append({"shape": list(tensor.shape), "kind": kind})
        self.parts += [
            {"tensor": number, "offsets": list(part.offsets), "values": part.read()}
            for part in own
            if part.is_chosen
        ]
        return number


def put_together(
    tree: Any,
    tensors: list[dict[str, Any]],
    parts: Callable[[set[int]], Iterable[tuple[str, dict[str, Any]]]],
) -> Any:
    """The tree with each divided tensor in the place of its notes, on the CPU.

    Args:
        tensors: as `Divider.tensors`.
        parts: yields the parts of the tensors with these numbers, as in `Divider.parts` but with a StoredTensor each,
            and the name of who wrote them.

    Raises:
        CheckpointError: a tensor is not there as a whole.

    Cost: host memory of the tensors, and of one part.
    """
    numbers = {leaf[_NOTE] for leaf in leaves(_is_note, tree)}
    if not numbers:
        return tree
    if not numbers <= set(range(len(tensors))) or not all(map(_is_described, tensors)):
        raise CheckpointFormatError("index.json: it does not describe a divided tensor that it has")
    wholes = {k: _empty(tensors[k]) for k in numbers}
    num_left = {k: whole.numel() for k, whole in wholes.items()}
    for writer, part in parts(numbers):
        number, values = part["tensor"], part["values"]
        region = _region(wholes[number], part["offsets"], values, writer)
        wholes[number].data[region] = values.read()
        num_left[number] -= math.prod(values.shape)
    for number, left in num_left.items():
        if left:
            raise CheckpointError(
                f"a divided tensor of shape {list(wholes[number].shape)} is not there as a whole",
                got=f"{wholes[number].numel() - left} of {wholes[number].numel()} elements",
            )
    return map_leaves(_is_note, lambda leaf: wholes[leaf[_NOTE]], tree)


def _is_note(leaf: Any) -> bool:
    return type(leaf) is dict and leaf.keys() == {_NOTE} and type(leaf[_NOTE]) is int


def _is_described(tensor: Any) -> bool:
    if type(tensor) is not dict or tensor.keys() != {"shape", "kind"}:
        return False
    shape = tensor["shape"]
    are_sizes = type(shape) is list and all(type(size) is int and size >= 0 for size in shape)
    return are_sizes and isinstance(tensor["kind"], torch.Tensor)


def _empty(described: dict[str, Any]) -> torch.Tensor:
    kind = described["kind"]
    found = torch.empty(described["shape"], dtype=kind.dtype)
    if isinstance(kind, torch.nn.Parameter):
        return torch.nn.Parameter(found, requires_grad=kind.requires_grad)
    return found.requires_grad_(kind.requires_grad)


def _region(
    whole: torch.Tensor, offsets: list[int], values: StoredTensor, writer: str
) -> tuple[slice, ...]:
    region = tuple(
        slice(start, start + size) for start, size in zip(offsets, values.shape, strict=False)
    )
    fits = len(region) == whole.dim() and all(
        0 <= along.start and along.stop <= size
        for along, size in zip(region, whole.shape, strict=True)
    )
    if not fits or values.dtype is not whole.dtype:
        raise CheckpointFormatError(f"{writer}/index.json: a part does not fit its tensor")
    return region
