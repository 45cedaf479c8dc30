"""The streaming verbs `save` and `load`: a `directory`, one tensor at a time, without a pickle.

`save` writes a new directory, which then replaces the old one (`atomic`). `load` reads a directory. Beyond the loaded
data, both need host memory for the largest tensor only.
"""

import errno
import logging
import os
from typing import Any

from ltc_core.errors import CheckpointError, CheckpointFormatError, CheckpointIOError, listed
from ltc_core.serialization.atomic import io_errors, old_name, replace_directory
from ltc_core.serialization.directory import Plan, open_directory, read_directory
from ltc_core.serialization.index import INDEX_FILE, is_checkpoint_file, starts_like_index
from ltc_core.serialization.legacy import load_legacy, tensors_folder

_log = logging.getLogger(__name__)
_ATTEMPTS = 50  # to read a checkpoint that writers replace meanwhile, again and again


def save(
    data: object,
    path: str | os.PathLike[str],
    master_only: bool = True,
    global_master: bool = False,
) -> None:
    """Save a tree of tensors as the directory `path`, one tensor at a time.

    Kept: dicts with any keys, OrderedDicts, lists, tuples, namedtuples, sizes, dtypes, devices,
    numbers, strings and bytes; requires_grad and being a parameter; one tensor at two places
    (the same object, or two views of exactly the same memory) is stored once. Not kept: strides,
    views of a part of another tensor (each is stored on its own), classes of namedtuples.

    An older checkpoint at `path` is moved aside, to `.<name>.ltc-old` beside it, when the new one
    is complete and on the disk, and removed when the new one has taken its place. A crash at any
    instant leaves one of the two for `load`; see `replace_directory` for the order. Anything at
    `path` that is no such checkpoint is not touched.

    Args:
        master_only: only the master process writes. Here one process is all there is, and it is
            the master, so neither this nor `global_master` changes anything.
        global_master: of several masters, one for each host, only the first one writes.
    Raises:
        CheckpointFormatError: something in `data` has no place in the format; names it.
        CheckpointIOError: the directory cannot be written; the old checkpoint is still there.
    Cost: one sync; host memory of the largest tensor.
    Source: torch_xla.utils.serialization.save, which removes the old checkpoint first.
    """
    del master_only, global_master  # see Args
    target = os.path.realpath(os.fsdecode(path))
    plan = Plan(data)
    with io_errors(target, plan.nbytes), replace_directory(target, _check_replaceable) as directory:
        plan.write(directory)


def _check_replaceable(path: str) -> None:
    """Refuse to replace what is not a streaming checkpoint (or an empty directory)."""
    if not os.path.lexists(path):
        return
    if not os.path.isdir(path):
        found = "a file"
    else:
        names = sorted(os.listdir(path))
        foreign = [name for name in names if not is_checkpoint_file(name)]
        if not names or (not foreign and starts_like_index(os.path.join(path, INDEX_FILE))):
            return
        found = f"a directory with {listed(foreign)}" if foreign else f"no {INDEX_FILE} of ours"
    raise CheckpointIOError(
        f"refusing to replace {path}, which is no streaming checkpoint",
        got=found,
        next="remove it or move it away, or save to another path.",
        errno=errno.EEXIST,
    )


def load(path: str | os.PathLike[str], *, allow_pickle: bool = False) -> Any:
    """Load a checkpoint of `save` to the CPU, one tensor at a time.

    Sizes are checked before anything is allocated, digests before anything is returned. If a save
    was killed while it replaced the checkpoint, the older one is read. A save by another process
    meanwhile does no harm: what comes back is all old or all new.

    Args:
        allow_pickle: also read a checkpoint of torch_xla's xser.save, which is a pickle. Even then
            only tensors and plain containers are made; no code in it is run.
    Returns:
        the tree, its tensors on the CPU.
    Raises:
        CheckpointIOError: there is no checkpoint, or it cannot be read.
        CheckpointError: it is incomplete or damaged; names the file and the bytes.
        CheckpointFormatError: it is no streaming checkpoint, or of another version.
    Source: torch_xla.utils.serialization.load, which runs what the pickle says.
    """
    target = os.path.realpath(os.fsdecode(path))
    for attempt in range(_ATTEMPTS):
        directory = _open_directory(target)
        if directory is None:
            if attempt < _ATTEMPTS - 1:
                continue  # a writer may have moved it between the two tries
            break
        try:
            return read_directory(directory)
        except (CheckpointError, OSError) as error:
            if attempt < _ATTEMPTS - 1 and _was_replaced(directory, target):
                continue
            raise _about(target, error) from error
        finally:
            os.close(directory)
    if os.path.isfile(target):
        return _load_file(target, allow_pickle)
    raise CheckpointIOError(
        f"there is no checkpoint at {target}", next="check the path.", errno=errno.ENOENT
    )


def _open_directory(path: str) -> int | None:
    """Open the checkpoint, or the one moved aside by a writer that was killed half-way."""
    for candidate in (path, old_name(path)):
        try:
            found = open_directory(candidate)
        except (FileNotFoundError, NotADirectoryError):
            continue
        except OSError as error:
            raise _about(path, error) from error
        if candidate != path:
            _log.warning(
                "%s is being replaced, or its writer was killed: reading the old one", path
            )
        return found
    return None


def _was_replaced(directory: int, path: str) -> bool:
    try:
        return not os.path.samestat(os.fstat(directory), os.stat(path))
    except FileNotFoundError:
        return True


def _about(path: str, error: CheckpointError | OSError) -> CheckpointError:
    """Return the error with the checkpoint's name in it."""
    if isinstance(error, CheckpointIOError) or not isinstance(error, CheckpointError):
        return CheckpointIOError(
            f"{error.strerror or error} while reading {path}",
            got=f"{type(error).__name__}: {error}",
            next="check the path, and who may read it.",
            errno=error.errno,
        )
    return type(error)(
        f"cannot load the checkpoint {path} ({error.what})",
        got=error.got,
        next=error.next or "load an older checkpoint, or copy this one again from where it came.",
    )


def _load_file(path: str, allow_pickle: bool) -> object:
    if not os.path.isdir(tensors_folder(path)):
        raise CheckpointFormatError(
            f"{path} is a file, and a streaming checkpoint is a directory",
            next="read a file of save or torch.save with ltc_core.load(path).",
        )
    if not allow_pickle:
        raise CheckpointFormatError(
            f"{path} is a streaming checkpoint of torch_xla, which is a pickle",
            got=f"a file, with its tensors in {os.path.basename(tensors_folder(path))}",
            next="if you know who wrote it: load(path, allow_pickle=True), then save it again.",
        )
    return load_legacy(path)
