"""Find the newest whole checkpoint and read it: sizes and digests are checked, skipped ones are reported.

Uses `layout`; called by `checkpointer`, and through `latest_checkpoint` by scripts.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, TypeVar

from ltc_core.errors import CheckpointError, CheckpointFormatError, LtcError, listed
from ltc_core.serialization.directory import Reader, check_directory, open_directory
from ltc_dist.checkpoint.layout import (
    SHARED,
    Manifest,
    abandoned_in,
    latest_in,
    own_part,
    step_name,
    steps_in,
)

__all__ = ["Checkpoint", "Contents", "find", "latest_checkpoint", "look", "read", "why"]

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
        with _part(self.path, Manifest.read(self.path), SHARED) as part:
            found: dict[str, Any] = part.read("objects")
        return found


@dataclass(frozen=True)
class Contents:
    """What one process needs of a checkpoint.

    Attributes:
        names: of all objects in it.
        objects: states of those that are the same in all processes, by name.
        own: by rank, what a process had of its own: "objects", and of this rank "random".
    """

    checkpoint: Checkpoint
    names: list[str]
    objects: dict[str, Any]
    own: dict[int, dict[str, Any]]


def latest_checkpoint(root: str | os.PathLike[str], step: int | None = None) -> Checkpoint | None:
    """Return the newest checkpoint in a directory whose files are all there and of the right size; None if it has none.

    Steps that a run has gone back behind are not taken. Digests are checked by `Checkpoint.state`, which reads the
    files.

    Args:
        step: give that of this step instead, also if it was abandoned.

    Raises:
        CheckpointError: there are some, and none is whole; names what each lacks.
    """
    directory = os.path.realpath(os.fsdecode(root))

    return find(directory, lambda step: look(directory, step), step)


def look(root: str, step: int) -> Checkpoint:
    """Check that all files of a checkpoint are there and have their size; read the values that were saved with it.

    Raises:
        CheckpointError: it is incomplete or damaged; names the file.
        OSError: from the operating system, as it is.
    """
    path = os.path.join(root, step_name(step))
    manifest = Manifest.read(path)
    if manifest.step != step:
        raise CheckpointFormatError(f"its manifest says that it is of step {manifest.step}")
    for name in manifest.parts:
        _look_at(path, manifest, name)
    with _part(path, manifest, SHARED) as part:
        return Checkpoint(step, path, manifest.world_size, part.read("values"))


def find(root: str, attempt: Callable[[int], _Found], step: int | None = None) -> _Found | None:
    """Call `attempt(step)` for the newest step, then for older ones, until one does not raise a CheckpointError.

    Abandoned steps are left out, unless `step` names one.

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
    abandoned = abandoned_in(root) if step is None else set()
    skipped: list[str] = []
    for candidate in [step] if step is not None else reversed(steps):
        if candidate in abandoned:
            continue
        try:
            found = attempt(candidate)
        except (CheckpointError, OSError) as error:
            skipped.append(f"{step_name(candidate)}: {why(error)}")
            continue
        for reason in skipped:
            _log.warning("checkpoint %s; using %s", reason, step_name(candidate))
        if step is None:
            _say_what_is_left(root, steps, candidate, abandoned)
        return found
    if not steps:
        return None
    skipped += [f"{step_name(left)}: abandoned" for left in sorted(abandoned)]
    raise CheckpointError(
        f"no checkpoint in {root} is whole",
        got=listed(skipped),
        next="copy one again from where it came, name an abandoned one with step=, or start anew in another directory.",
    )


def _say_what_is_left(root: str, steps: list[int], taken: int, abandoned: set[int]) -> None:
    later = [step for step in sorted(abandoned) if step > taken]
    if later:
        _log.warning(
            "using %s in %s; a run went back behind the later steps %s, which are kept and not taken: "
            "restore(step=%d) takes one, and a run that reaches its step again overwrites it",
            step_name(taken), root, listed(later), later[-1],
        )  # fmt: skip
    named = latest_in(root)
    if named is not None and named not in steps:
        _log.warning(
            "`latest` in %s names %s, which is not there; using %s", root, step_name(named), step_name(taken)
        )  # fmt: skip


def why(error: CheckpointError | OSError) -> str:
    """What is wrong with a checkpoint, in a few words."""
    if isinstance(error, LtcError):
        return error.what
    if isinstance(error, FileNotFoundError):
        return f"{os.path.basename(error.filename or 'a file')} is missing"
    return str(error)


def read(
    root: str,
    step: int,
    rank: int = 0,
    world_size: int = 1,
    shared: Collection[str] | None = None,
    own: Collection[str] | None = None,
) -> Contents:
    """Read what one process needs of a checkpoint, its tensors on the CPU; nothing else is read from the files.

    It needs the states of its objects. Of what each process has of its own it needs its own part, and where another
    number of processes saved, how far each had come, the state of the first one, and no tensors of the others.

    Args:
        rank, world_size: of the process that needs it.
        shared, own: names of the objects that it loads; None for all.

    Raises:
        CheckpointError: it is incomplete or damaged; names the file.
        OSError: from the operating system, as it is.
    """
    path = os.path.join(root, step_name(step))
    manifest = Manifest.read(path)
    if manifest.step != step:
        raise CheckpointFormatError(f"its manifest says that it is of step {manifest.step}")
    with _part(path, manifest, SHARED) as part:
        names = part.keys("objects")
        objects = {n: part.read("objects", n) for n in names if shared is None or n in shared}
        checkpoint = Checkpoint(step, path, manifest.world_size, part.read("values"))
    is_same = manifest.world_size == world_size
    parts: dict[int, dict[str, Any]] = {}
    for number in [rank] if is_same else range(manifest.world_size):
        with _part(path, manifest, own_part(number)) as part:
            mine = part.keys("objects")
            wanted = [name for name in mine if own is None or name in own]
            parts[number] = {"objects": _states(part, wanted, is_same, number == 0)}
            if number == rank:
                parts[number]["random"] = part.read("random")
    return Contents(checkpoint, [*names, *mine], objects, parts)


_COUNT = "num_batches"  # needed to split a loader's state for other processes


def _facts(part: Reader, name: str) -> dict[str, Any]:
    """How far a loader had come in a process; nothing of an object that is no loader."""
    place = "objects", name
    state = (
        {_COUNT: part.read(*place, "state", _COUNT)} if _COUNT in part.keys(*place, "state") else {}
    )
    return {"state": state, "batch_size": part.read(*place, "batch_size")}


def _states(part: Reader, names: Collection[str], is_own: bool, is_first: bool) -> dict[str, Any]:
    """States of the objects that a process had of its own, as far as this process needs them."""
    found = {}
    for name in names:
        can_be_dealt_out = _COUNT in part.keys("objects", name, "state")
        whole = is_own or (is_first and can_be_dealt_out)
        found[name] = part.read("objects", name) if whole else _facts(part, name)
    return found


@contextmanager
def _part(path: str, manifest: Manifest, name: str) -> Iterator[Reader]:
    with _Named(name):
        directory = open_directory(os.path.join(path, name))
        try:
            part = Reader(directory)
            _compare(part.digest, manifest.parts[name])
            if not part.keys():
                raise CheckpointFormatError("index.json: it is not that of a checkpoint's part")
            yield part
        finally:
            os.close(directory)


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
    """Context manager: prefixes errors about a file with the name of its part."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, CheckpointError):
            error.what = f"{self._name}/{error.what}"
