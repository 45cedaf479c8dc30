"""The plain verbs `save` and `load`: torch.save of a CPU copy, one file in PyTorch's own format.

`save` writes a temporary file and renames it over the old one at the end, so that a full disk or a crash leaves the
old file whole. `load` reads with weights_only=True: a pickle that would run code is refused. Any program with torch can
read the file. For models that are large compared with host memory use `streaming`.
"""

import os
import pickle
import re
import types
import zipfile
from typing import IO, Any

import torch

from ltc_core import progress
from ltc_core.errors import CheckpointError, CheckpointFormatError, CheckpointIOError, LtcError
from ltc_core.metrics_report import bytes_text
from ltc_core.serialization.atomic import io_errors, replace_file
from ltc_core.serialization.cpu_copy import CpuCopies, is_on_device
from ltc_core.serialization.tree import map_tensors, tensors_of
from ltc_core.serialization.weights_only import load_weights_only

FileOrPath = str | os.PathLike[str] | IO[bytes]


def save(
    data: object,
    file_or_path: FileOrPath,
    master_only: bool = True,
    global_master: bool = False,
) -> None:
    """Save a CPU copy of `data` with torch.save; structure and shared tensors are kept.

    Tuples, namedtuples, OrderedDicts and dataclasses stay what they are. A file object is written
    to directly; a path is replaced only when the new file is complete and on the disk. A path
    that is a device or a pipe is written to directly as well.

    Args:
        master_only: only the master process writes. Here one process is all there is, and it is
            the master, so neither this nor `global_master` changes anything.
        global_master: of several masters, one for each host, only the first one writes.
    Raises:
        CheckpointIOError: the file cannot be written; the old one is still there.
        CheckpointFormatError: `data` cannot be pickled.
    Cost: one sync; a copy of all tensors of the device in host memory.
    Source: torch_xla.core.xla_model.save, which makes lists of tuples and writes in place.
    """
    del master_only, global_master  # see Args
    copies = CpuCopies()
    try:
        copied = map_tensors(copies, data)
    except RecursionError as error:
        raise _not_picklable(error) from error
    if hasattr(file_or_path, "write"):
        name = getattr(file_or_path, "name", type(file_or_path).__name__)
        with io_errors(f"the file object {name}"):
            _torch_save(copied, copies, file_or_path)
        return
    path = os.path.realpath(os.fsdecode(file_or_path))
    need_bytes = sum(t.nbytes for t in tensors_of(copied) if t.layout == torch.strided)
    with io_errors(path, need_bytes):
        if os.path.exists(path) and not os.path.isfile(path):
            with open(path, "wb") as special:  # the system refuses a directory here
                _torch_save(copied, copies, special)
        else:
            told = f"writing {path} ({bytes_text(need_bytes)})"
            with replace_file(path) as file, progress.shown(told):
                _torch_save(copied, copies, file)


def _torch_save(copied: object, copies: CpuCopies, file: Any) -> None:
    sink: Any = _Sink(file)
    try:
        torch.save(copied, sink, pickle_module=_pickle_module(copies))
        sink.flush()
    except (LtcError, MemoryError):
        raise
    except Exception as error:  # pickling errors have no common type
        # The zip writer reports "unexpected pos 704 vs 598" and hides what the system said.
        if sink.error is not None:
            raise sink.error from error
        raise _not_picklable(error) from error


def _not_picklable(error: Exception) -> CheckpointFormatError:
    return CheckpointFormatError(
        "cannot save this data: it cannot be pickled",
        got=f"{type(error).__name__}: {str(error).partition(chr(10))[0]}",
        next="leave out what is no tensor or plain value (a lambda, a lock, an open file), and "
        "flatten what is nested deeply.",
    )


class _Sink:
    """A file for torch.save that remembers the first error of the file below it.

    Measured for one tensor of 256 MB: 0.61 s, and 0.63 s when torch.save opens the path itself.
    """

    def __init__(self, file: Any) -> None:
        self._file = file
        self.error: OSError | None = None

    def write(self, data: Any) -> int:
        try:
            # A raw file may write less than it is given.
            view, done = memoryview(data).cast("B"), 0
            while done < len(view):
                written = self._file.write(view[done:])
                done += len(view) - done if written is None else written
            return done
        except OSError as error:
            self.error = self.error or error
            raise

    def flush(self) -> None:
        if not hasattr(self._file, "flush"):
            return
        try:
            self._file.flush()
        except OSError as error:
            self.error = self.error or error
            raise


