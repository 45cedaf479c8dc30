"""How a checkpoint comes to be: all of it on the disk first, then its name, then `latest`, then old ones go.

A process that is killed between any two of these functions leaves the checkpoints before it as they were. Whether the
one it was writing counts is decided by one rename, `publish`. Comes from `layout`; called by `checkpointer`.
"""

from __future__ import annotations

import fcntl
import logging
import os
import socket

from ltc_core.errors import CheckpointIOError
from ltc_core.serialization.atomic import discard, fsync, replace_file
from ltc_core.serialization.directory import Plan
from ltc_dist.checkpoint.layout import LATEST, LOCK, Manifest, step_name, steps_in

__all__ = [
    "claim",
    "point_latest",
    "probe",
    "prune",
    "publish",
    "sweep",
    "temporary_name",
    "write_manifest",
    "write_part",
]

_log = logging.getLogger(__name__)
_TEMPORARY = ".tmp-"
_OLD = ".old-"


def probe(root: str) -> None:
    """Make the directory, and see that files can be written there.

    Raises:
        OSError: from the operating system, as it is.
    """
    os.makedirs(root, exist_ok=True)
    path = os.path.join(root, f".probe-{socket.gethostname()}-{os.getpid()}")
    with open(path, "xb") as file:
        file.write(b"\0")
    os.unlink(path)


def claim(root: str) -> int:
    """Keep other jobs from writing here, for as long as the descriptor that is given is open.

    Raises:
        CheckpointIOError: another job writes here.
    """
    lock = os.open(os.path.join(root, LOCK), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
    try:
        # POSIX locks, not flock: processes of a DataLoader that outlive this one must not keep it.
        fcntl.lockf(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (BlockingIOError, PermissionError):
        owner = os.read(lock, 200).decode(errors="replace").strip()
        os.close(lock)
        raise CheckpointIOError(
            f"another job writes checkpoints in {root}",
            got=owner or "its lock is held",
            next="end that job, or give this one another directory.",
        ) from None
    except OSError as error:  # some network file systems have no locks
        _log.debug("%s cannot be locked: %s", root, error)
    os.ftruncate(lock, 0)
    os.write(lock, f"pid {os.getpid()} on {socket.gethostname()}\n".encode())
    return lock


def sweep(root: str) -> None:
    """Clear up after jobs that were killed here; nobody else may be writing."""
    for name in os.listdir(root):
        path = os.path.join(root, name)
        if _OLD in name:
            final = path.partition(_OLD)[0]
            if not os.path.lexists(final):  # killed between the two renames of `publish`
                os.rename(path, final)
                continue
        elif _TEMPORARY not in name:
            continue
        discard(path)


def temporary_name(root: str, step: int, token: str) -> str:
    """Give the directory that a step is written into."""
    return os.path.join(root, f"{step_name(step)}{_TEMPORARY}{token}")


def write_part(temporary: str, name: str, plan: Plan) -> str:
    """Write one part, to the disk; give its digest. Called in each process for what it writes."""
    path = os.path.join(temporary, name)
    os.makedirs(path)
    digest = plan.write(path)
    for file in os.listdir(path):
        fsync(os.path.join(path, file))
    fsync(path)
    return digest


def write_manifest(temporary: str, manifest: Manifest) -> None:
    """Write the manifest, when all parts are there, to the disk."""
    fsync(manifest.write(temporary))
    fsync(temporary)


def publish(temporary: str, root: str, step: int) -> None:
    """Give the directory its name: from here on the checkpoint counts. One of the same step gives way."""
    final = os.path.join(root, step_name(step))
    aside = final + _OLD + temporary.rpartition(_TEMPORARY)[2]
    replaces = os.path.lexists(final)
    if replaces:
        os.rename(final, aside)
    os.rename(temporary, final)
    fsync(root)
    if replaces:
        discard(aside)


def point_latest(root: str, step: int) -> None:
    """Let `latest` name the step."""
    with replace_file(os.path.join(root, LATEST)) as file:
        file.write(f"{step_name(step)}\n".encode())


def prune(root: str, step: int, keep: int | None) -> None:
    """Remove all but the newest `keep` checkpoints up to `step`, the oldest first.

    What lies beyond `step` is of a run that went further and was gone back from: it goes too.
    """
    if keep is None:
        return
    found = steps_in(root)
    kept = [s for s in found if s <= step][-keep:]
    for old in found:
        if old not in kept:
            discard(os.path.join(root, step_name(old)))
