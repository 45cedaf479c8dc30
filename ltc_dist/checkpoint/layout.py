"""What a checkpoint's directory holds, and the manifest that makes it one.

    runs/a/
        step_000000100/                   whole: it got this name when all of it was on the disk
            manifest.json                 the step, the processes, and a digest of each part
            shared/                       what is the same in all processes, written by rank 0
            rank_00000/, rank_00001/      what each process has of its own
        step_000000200.tmp-5f0c19ab/      being written, or left by a job that was killed
        latest                            the name of the newest one
        lock                              held by the job that writes here

A part is a directory of `ltc_core.serialization`: index.json and safetensors. Used by `commit` and `reading`.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from typing import Any

import torch

from ltc_core.errors import CheckpointFormatError
from ltc_core.serialization.sealed import read_sealed, write_sealed

__all__ = ["LATEST", "LOCK", "SHARED", "Manifest", "own_part", "step_name", "steps_in"]

MANIFEST = "manifest.json"
SHARED = "shared"
LATEST = "latest"
LOCK = "lock"
_FORMAT = "ltc-checkpoint"
_VERSION = 1
_STEP = re.compile(r"step_([0-9]{9,18})")
_DIGEST = re.compile(r"[0-9a-f]{64}")
_MOST_PROCESSES = 1 << 20


def step_name(step: int) -> str:
    """Give the name of a step's directory."""
    return f"step_{step:09d}"


def own_part(rank: int) -> str:
    """Give the name of the part that a process has of its own."""
    return f"rank_{rank:05d}"


def steps_in(root: str) -> list[int]:
    """Give the steps that have a directory, in order. None of them has been looked into."""
    try:
        names = os.listdir(root)
    except FileNotFoundError:
        return []
    found = (_STEP.fullmatch(name) for name in names)
    return sorted(int(match[1]) for match in found if match is not None)


@dataclass(frozen=True)
class Manifest:
    """What a checkpoint is: its step, the processes that wrote it, the digest of each part."""

    step: int
    world_size: int
    parts: dict[str, str]

    def write(self, directory: str) -> str:
        """Write it into a directory that has all parts; give its path."""
        path = os.path.join(directory, MANIFEST)
        body = {**vars(self), "torch": torch.__version__}
        write_sealed(path, _FORMAT, _VERSION, body)
        return path

    @staticmethod
    def read(directory: str) -> Manifest:
        """Read and check that of a checkpoint.

        Raises:
            CheckpointFormatError: it is of another format or version, or says what cannot be.
            CheckpointError: it is not what was written.
            OSError: there is none, or it cannot be read.
        """
        with open(os.path.join(directory, MANIFEST), "rb") as file:
            body, _ = read_sealed(file, MANIFEST, _FORMAT, _VERSION)
        if not _is_legal(body):
            raise CheckpointFormatError(
                f"{MANIFEST}: it says what cannot be",
                next="the checkpoint was not written by this library; do not use it.",
            )
        return Manifest(body["step"], body["world_size"], body["parts"])


def _is_legal(body: Any) -> bool:
    if not isinstance(body, dict) or body.keys() != {"step", "world_size", "parts", "torch"}:
        return False
    step, size, parts = body["step"], body["world_size"], body["parts"]
    if type(step) is not int or type(size) is not int or not isinstance(parts, dict):
        return False
    if step < 0 or not 1 <= size <= _MOST_PROCESSES:
        return False
    digests = [isinstance(d, str) and _DIGEST.fullmatch(d) for d in parts.values()]
    return all(digests) and parts.keys() == {SHARED, *map(own_part, range(size))}