def _pickle_module(copies: CpuCopies) -> types.ModuleType:
    """Pickle module that copies to the CPU the tensors that the walk does not reach: those of modules."""

    class CpuPickler(pickle.Pickler):
        def reducer_override(self, obj: Any) -> Any:
            if isinstance(obj, torch.Tensor) and is_on_device(obj):
                copied: Any = copies(obj)
                return copied.__reduce_ex__(2)
            return NotImplemented

    module: Any = types.ModuleType("ltc_cpu_pickle")
    module.Pickler = CpuPickler
    return module  # type: ignore[no-any-return]


def load(file_or_path: FileOrPath) -> Any:
    """Load a file of `save` or torch.save to the CPU; code in it is not run.

    Returns:
        what was saved, its tensors on the CPU.
    Raises:
        CheckpointIOError: there is no such file, or it cannot be read.
        CheckpointFormatError: the file needs code to be run, or is no file of torch.save. With torch before 2.10,
            whose reader has a known hole (CVE-2026-24747): it would use that, or is of the format before torch 1.6.
        CheckpointError: the file is incomplete or damaged.
    Cost: reads the file twice; the first time checks the CRC of each record.
    """
    if hasattr(file_or_path, "read"):
        file: Any = file_or_path
        return _load(file, f"the file object {getattr(file, 'name', type(file).__name__)}")
    path = os.path.abspath(os.fsdecode(file_or_path))
    if os.path.isdir(path):
        raise CheckpointFormatError(
            f"{path} is a directory, not a file",
            next="a streaming checkpoint is read by ltc_core.serialization.load(path).",
        )
    try:
        with open(path, "rb") as opened:
            return _load(opened, path)
    except CheckpointError:
        raise
    except OSError as error:
        raise CheckpointIOError(
            f"{error.strerror or error} while reading {path}",
            got=f"{type(error).__name__}: {error}",
            next="check the path, and who may read it.",
            errno=error.errno,
        ) from error


def _load(file: Any, name: str) -> Any:
    start = file.tell()
    file.seek(0, os.SEEK_END)
    size_bytes = file.tell() - start
    file.seek(start)
    if size_bytes == 0:
        raise CheckpointError(f"{name} is empty (0 bytes)", next=_NEXT_DAMAGED)
    _check_records(file, name, size_bytes)
    file.seek(start)
    try:
        return load_weights_only(file, name)
    except pickle.UnpicklingError as error:
        raise _refused(name, error) from error
    except (CheckpointError, OSError, MemoryError, Warning):
        raise
    except Exception as error:  # torch.load has no error type of its own for a damaged file
        raise CheckpointError(
            f"{name} is damaged, or not a file of save or torch.save",
            got=f"{size_bytes} bytes; {type(error).__name__}: {str(error).partition(chr(10))[0]}",
            next=_NEXT_DAMAGED,
        ) from error


_NEXT_DAMAGED = "load an older checkpoint, or copy the file again from where it came."


def _check_records(file: Any, name: str, size_bytes: int) -> None:
    """Find what torch.load does not notice: a truncated file, a flipped bit in a tensor."""
    looks_like_zip = file.read(4) == b"PK\x03\x04"
    if not looks_like_zip:
        return  # PyTorch's old format, or no checkpoint: torch.load reports it
    try:
        with zipfile.ZipFile(file) as archive:
            # Without set_crc32_options(True), its default, torch.save writes zeros.
            has_checksums = any(record.CRC for record in archive.infolist())
            damaged = archive.testzip() if has_checksums else None
    except (OSError, MemoryError):
        raise
    except Exception as error:  # zipfile has several errors for damaged files
        raise CheckpointError(
            f"{name} is incomplete or damaged: its list of records is not at its end",
            got=f"{size_bytes} bytes; {type(error).__name__}: {error}",
            next=_NEXT_DAMAGED,
        ) from error
    if damaged is not None:
        raise CheckpointError(
            f"{name} is damaged: its record {damaged!r} is not what was written",
            got="another CRC-32 than the one stored with the record",
            next=_NEXT_DAMAGED,
        )


def _refused(name: str, error: pickle.UnpicklingError) -> CheckpointFormatError:
    found = re.search(r"GLOBAL (\S+)", str(error))
    if found is None:
        return CheckpointFormatError(
            f"{name} is damaged, or not a file of save or torch.save",
            got=str(error).partition(chr(10))[0],
            next=_NEXT_DAMAGED,
        )
    needed = found.group(1)
    return CheckpointFormatError(
        f"{name} is refused: reading it would run {needed}, which may be anyone's code",
        got=f"a pickle that needs {needed}; expected tensors and plain Python containers",
        next="ask for the same data as a state_dict, or as a streaming checkpoint. If "
        f"{needed} is a harmless class that you know, load under `with "
        f"torch.serialization.safe_globals([{needed}]):`.",
    )
