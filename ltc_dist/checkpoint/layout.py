"""What a checkpoint's directory holds, and the manifest that makes it one.

    runs/a/
        step_000000100/                   whole: it got this name when all of it was on the disk
            manifest.json                 the step, the processes, and a digest of each part
            shared/                       what is the same in all processes, written by rank 0
            rank_00000/, rank_00001/      what each process has of its own
            abandoned                     only if a run went back behind this step: it is not taken any more
        step_000000200.tmp-5f0c19ab/      being written, or left by a job that was killed
            being-written                 the marker of such a directory
        latest                            the name of the one that was committed last
        lock                              held by the job that writes here

A restart takes the newest step that is whole and not abandoned. A run that restores an older step abandons the later
ones with its first commit: they are kept (unless `keep` counts them out), taken only by their number, and overwritten
when the run reaches their step again. `latest` is written by rank 0 after each commit, for people and other programs.
It decides nothing: a kill between the commit and `latest` must not lose the commit. A restart warns if it names a step
that is not there.

A part is a directory of `ltc_core.serialization`: index.json and safetensors. Used by `commit` and `reading`.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from typing import Any

import torch

from ltc_core.errors import CheckpointFormatError
from ltc_core.serialization.index import INDEX_FILE, starts_like_index
from ltc_core.serialization.sealed import read_sealed, starts_like, write_sealed

__all__ = [
    "ABANDONED",
    "LATEST",
    "LOCK",
    "SHARED",
    "WRITING",
    "Manifest",
    "abandoned_in",
    "is_ours",
    "latest_in",
    "own_part",
    "step_name",
    "steps_in",
]

MANIFEST = "manifest.json"
SHARED = "shared"
LATEST = "latest"
LOCK = "lock"
ABANDONED = "abandoned"
WRITING = "being-written"
WRITING_TEXT = b"ltc writes a checkpoint here\n"
_FORMAT = "ltc-checkpoint"
_VERSION = 1
_STEP = re.compile(r"step_([0-9]{9,18})")
_PART = re.compile(r"shared|rank_[0-9]{5,7}")
_DIGEST = re.compile(r"[0-9a-f]{64}")
_MOST_PROCESSES = 1 << 20


def step_name(step: int) -> str:
    """Return the name of a step's directory."""
    return f"step_{step:09d}"


def own_part(rank: int) -> str:
    """Return the name of the part that a process has of its own."""
    return f"rank_{rank:05d}"


def steps_in(root: str) -> list[int]:
    """Return the steps that have a directory, in order. None of them has been looked into."""
    try:
        names = os.listdir(root)
    except FileNotFoundError:
        return []
    found = (_STEP.fullmatch(name) for name in names)
    return sorted(int(match[1]) for match in found if match is not None)


def abandoned_in(root: str) -> set[int]:
    """Steps that a run has abandoned: it restored an earlier one."""
    return {
        step
        for step in steps_in(root)
        if os.path.lexists(os.path.join(root, step_name(step), ABANDONED))
    }


def latest_in(root: str) -> int | None:
    """Step that `latest` names; None if there is no such file, or it names none."""
    try:
        with open(os.path.join(root, LATEST), "rb") as file:
            match = _STEP.fullmatch(file.read(64).decode("ascii", "replace").strip())
    except OSError:
        return None
    return int(match[1]) if match is not None else None


def is_ours(path: str) -> bool:
    """Whether a directory is a checkpoint of this library, whole or not, or empty; nothing else may be removed."""
    if os.path.islink(path) or not os.path.isdir(path):
        return False
    names = os.listdir(path)
    parts = [name for name in names if _PART.fullmatch(name)]
    if set(names) - {MANIFEST, WRITING, ABANDONED, *parts}:
        return False
    if not names or starts_like(os.path.join(path, MANIFEST), _FORMAT):
        return True
    return _is_marked(os.path.join(path, WRITING)) or any(
        starts_like_index(os.path.join(path, part, INDEX_FILE)) for part in parts
    )


def _is_marked(marker: str) -> bool:
    if os.path.islink(marker) or not os.path.isfile(marker):
        return False
    with open(marker, "rb") as file:
        return WRITING_TEXT.startswith(
            file.read(len(WRITING_TEXT) + 1)
        )  # cut short by a full disk or a kill


@dataclass(frozen=True)
class Manifest:
    """What a checkpoint is: its step, the processes that wrote it, the digest of each part."""

    step: int
    world_size: int
    parts: dict[str, str]

    def write(self, directory: str) -> str:
        """Write it into a directory that has all parts; return its path."""
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
