"""Find the newest checkpoint that is whole, and read it: sizes and digests are checked, what is skipped is said.

Comes from `layout`; called by `checkpointer`, and through `latest_checkpoint` by scripts that only look.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypeVar

from ltc_core.errors import CheckpointError, CheckpointFormatError, LtcError, listed
from ltc_core.serialization.directory import check_directory, open_directory, read_directory
from ltc_dist.checkpoint.layout import SHARED, Manifest, own_part, step_name, steps_in

__all__ = ["Checkpoint", "Contents", "find", "latest_checkpoint", "read"]

_log = logging.getLogger("ltc")
_Found = TypeVar("_Found")


@dataclass(frozen=True)
class Checkpoint:
    """One checkpoint on the disk.

    Attributes:
        step: the step it was saved after.
        path: its directory.
        world_size: the processes that saved it.
        values: what was given to `save` by name.
    """

    step: int
    path: str
    world_size: int
    values: dict[str, Any] = field(default_factory=dict)

    def state(self) -> dict[str, Any]:
        """Read the states of the objects that are the same in all processes, by name, on the CPU.

        Raises:
            CheckpointError: it is damaged; names the file.
        """
        found: dict[str, Any] = _part(self.path, Manifest.read(self.path), SHARED)["objects"]
        return found


@dataclass(frozen=True)
class Contents:
    """A checkpoint that has been read."""

    checkpoint: Checkpoint
    objects: dict[str, Any]
    own: dict[int, dict[str, Any]]  # by rank: what each process had of its own


def latest_checkpoint(root: str | os.PathLike[str], step: int | None = None) -> Checkpoint | None:
    """Give the newest checkpoint in a directory whose files are all there and of the right size; None if it has none.

    Digests are checked by `Checkpoint.state`, which reads the files.

    Args:
        step: give that of this step instead.

    Raises:
        CheckpointError: there are some, and none is whole; names what each lacks.
    """
    directory = os.path.realpath(os.fsdecode(root))

    def look(step: int) -> Checkpoint:
        path = os.path.join(directory, step_name(step))
        manifest = Manifest.read(path)
        for name in manifest.parts:
            _look_at(path, manifest, name)
        values = _part(path, manifest, SHARED)["values"]
        return Checkpoint(step, path, manifest.world_size, values)

    return find(directory, look, step)


def find(root: str, attempt: Callable[[int], _Found], step: int | None = None) -> _Found | None:
    """Call `attempt(step)` for the newest step, then for older ones, until one does not raise a CheckpointError.

    Returns:
        What it returned; None if there is no checkpoint at all. Why newer ones were skipped is said in warnings.

    Raises:
        CheckpointError: there are some, and none would do.
    """
    steps = steps_in(root)
    if step is not None and step not in steps:
        raise CheckpointError(
            f"there is no checkpoint of step {step} in {root}",
            got=f"steps {listed(steps)}" if steps else "none at all",
            next="name one that is there, or none for the newest.",
        )
    skipped: list[str] = []
    for candidate in [step] if step is not None else reversed(steps):
        try:
            found = attempt(candidate)
        except (CheckpointError, OSError) as error:
            skipped.append(f"{step_name(candidate)}: {_why(error)}")
            continue
        for reason in skipped:
            _log.warning("checkpoint %s; using %s", reason, step_name(candidate))
        return found
    if not skipped:
        return None
    raise CheckpointError(
        f"no checkpoint in {root} is whole",
        got=listed(skipped),
        next="copy one again from where it came, or start anew in another directory.",
    )


def _why(error: CheckpointError | OSError) -> str:
    if isinstance(error, LtcError):
        return error.what
    if isinstance(error, FileNotFoundError):
        return f"{os.path.basename(error.filename or 'a file')} is missing"
    return str(error)


def read(root: str, step: int) -> Contents:
    """Read a checkpoint, its tensors on the CPU.

    Raises:
        CheckpointError: it is incomplete or damaged; names the file.
        OSError: from the operating system, as it is.
    """
    path = os.path.join(root, step_name(step))
    manifest = Manifest.read(path)
    if manifest.step != step:
        raise CheckpointFormatError(f"its manifest says that it is of step {manifest.step}")
    # All own parts, small as they are: who chooses a checkpoint for all is to see that they are whole.
    own = {rank: _part(path, manifest, own_part(rank)) for rank in range(manifest.world_size)}
    shared = _part(path, manifest, SHARED)
    checkpoint = Checkpoint(step, path, manifest.world_size, shared["values"])
    return Contents(checkpoint, shared["objects"], own)


def _part(path: str, manifest: Manifest, name: str) -> dict[str, Any]:
    with _Named(name):
        directory = open_directory(os.path.join(path, name))
        try:
            tree, digest = read_directory(directory)
        finally:
            os.close(directory)
        _compare(digest, manifest.parts[name])
        if not isinstance(tree, dict):
            raise CheckpointFormatError("index.json: it is not that of a checkpoint's part")
        return tree


def _look_at(path: str, manifest: Manifest, name: str) -> None:
    with _Named(name):
        directory = open_directory(os.path.join(path, name))
        try:
            _compare(check_directory(directory).digest, manifest.parts[name])
        finally:
            os.close(directory)


def _compare(found: str, expected: str) -> None:
    if found != expected:
        raise CheckpointError("index.json: it is of another checkpoint")


class _Named:
    """Context: errors about a file begin with the name of its part."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, CheckpointError):
            error.what = f"{self._name}/{error.what}"
