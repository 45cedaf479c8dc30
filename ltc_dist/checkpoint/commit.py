"""The commit of a checkpoint: first all data is on the disk, then come its name, `latest`, and the removal of old ones.

A process that is killed between any two of these functions leaves the checkpoints before it as they were. One
rename, `publish`, decides whether its own checkpoint counts. The steps are those of `ltc_core.serialization.atomic`.
`torch.distributed.checkpoint` is not beneath it: its files have no digests, so damage would not be found, and it plans
each save with collectives, for which training would wait. Comes from `layout`; called by `transaction` and
`checkpointer`.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import re
import secrets
import time
from collections.abc import Callable, Collection, Mapping

from ltc_core.errors import CheckpointError, CheckpointIOError, LtcError, listed
from ltc_core.serialization.atomic import (
    discard,
    fsync,
    recover,
    replace_file,
    swap,
    sync_directory,
)
from ltc_core.serialization.directory import Plan, check_directory, open_directory
from ltc_dist.checkpoint.layout import (
    ABANDONED,
    LATEST,
    WRITING,
    WRITING_TEXT,
    Manifest,
    is_ours,
    step_name,
    steps_in,
)

__all__ = [
    "abandon",
    "point_latest",
    "probe",
    "probe_name",
    "prune",
    "publish",
    "remove_other_probes",
    "see_parts",
    "see_probes",
    "sweep",
    "temporary_name",
    "write_manifest",
    "write_part",
]

_log = logging.getLogger("ltc")
_TEMPORARY = ".tmp-"
_OLD = ".old-"
_LEFT_OVER = re.compile(r"(step_[0-9]{9,18})\.(tmp|old)-[0-9a-f]{8}")
_PROBE = re.compile(r"\.ltc-probe-[0-9a-f]{16}")
_SEEN_WITHIN_S = 5.0  # by rank 0: a network file system may show a new file late
_LOOK_S = 0.1


def probe_name(root: str, token: str) -> str:
    """Path of the file by which a process shows that it can write to a directory."""
    return os.path.join(root, f".ltc-probe-{token}")


def probe(root: str, token: str) -> None:
    """Make the directory, and write a file to check that this is possible.

    Raises:
        OSError: from the operating system, as it is.
    """
    os.makedirs(root, exist_ok=True)
    with open(probe_name(root, token), "xb") as file:
        file.write(b"\0")


def see_probes(root: str, tokens: Mapping[int, str]) -> list[int]:
    """Ranks whose probe is not visible here; waits a little for those that a network file system shows late."""
    deadline = time.monotonic() + _SEEN_WITHIN_S
    while True:
        unseen = [r for r, t in tokens.items() if not os.path.lexists(probe_name(root, t))]
        if not unseen or time.monotonic() > deadline:
            return unseen
        time.sleep(_LOOK_S)


def remove_other_probes(root: str, tokens: Collection[str]) -> None:
    """Remove the probes of killed processes. Call it with the lock held: it keeps other jobs away."""
    for name in os.listdir(root):
        if _PROBE.fullmatch(name) and name.rpartition("-")[2] not in tokens:
            # Its owner has removed it, or is another user, or the disk fails: it harms nobody.
            with contextlib.suppress(OSError):
                path = os.path.join(root, name)
                if os.lstat(path).st_size <= 1:
                    os.unlink(path)


def sweep(root: str) -> None:
    """Remove what killed jobs left; nobody else may be writing.

    Only directories of this library are removed: those with its names, and a marker or a manifest inside.
    """
    for name in os.listdir(root):
        path = os.path.join(root, name)
        match = _LEFT_OVER.fullmatch(name)
        if match is None or not is_ours(path):
            continue
        final = os.path.join(root, match[1])
        if match[2] == "old":
            recover(path, final, _remove)
        else:
            _remove(path)


def _remove(path: str) -> None:
    """Remove a directory of ours, its marker or manifest last, so that it is known as ours after a kill."""
    names = os.listdir(path)
    for name in sorted(names, key=lambda n: not os.path.isdir(os.path.join(path, n))):
        discard(os.path.join(path, name))
    discard(path)


def temporary_name(root: str, step: int, token: str) -> str:
    """Return the directory that a step is written into."""
    return os.path.join(root, f"{step_name(step)}{_TEMPORARY}{token}")


def write_part(
    temporary: str, name: str, plan: Plan, progress: Callable[[], None] = lambda: None
) -> str:
    """Write one part to the disk and return its digest. Each process calls it for its parts.

    Args:
        progress: called again and again while it is written.
    """
    os.makedirs(temporary, exist_ok=True)
    with contextlib.suppress(FileExistsError):  # another process was first
        with open(os.path.join(temporary, WRITING), "xb") as marker:
            marker.write(WRITING_TEXT)
    path = os.path.join(temporary, name)
    os.mkdir(path)
    digest = plan.write(path, progress)
    sync_directory(path, progress)
    return digest


def see_parts(temporary: str, parts: Mapping[str, str]) -> None:
    """Check that parts which other processes wrote are visible here: names and sizes of their files, and the digest.

    Args:
        parts: the digest of each, as its process reported it.

    Raises:
        CheckpointIOError: some are not: each host has a directory of its own.

    Cost: reads the index of each part. Waits a little for what a network file system shows late.
    """
    deadline = time.monotonic() + _SEEN_WITHIN_S
    while missing := [
        f"{name}: {why}" for name in parts if (why := _why_unseen(temporary, name, parts[name]))
    ]:
        if time.monotonic() > deadline:
            raise CheckpointIOError(
                f"{os.path.dirname(temporary)} is not shared: rank 0 does not see what other processes wrote there",
                got=listed(missing),
                next="give a directory that all hosts share, by a path that leads every process to it.",
            )
        time.sleep(_LOOK_S)


def _why_unseen(temporary: str, name: str, digest: str) -> str:
    try:
        directory = open_directory(os.path.join(temporary, name))
        try:
            found = check_directory(directory).digest
        finally:
            os.close(directory)
    except FileNotFoundError:
        return "missing"
    except (CheckpointError, OSError) as error:
        return error.what if isinstance(error, LtcError) else str(error)
    return "" if found == digest else "it is not what its process reported"


def abandon(root: str, known: Collection[int]) -> None:
    """Mark the steps that are not of this run's history, before its next commit; unmark those that are.

    Args:
        known: the steps that the run has restored, gone on from or committed itself.
    """
    for step in steps_in(root):
        path = os.path.join(root, step_name(step))
        marker = os.path.join(path, ABANDONED)
        is_marked = os.path.lexists(marker)
        if is_marked == (step not in known) or not is_ours(path):
            continue
        if is_marked:
            os.unlink(marker)
        else:
            with open(marker, "xb") as file:
                file.write(
                    b"A run has gone back behind this step. It is restored only by its number.\n"
                )
            fsync(marker)
        fsync(path)


def write_manifest(temporary: str, manifest: Manifest) -> None:
    """Write the manifest to the disk, when all parts are there."""
    fsync(manifest.write(temporary))
    fsync(temporary)


def publish(temporary: str, root: str, step: int) -> None:
    """Rename the directory to its final name: from here on the checkpoint counts. One of the same step is replaced."""
    final = os.path.join(root, step_name(step))
    aside = final + _OLD + temporary.rpartition(_TEMPORARY)[2]
    replaces = os.path.lexists(final)
    if replaces and not is_ours(final):
        raise CheckpointIOError(
            f"refusing to replace {final}, which is no checkpoint of this library",
            got="a directory or a file of somebody else",
            next="move it away, or give another directory.",
            errno=errno.EEXIST,
        )
    with contextlib.suppress(FileNotFoundError):
        os.unlink(os.path.join(temporary, WRITING))
    swap(temporary, final, aside)
    fsync(root)
    if replaces:
        _remove(aside)


def point_latest(root: str, step: int) -> None:
    """Point `latest` to the step."""
    with replace_file(os.path.join(root, LATEST)) as file:
        file.write(f"{step_name(step)}\n".encode())


def prune(root: str, step: int, keep: int | None, known: Collection[int]) -> None:
    """Remove what this run has abandoned, and of its own checkpoints all but the newest `keep`, the oldest first."""
    if keep is None:
        return
    found = steps_in(root)
    kept = [s for s in found if s <= step and s in known][-keep:]
    for old in found:
        path = os.path.join(root, step_name(old))
        if old not in kept and is_ours(path):
            # Under a temporary name first: a kill leaves no step of which a part is missing.
            removed = temporary_name(root, old, secrets.token_hex(4))
            os.rename(path, removed)
            _remove(removed)
