"""A tree of tensors as the files of one directory: `Plan` writes one, `read_directory` reads it back.

The directory holds index.json and t_00000.safetensors, t_00001.safetensors, ... Tensors are fetched, written and
released one at a time. `streaming` and `ltc_dist.checkpoint` put a directory in the place of an older one.
"""

import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from ltc_core.errors import CheckpointError, CheckpointFormatError, listed
from ltc_core.serialization.cpu_copy import cpu_copy, is_on_device, memory_key
from ltc_core.serialization.index import INDEX_FILE, Index, read_index, write_index
from ltc_core.serialization.nodes import DTYPES, decode, encode
from ltc_core.serialization.tensor_file import (
    TensorEntry,
    check_size,
    open_file,
    read_tensor,
    why_not_storable,
    write_tensor,
)

__all__ = ["Plan", "Reader", "StoredTensor", "check_directory", "open_directory", "read_directory"]


class Plan:
    """The tensors of a tree to write, each once, in the order of the tree.

    Args:
        name: of the tree, for errors: "data" in data['model'][0].

    Attributes:
        nbytes: of all tensors.

    Raises:
        CheckpointFormatError: something in the tree has no place in the format; names it.
    """

    def __init__(self, tree: object, name: str = "data") -> None:
        self.nbytes = 0
        self._tensors: list[torch.Tensor] = []
        self._numbers: dict[tuple[object, bool, bool], int] = {}
        self._tree = encode(tree, self._place, name)

    def _place(self, tensor: torch.Tensor, where: str) -> int:
        """Number of a tensor in the directory; a tensor that the format cannot hold is refused."""
        reason = why_not_storable(tensor, is_on_device(tensor))
        if reason:
            raise CheckpointFormatError(
                f"cannot save {where}: {reason.partition('; ')[0]}",
                got=f"{type(tensor).__name__} of {tensor.dtype} on {tensor.device}",
                next=f"{reason.partition('; ')[2]}, or save with ltc_core.save, which pickles.",
            )
        is_parameter = isinstance(tensor, torch.nn.Parameter)
        key = memory_key(tensor), tensor.requires_grad, is_parameter
        if key not in self._numbers:
            self._numbers[key] = len(self._tensors)
            self._tensors.append(tensor)
            self.nbytes += tensor.numel() * tensor.itemsize
        return self._numbers[key]

    def write(self, directory: str, progress: Callable[[], None] = lambda: None) -> str:
        """Write into an empty directory; returns the digest of all of it.

        Args:
            progress: called for each piece of some megabytes that is written.

        Raises:
            OSError: from the operating system, as it is.

        Cost: one sync, if tensors are on a device; host memory of the largest tensor.
        """
        entries = [
            write_tensor(directory, number, cpu_copy(tensor), progress)
            for number, tensor in enumerate(self._tensors)
        ]
        return write_index(directory, Index(self._tree, tuple(entries)))


def check_directory(directory: int) -> Index:
    """Read the index of the directory with this descriptor, and find all files that are missing or cut short.

    Raises:
        CheckpointError: it is incomplete or damaged; names files and bytes.
        CheckpointFormatError: it is no such directory, or of another version.
    """
    with open_file(directory, INDEX_FILE) as file:
        index = read_index(file)
    wrong = []
    for entry in index.tensors:
        try:
            with open_file(directory, entry.file) as file:
                check_size(file, entry)
        except CheckpointFormatError:
            raise
        except CheckpointError as error:
            wrong.append(error.what)
    if wrong:
        raise CheckpointError(listed(wrong))
    return index


@dataclass(frozen=True)
class StoredTensor:
    """A tensor that is in a file: it is known, and has not been read.

    Attributes:
        read: returns the tensor; sizes and the digest are checked then. Raises as `Reader.read`.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    read: Callable[[], torch.Tensor]


class Reader:
    """Reads a tree, or parts of it, from the directory with this descriptor; only the requested parts are read.

    Sizes are checked before anything is allocated, digests before anything is returned.

    Attributes:
        digest: of the directory, as `Plan.write` returned it.

    Raises:
        CheckpointError: it is incomplete or damaged; names files and bytes.
        CheckpointFormatError: it is no such directory, or of another version.
        OSError: from the operating system, as it is.
    """

    def __init__(self, directory: int) -> None:
        self._directory = directory
        self._index = check_directory(directory)
        self._loaded: dict[int, torch.Tensor] = {}
        self.digest = self._index.digest

    def keys(self, *path: str) -> list[str]:
        """Keys of the dict at a path of keys; none if there is no dict with strings as its keys."""
        node = self._node(path)
        is_dict = isinstance(node, dict) and node.keys() == {"dict"}
        return list(node["dict"]) if is_dict else []

    def read(self, *path: str) -> Any:
        """Value at a path of keys, with its tensors; a tensor that stands at several places is read once.

        Raises:
            CheckpointFormatError: there is nothing.
        """
        return decode(self._found(path), self._tensor)

    def outline(self, reopen: Callable[[TensorEntry], torch.Tensor], *path: str) -> Any:
        """Value at a path of keys, with a StoredTensor for each tensor; no file of a tensor is read.

        Args:
            reopen: reads the tensor of an entry, also when the descriptor of this directory is closed.

        Raises:
            CheckpointFormatError: there is nothing.
        """

        def stored(number: Any) -> Any:
            entry = self._entry(number)
            return StoredTensor(entry.shape, DTYPES[entry.dtype], lambda: reopen(entry))

        return decode(self._found(path), stored)

    def _found(self, path: tuple[str, ...]) -> Any:
        node = self._node(path)
        if node is _NOTHING:
            raise CheckpointFormatError(f"{INDEX_FILE}: it has no {'/'.join(path)}")
        return node

    def _node(self, path: tuple[str, ...]) -> Any:
        node = self._index.tree
        for key in path:
            is_dict = isinstance(node, dict) and node.keys() == {"dict"}
            inner = node["dict"] if is_dict else None
            if not isinstance(inner, dict) or key not in inner:
                return _NOTHING
            node = inner[key]
        return node

    def _tensor(self, number: Any) -> torch.Tensor:
        entry = self._entry(number)
        if number not in self._loaded:
            self._loaded[number] = read_tensor(self._directory, entry)
        return self._loaded[number]

    def _entry(self, number: Any) -> TensorEntry:
        tensors = self._index.tensors
        if type(number) is not int or not 0 <= number < len(tensors):
            raise CheckpointFormatError(
                f"{INDEX_FILE}: there is no tensor {number!r:.200}", got=f"{len(tensors)} tensors"
            )
        return tensors[number]


_NOTHING = object()


def read_directory(directory: int) -> Any:
    """Read the whole tree from the directory with this descriptor; see `Reader` for what is checked and raised."""
    return Reader(directory).read()


def open_directory(path: str) -> int:
    """Open a directory for reading; returns its descriptor."""
    return os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
