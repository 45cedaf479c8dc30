"""JSON files that verify themselves: the name of a format, its version, a body and the digest of the body.

    {"format": "ltc-xser", "version": 1, "digest": "...", "body": ...}

Reading finds a flipped bit, a duplicate key, and a file of another program or version. `index` and
`ltc_dist.checkpoint` define their bodies.
"""

import hashlib
import json
import os
from typing import Any, BinaryIO

from ltc_core.errors import CheckpointError, CheckpointFormatError, listed

__all__ = ["read_sealed", "starts_like", "write_sealed"]


def write_sealed(path: str, kind: str, version: int, body: Any) -> str:
    """Write a new file; returns the digest of its body.

    Args:
        body: what the json module writes, without infinities.
    """
    text = _dump(body)
    digest = _digest(text)
    head = _dump({"format": kind, "version": version, "digest": digest})
    with open(path, "x", encoding="ascii") as file:
        file.write(f'{head[:-1]},"body":{text}}}\n')
    return digest


def read_sealed(file: BinaryIO, name: str, kind: str, version: int) -> tuple[Any, str]:
    """Return the body of a file, and its digest.

    Args:
        name: of the file, for errors.

    Raises:
        CheckpointFormatError: it is of another format or version.
        CheckpointError: it is not what was written.
    """
    content = _parse(file.read(), name)
    if not isinstance(content, dict) or content.get("format") != kind:
        raise CheckpointFormatError(f"{name}: not a file of the format {kind}")
    found = content.get("version")
    if found != version or isinstance(found, bool):
        raise CheckpointFormatError(
            f"{name}: format version {found!r}, and this library reads {version}",
            next="read it with the library that wrote it, or a newer one.",
        )
    body = content.get("body")
    try:
        digest = _digest(_dump(body))
    except (ValueError, RecursionError):
        digest = ""
    if not digest or digest != content.get("digest"):
        raise CheckpointError(f"{name}: its content is not what was written")
    return body, digest


def starts_like(path: str, kind: str) -> bool:
    """Whether a file is of the format, perhaps damaged or of another version."""
    if os.path.islink(path) or not os.path.isfile(path):
        return False
    start = f'{{"format":"{kind}"'.encode("ascii")
    with open(path, "rb") as file:
        return file.read(len(start)) == start


def _dump(value: Any) -> str:
    return json.dumps(value, separators=(",", ":"), ensure_ascii=True, allow_nan=False)


def _digest(text: str) -> str:
    return hashlib.blake2b(text.encode("ascii"), digest_size=32).hexdigest()


def _parse(text: bytes, name: str) -> Any:
    try:
        return json.loads(text, object_pairs_hook=_unique, parse_constant=_no_constant)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(
            f"{name}: it is no JSON ({len(text)} bytes)", got=str(error)
        ) from error


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    made = dict(pairs)
    if len(made) != len(pairs):
        raise ValueError(f"a key stands twice among {listed(key for key, _ in pairs)}")
    return made


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is no JSON")
