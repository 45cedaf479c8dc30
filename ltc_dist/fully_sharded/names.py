"""Names in the state dict of a `FullyShardedDataParallel`: those that torch_xla gives."""

from __future__ import annotations

__all__ = ["MODULE", "SHARD", "inner", "joined", "original", "shard_name"]

MODULE = "_fsdp_wrapped_module"
SHARD = "_fsdp_shard"
_INNER = "_fpw_module"  # torch_xla has a second wrapper inside
_SEPARATOR = "_FSDP_SHARD_SEPARATOR_"


def inner(name: str) -> str:
    """A name below torch_xla's second wrapper."""
    return f"{_INNER}.{name}"


def joined(path: str, name: str) -> str:
    """The name of what is below a module."""
    return f"{path}.{name}" if path else name


def shard_name(name: str) -> str:
    """The attribute that holds the shard of a parameter."""
    return f"{SHARD}.{name}".replace(".", _SEPARATOR)


def original(name: str) -> str:
    """The name in the module that was wrapped."""
    return name.replace(f"{MODULE}.", "").replace(f"{_INNER}.", "")
