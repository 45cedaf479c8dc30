"""The index.json of a streaming checkpoint: the tree, and one entry for each tensor.

    {"format": "ltc-xser", "version": 1, "digest": "...", "body": {"tree": ..., "tensors": [...]}}

It is a `sealed` file, so that a flipped bit is found in the tree as well as in a tensor. Reading checks everything
that is used later: file names, dtypes, shapes and sizes. `directory` writes and reads it.
"""

import math
import os
import re
from dataclasses import dataclass
from typing import Any, BinaryIO

from ltc_core.errors import CheckpointFormatError
from ltc_core.serialization.nodes import DTYPES, Node
from ltc_core.serialization.sealed import read_sealed, starts_like, write_sealed
from ltc_core.serialization.tensor_file import TensorEntry, stored_as

FORMAT = "ltc-xser"
VERSION = 1
INDEX_FILE = "index.json"
_FILE_NAME = re.compile(r"t_[0-9]{5,9}\.safetensors")
_DIGEST = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True)
class Index:
    """The content of index.json, and its digest once it is in a file."""

    tree: Node
    tensors: tuple[TensorEntry, ...]
    digest: str = ""


def is_checkpoint_file(name: str) -> bool:
    """Whether a file of this name belongs to a streaming checkpoint."""
    return name == INDEX_FILE or _FILE_NAME.fullmatch(name) is not None


def starts_like_index(path: str) -> bool:
    """Whether the file `path` is an index, perhaps damaged or of another version."""
    return starts_like(path, FORMAT)


def write_index(directory: str, index: Index) -> str:
    """Write `index` into `directory`, which has all tensors already; returns its digest."""
    tensors = [{**vars(entry), "shape": list(entry.shape)} for entry in index.tensors]
    body = {"tree": index.tree, "tensors": tensors}
    return write_sealed(os.path.join(directory, INDEX_FILE), FORMAT, VERSION, body)


def read_index(file: BinaryIO) -> Index:
    """Read and check an index.

    Raises:
        CheckpointFormatError: it is no index, of another version, or inconsistent.
        CheckpointError: it is not what was written.
    """
    body, digest = read_sealed(file, INDEX_FILE, FORMAT, VERSION)
    if not isinstance(body, dict) or not isinstance(body.get("tensors"), list):
        raise CheckpointFormatError(f"{INDEX_FILE}: it has no list of tensors")
    tensors = tuple(_entry(i, fields) for i, fields in enumerate(body["tensors"]))
    return Index(body.get("tree"), tensors, digest)


def _entry(number: int, fields: Any) -> TensorEntry:
    """Check what the index says of tensor `number`; a name that leaves the directory is refused."""
    wrong = _what_is_wrong(fields)
    if wrong:
        raise CheckpointFormatError(
            f"{INDEX_FILE}: tensor {number} has {wrong}",
            next="the checkpoint was not written by this library; do not use it.",
        )
    entry = TensorEntry(**{**fields, "shape": tuple(fields["shape"])})
    dtype, shape = entry.stored()
    if math.prod(shape) * dtype.itemsize > entry.nbytes:
        raise CheckpointFormatError(
            f"{INDEX_FILE}: tensor {number} has a shape of more than its {entry.nbytes} bytes",
            got=f"{entry.dtype}{list(entry.shape)}",
        )
    return entry


def _what_is_wrong(fields: Any) -> str:
    if not isinstance(fields, dict) or fields.keys() != TensorEntry.__annotations__.keys():
        return "other fields than " + ", ".join(TensorEntry.__annotations__)
    dtype = DTYPES.get(str(fields["dtype"]))
    checks = {
        "file": _matches(_FILE_NAME, fields["file"]),
        "dtype": dtype is not None,
        "shape": isinstance(fields["shape"], list) and all(map(_is_size, fields["shape"])),
        "stored_as": dtype is not None and fields["stored_as"] == stored_as(dtype),
        "nbytes": _is_size(fields["nbytes"]),
        "digest": _matches(_DIGEST, fields["digest"]),
        "requires_grad": isinstance(fields["requires_grad"], bool),
        "parameter": isinstance(fields["parameter"], bool),
    }
    for name, legal in checks.items():
        if not legal:
            return f"an illegal {name}: {fields[name]!r:.200}"
    return ""


def _matches(pattern: re.Pattern[str], value: Any) -> bool:
    return isinstance(value, str) and pattern.fullmatch(value) is not None


def _is_size(value: Any) -> bool:
    return type(value) is int and 0 <= value < 1 << 63
