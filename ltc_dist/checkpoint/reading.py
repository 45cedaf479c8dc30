"""Find the newest whole checkpoint and read it: sizes and digests are checked, skipped ones are reported.

Uses `layout`; called by `checkpointer`, and through `latest_checkpoint` by scripts.
"""

from __future__ import annotations

import errno
import logging
import os
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, TypeGuard, TypeVar

import torch

from ltc_core.errors import (
    CheckpointError,
    CheckpointFormatError,
    CheckpointIOError,
    LtcError,
    listed,
)
from ltc_core.serialization.directory import Reader, check_directory, open_directory
from ltc_core.serialization.tensor_file import TensorEntry, read_tensor
from ltc_dist.checkpoint import reshard
from ltc_dist.checkpoint.layout import (
    SHARED,
    Manifest,
    abandoned_in,
    latest_in,
    own_part,
    step_name,
    steps_in,
)
from ltc_dist.checkpoint.mesh_parts import put_together

__all__ = [
    "Checkpoint",
    "Contents",
    "find",
    "latest_checkpoint",
    "inspect",
    "may_pass",
    "patiently",
    "read",
    "why",
]

_log = logging.getLogger("ltc")
_PAUSES_S = (0.1, 1.0, 3.0)
# A server that is away, rights or handles that are missing: nothing is known of the file.
_PASSING = {
    getattr(errno, name)
    for name in (
        "ESTALE EIO ETIMEDOUT EAGAIN EINTR EBUSY ENETDOWN ENETUNREACH EHOSTDOWN EHOSTUNREACH ECONNRESET ECONNABORTED "
        "ENOTCONN ESHUTDOWN EREMOTEIO EACCES EPERM EMFILE ENFILE ENOMEM"
    ).split()
    if hasattr(errno, name)
}
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
        manifest = Manifest.read(self.path)
        with _part(self.path, manifest, SHARED) as part:
            found: dict[str, Any] = _whole(self.path, manifest, part, part.read("objects"))
        return found


@dataclass(frozen=True)
class Contents:
    """What one process needs of a checkpoint.

    Attributes:
        names: of all objects in it.
        objects: states of those that are the same in all processes, by name; and of sharded ones that were cut anew.
        own: by rank, what a process had of its own: "objects", and of this rank "random".
        refused: sharded objects that cannot be cut anew, by name, and why.
    """

    checkpoint: Checkpoint
    names: list[str]
    objects: dict[str, Any]
    own: dict[int, dict[str, Any]]
    refused: dict[str, str] = field(default_factory=dict)


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

    return find(directory, lambda step: patiently(lambda: inspect(directory, step)), step)


def inspect(root: str, step: int) -> Checkpoint:
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
        _check_part(path, manifest, name)
    with _part(path, manifest, SHARED) as part:
        values = _whole(path, manifest, part, part.read("values"))
        return Checkpoint(step, path, manifest.world_size, values)


