"""The index.json of a streaming checkpoint: format, digest, tree and one entry for each tensor.

    {"format": "ltc-xser", "version": 1, "digest": "...", "body": {"tree": ..., "tensors": [...]}}

The digest covers the body, so that a flipped bit in a number of the tree is found as well as one in
a tensor. Reading checks everything that is used later: file names, dtypes, shapes and sizes. The
directory around it is written and read by `streaming`.
"""

import hashlib
import json
import math
import os
import re
from dataclasses import dataclass
from typing import Any, BinaryIO

from ltc_core.errors import CheckpointError, CheckpointFormatError, listed
from ltc_core.serialization.nodes import DTYPES, Node
from ltc_core.serialization.tensor_file import TensorEntry, stored_as

FORMAT = "ltc-xser"
VERSION = 1
INDEX_FILE = "index.json"
_FILE_NAME = re.compile(r"t_[0-9]{5,9}\.safetensors")
_DIGEST = re.compile(r"[0-9a-f]{64}")
_START = f'{{"format":"{FORMAT}"'.encode("ascii")


@dataclass(frozen=True)
class Index:
    """The content of index.json."""

    tree: Node
    tensors: tuple[TensorEntry, ...]


def is_checkpoint_file(name: str) -> bool:
    """Tell whether a file of this name belongs to a streaming checkpoint."""
    return name == INDEX_FILE or _FILE_NAME.fullmatch(name) is not None


def starts_like_index(path: str) -> bool:
    """Tell whether the file `path` is an index, damaged or of another version though it may be."""
    if os.path.islink(path) or not os.path.isfile(path):
        return False
    with open(path, "rb") as file:
        return file.read(len(_START)) == _START


def write_index(directory: str, index: Index) -> None:
    """Write `index` into `directory`, which has all its tensors already."""
    tensors = [{**vars(entry), "shape": list(entry.shape)} for entry in index.tensors]
    body = _dump({"tree": index.tree, "tensors": tensors})
    content = {"format": FORMAT, "version": VERSION, "digest": _digest(body)}
    text = f'{_dump(content)[:-1]},"body":{body}}}\n'
    with open(os.path.join(directory, INDEX_FILE), "x", encoding="ascii") as file:
        file.write(text)


def _dump(value: Any) -> str:
    return json.dumps(value, separators=(",", ":"), ensure_ascii=True, allow_nan=False)


def _digest(text: str) -> str:
    return hashlib.blake2b(text.encode("ascii"), digest_size=32).hexdigest()


def read_index(file: BinaryIO) -> Index:
    """Read and check an index.

    Raises:
        CheckpointFormatError: it is no index, of another version, or says what cannot be.
        CheckpointError: it is not what was written.
    """
    content = _parse(file.read())
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        raise CheckpointFormatError(f"{INDEX_FILE}: not the index of a streaming checkpoint")
    version = content.get("version")
    if version != VERSION or isinstance(version, bool):
        raise CheckpointFormatError(
            f"{INDEX_FILE}: format version {version!r}, and this library reads {VERSION}",
            next="read it with the library that wrote it, or a newer one.",
        )
    body = content.get("body")
    try:
        unchanged = _digest(_dump(body)) == content.get("digest")
    except (ValueError, RecursionError):
        unchanged = False
    if not unchanged:
        raise CheckpointError(f"{INDEX_FILE}: its content is not what was written")
    if not isinstance(body, dict) or not isinstance(body.get("tensors"), list):
        raise CheckpointFormatError(f"{INDEX_FILE}: it has no list of tensors")
    tensors = tuple(_entry(i, fields) for i, fields in enumerate(body["tensors"]))
    return Index(body.get("tree"), tensors)


def _parse(text: bytes) -> Any:
    try:
        return json.loads(text, object_pairs_hook=_unique, parse_constant=_no_constant)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(
            f"{INDEX_FILE}: it is no JSON ({len(text)} bytes)", got=str(error)
        ) from error


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    made = dict(pairs)
    if len(made) != len(pairs):
        raise ValueError(f"a key stands twice among {listed(key for key, _ in pairs)}")
    return made


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is no JSON")


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
