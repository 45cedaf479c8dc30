"""Compiled programs on disk: a later process loads a program in place of compiling it.

The key is the text of the subgraph, and what else decides the program. Programs are kept as the artifacts of other
executors are (`executors.artifacts`): a damaged one is not loaded, and nobody else can write to the directory. Used by
`launch`.
"""

from __future__ import annotations

import functools
import hashlib
import os
import pickle
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import jaxlib
import torch
from jax.experimental import serialize_executable

from ltc_core import metrics
from ltc_core.executors.artifacts import Artifacts
from ltc_core.executors.processor import processor
from ltc_core.settings import settings

__all__ = ["ProgramsOnDisk"]

_FILE = "program"
_PACKAGE = Path(__file__).parents[2]
# What decides how a subgraph becomes a program.
_SOURCES = (
    "graph/*.py",
    "program/*.py",
    "program/lowering/*.py",
    "executors/jax/*.py",
    "executors/jax/rules/*.py",
)
# Variables that XLA and JAX read.
_PREFIXES = ("JAX_", "LIBTPU_", "TPU_", "XLA_")


class ProgramsOnDisk:
    """The programs of one device.

    Args:
        device: JAX's device.
    """

    def __init__(self, device: Any) -> None:
        self._device = device
        root = settings.compiled_cache_dir or os.path.join(settings.cache_dir, "jax")
        self._place = Artifacts(
            Path(root).expanduser().absolute(), settings.compiled_cache_read_only
        )
        try:
            self._place.prepare()
            self._is_usable = True
        except OSError:
            # No directory, or one that others can write to: each process compiles its programs.
            self._is_usable = False

    def key(self, text: str) -> str:
        """Key of the program of a subgraph with this text, 64 hexadecimal digits."""
        # JAX's device of a process has a number of its own in a job, which a program on disk names.
        device = f"{self._device.device_kind} {self._device.id}"
        about = f"{_environment()} {device} {self._device.client.platform_version}"
        return hashlib.sha256(f"{about}\n{text}".encode()).hexdigest()

    def load(self, key: str, num_inputs: int, num_outputs: int, devices: Sequence[Any] = ()) -> Any:
        """The program of a key, or None; `devices`: those that it runs on, if these are several."""
        path = self._place.find(key) if self._is_usable else None
        if path is None:
            metrics.count("PersistentCacheMiss")
            return None
        _, in_tree = jax.tree_util.tree_flatten((tuple(range(num_inputs)), {}))
        _, out_tree = jax.tree_util.tree_flatten(list(range(num_outputs)))
        program = serialize_executable.deserialize_and_load(
            (path / _FILE).read_bytes(),
            in_tree,
            out_tree,
            self._device.client,
            execution_devices=list(devices) or [self._device],
        )
        metrics.count("PersistentCacheHit")
        return program

    def store(self, key: str, program: Any) -> None:
        """Keep a program, if JAX can write it."""
        if not self._is_usable or self._place.is_read_only:
            return
        try:
            payload, _, _ = serialize_executable.serialize(program)
        except (NotImplementedError, ValueError, AttributeError, TypeError, pickle.PicklingError):
            # The last three: it calls a function of this process, which cannot be pickled.
            metrics.count("UnserializableProgram")
            return
        try:
            with self._place.scratch(key) as scratch:
                built = scratch / "built"
                built.mkdir()
                (built / _FILE).write_bytes(payload)
                self._place.commit(key, built, {})
            self._place.trim(settings.compiled_cache_bytes)
        except (OSError, ValueError):
            # A full disk, or a sweep on a file system without locks: the next process compiles the program again.
            metrics.count("PersistentCacheNotWritten")


@functools.cache
def _environment() -> str:
    """Text of everything that programs depend on besides the subgraph and the device."""
    digest = hashlib.sha256()
    for path in sorted(path for folder in _SOURCES for path in _PACKAGE.glob(folder)):
        digest.update(str(path.relative_to(_PACKAGE)).encode())
        digest.update(path.read_bytes())
    variables = sorted(f"{k}={v}" for k, v in os.environ.items() if k.startswith(_PREFIXES))
    parts = (jax.__version__, jaxlib.__version__, torch.__version__, processor(), *variables)
    return " ".join((digest.hexdigest(), *parts))