def find(root: str, attempt: Callable[[int], _Found], step: int | None = None) -> _Found | None:
    """Call `attempt(step)` for the newest step, then for older ones, until one does not raise a CheckpointError.

    Abandoned steps are left out, unless `step` names one.

    Returns:
        What it returned; None if there is no checkpoint at all. Why newer ones were skipped is said in warnings.

    Raises:
        CheckpointError: there are some, and none would do.
        CheckpointIOError: one cannot be read now, and may be whole.
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
            if may_pass(error):  # an older one would be taken for the newest, and this one removed
                raise CheckpointIOError(
                    f"{step_name(candidate)} in {root} cannot be read, and may be whole",
                    got=why(error),
                    next="see to the file system, and start again; or take an older one: "
                    f"restore(step=), of {listed(steps)}.",
                    errno=error.errno,
                ) from error
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


def may_pass(error: BaseException) -> TypeGuard[OSError]:
    """Whether an error is one of the file system and not of the file: the same read may succeed later."""
    return isinstance(error, OSError) and error.errno in _PASSING


def patiently(read: Callable[[], _Found]) -> _Found:
    """What `read` returns; errors that may pass are waited for, some seconds.

    Raises:
        Exception: what `read` raises the last time.
    """
    for pause_s in _PAUSES_S:
        try:
            return read()
        except OSError as error:
            if not may_pass(error):
                raise
            time.sleep(pause_s)
    return read()


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
    number of processes saved, how far each had come, the state of the first one, and no tensors of the others. The
    shards of a ZeroRedundancyOptimizer are cut anew then: it needs those that its own shard overlaps.

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
    is_same = manifest.world_size == world_size
    shards: dict[str, list[Any]] = {}
    with _part(path, manifest, SHARED) as part:
        names = part.keys("objects")
        objects = {}
        for name in [n for n in names if shared is None or n in shared]:
            if _needs_cutting(part, is_same, "objects", name):
                shards[name] = [_outline(path, SHARED, part, "objects", name)]
            else:
                objects[name] = part.read("objects", name)
        objects, values = _whole(path, manifest, part, (objects, part.read("values")))
        checkpoint = Checkpoint(step, path, manifest.world_size, values)
    parts: dict[int, dict[str, Any]] = {}
    for number in [rank] if is_same else range(manifest.world_size):
        with _part(path, manifest, own_part(number)) as part:
            mine = part.keys("objects")
            wanted = [name for name in mine if own is None or name in own]
            parts[number] = {"objects": _states(part, wanted, is_same, number == 0)}
            if number == rank:
                parts[number]["random"] = part.read("random")
            for name in [] if is_same else wanted:
                if reshard.is_sharded(part.keys("objects", name, "state")):
                    outline = _outline(path, own_part(number), part, "objects", name, "state")
                    shards.setdefault(name, []).append(outline)
    reasons = {name: reshard.why_not(states) for name, states in shards.items()}
    refused = {name: reason for name, reason in reasons.items() if reason}
    for name in shards.keys() - refused.keys():
        objects[name] = reshard.reshard(shards[name], rank, world_size)
    return Contents(checkpoint, [*names, *mine], objects, parts, refused)


def _whole(path: str, manifest: Manifest, part: Reader, found: Any) -> Any:
    """What was read of what is the same in all processes, with the tensors of which each has written parts."""
    if "divided" not in part.keys():
        return found

    def parts(numbers: set[int]) -> Iterator[tuple[str, dict[str, Any]]]:
        for rank in range(manifest.world_size):
            name = own_part(rank)
            with _part(path, manifest, name) as own:
                for each in _outline(path, name, own, "parts"):
                    if each["tensor"] in numbers:
                        yield name, each

    return put_together(found, part.read("divided"), parts)


def _needs_cutting(part: Reader, is_same: bool, *place: str) -> bool:
    """Whether the state of an object, of which rank 0 saved its own for all processes, is one of several shards."""
    if not reshard.is_sharded(part.keys(*place)):
        return False
    return not is_same or list(part.read(*place, "shard")) != [0, 1]


def _outline(path: str, name: str, part: Reader, *place: str) -> Any:
    """State of a sharded object, whose tensors are read later, if at all."""

    def reopen(entry: TensorEntry) -> torch.Tensor:
        with _Named(name):
            directory = open_directory(os.path.join(path, name))
            try:
                return read_tensor(directory, entry)
            finally:
                os.close(directory)

    return part.outline(reopen, *place)


_COUNT = "num_batches"  # needed to split a loader's state for other processes


def _facts(part: Reader, name: str) -> dict[str, Any]:
    """How far a loader had come in a process; nothing of an object that is no loader."""
    place = "objects", name
    state = (
        {_COUNT: part.read(*place, "state", _COUNT)} if _COUNT in part.keys(*place, "state") else {}
    )
    kept = [key for key in ("batch_size", "dealing") if key in part.keys(*place)]
    return {"state": state, **{key: part.read(*place, key) for key in kept}}


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


def _check_part(path: str, manifest: Manifest, name: str) -> None:
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
