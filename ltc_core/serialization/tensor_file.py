"""Write one tensor as a safetensors file, and read it back into memory: `TensorEntry`.

The format is 8 bytes of length, a JSON header, the bytes of the tensor. Not through the library's
functions, for three reasons seen with safetensors 0.8: load_file hands out a mapping of the file
(overwrite the file and the loaded tensor is zeros), its errors hide the errno, and it needs numpy.
Files written here are read by the library, and the other way round. The digest is taken on the
way, so that no file is read or written twice. An entry describes a file in the `index`.
"""

import ctypes
import hashlib
import itertools
import json
import math
import os
import stat
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from io import BufferedReader
from typing import Any

import torch

from ltc_core.errors import CheckpointError, CheckpointFormatError, first_line
from ltc_core.serialization.nodes import DTYPES

_CHUNK_BYTES = 16 << 20
_MAX_HEADER_BYTES = 1 << 20
_HEADER_KEY = "tensor"

# Dtypes that safetensors has had from the start. Complex numbers are stored as pairs of reals, others as bytes:
# see `stored_as` of an entry.
_CODES: dict[torch.dtype, str] = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}


@dataclass(frozen=True)
class TensorEntry:
    """Entry of the index for one tensor: its file, dtype and shape."""

    file: str
    dtype: str
    shape: tuple[int, ...]
    stored_as: str  # "tensor", "real pairs" or "bytes"
    nbytes: int  # of the file
    digest: str  # BLAKE2b of the file, 32 bytes in hexadecimal
    requires_grad: bool
    parameter: bool

    def stored(self) -> tuple[torch.dtype, tuple[int, ...]]:
        """Return the dtype and the shape in the file."""
        dtype = DTYPES[self.dtype]
        if self.stored_as == "real pairs":
            return dtype.to_real(), (*self.shape, 2)
        if self.stored_as == "bytes":
            return torch.uint8, (math.prod(self.shape) * dtype.itemsize,)
        return dtype, self.shape

    def header(self) -> dict[str, Any]:
        """Return the header of the file."""
        dtype, shape = self.stored()
        end = math.prod(shape) * dtype.itemsize
        code = {"dtype": _CODES[dtype], "shape": list(shape), "data_offsets": [0, end]}
        return {_HEADER_KEY: code}


def why_not_storable(tensor: torch.Tensor, on_device: bool) -> str:
    """Why the format cannot hold a tensor, and what to do; "" if it can."""
    if tensor.is_nested:
        return "it is a nested tensor; save tensor.unbind()"
    if tensor.layout != torch.strided:
        return f"its layout is {tensor.layout}; save tensor.to_dense()"
    if tensor.is_quantized:
        return "it is quantized; save tensor.dequantize(), or its parts"
    if tensor.is_meta:
        return "it is a meta tensor, which has no values; materialise it first"
    plain = type(tensor) in (torch.Tensor, torch.nn.Parameter)
    if not plain and not on_device:
        kind = f"{type(tensor).__module__}.{type(tensor).__qualname__}"
        return f"it is a {kind}; save the plain tensors it is made of"
    return ""


def write_tensor(
    directory: str, number: int, tensor: torch.Tensor, progress: Callable[[], None] = lambda: None
) -> TensorEntry:
    """Write a CPU tensor as file `number` of `directory`.

    Args:
        progress: called for each piece that is written.

    Raises:
        OSError: from the operating system, as it is.
    Cost: no copy of a contiguous tensor.
    """
    entry = TensorEntry(
        file=f"t_{number:05d}.safetensors",
        dtype=str(tensor.dtype).removeprefix("torch."),
        shape=tuple(tensor.shape),
        stored_as=stored_as(tensor.dtype),
        nbytes=0,
        digest="",
        requires_grad=tensor.requires_grad,
        parameter=isinstance(tensor, torch.nn.Parameter),
    )
    data = tensor.detach().resolve_conj().resolve_neg().contiguous()
    header = json.dumps(entry.header(), separators=(",", ":")).encode("ascii")
    header += b" " * (-len(header) % 8)
    digest = hashlib.blake2b(digest_size=32)
    with open(os.path.join(directory, entry.file), "xb") as file:
        chunks: Iterable[bytes | memoryview] = itertools.chain(
            [len(header).to_bytes(8, "little"), header], _chunks(data)
        )
        for chunk in chunks:
            file.write(chunk)
            digest.update(chunk)
            progress()
        nbytes = file.tell()
    return replace(entry, nbytes=nbytes, digest=digest.hexdigest())


def stored_as(dtype: torch.dtype) -> str:
    """How tensors of a dtype are stored."""
    if dtype in _CODES:
        return "tensor"
    return "real pairs" if dtype.is_complex else "bytes"


def _chunks(tensor: torch.Tensor) -> list[memoryview]:
    """Memory of a contiguous CPU tensor in chunks, without numpy and without a copy."""
    nbytes = tensor.numel() * tensor.itemsize
    if nbytes == 0:
        return []
    view = memoryview((ctypes.c_ubyte * nbytes).from_address(tensor.data_ptr()))
    return [view[start : start + _CHUNK_BYTES] for start in range(0, nbytes, _CHUNK_BYTES)]


def open_file(directory: int, name: str) -> BufferedReader:
    """Open a file of the directory with descriptor `directory`.

    Raises:
        CheckpointError: there is none.
        CheckpointFormatError: it is a link or not an ordinary file.
    """
    flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC  # a pipe must not block
    try:
        if stat.S_ISREG(os.stat(name, dir_fd=directory, follow_symlinks=False).st_mode):
            return open(os.open(name, flags, dir_fd=directory), "rb")
    except FileNotFoundError:
        raise CheckpointError(f"{name}: missing") from None
    raise CheckpointFormatError(f"{name}: a link, a directory or a device instead of a file")


def read_tensor(directory: int, entry: TensorEntry) -> torch.Tensor:
    """Read the tensor of `entry`; nothing is allocated before the sizes agree.

    Raises:
        CheckpointError: the file is missing, cut short, or not what was written.
        CheckpointFormatError: the file does not hold what the entry says.
        OSError: from the operating system, as it is.
    """
    digest = hashlib.blake2b(digest_size=32)
    with open_file(directory, entry.file) as file:
        check_size(file, entry)
        prefix = file.read(8)
        length = int.from_bytes(prefix, "little")
        header = file.read(length) if length <= min(_MAX_HEADER_BYTES, entry.nbytes) else b""
        dtype, shape = entry.stored()
        expected_bytes = 8 + length + math.prod(shape) * dtype.itemsize
        if not _is_header_of(header, entry) or expected_bytes != entry.nbytes:
            raise CheckpointFormatError(f"{entry.file}: its header is not what the index says")
        digest.update(prefix)
        digest.update(header)
        # Read and digested in one pass: a digest first would read each file twice. A tensor with a
        # wrong digest is discarded here.
        data = _allocated(entry)
        for chunk in _chunks(data):
            if file.readinto(chunk) != len(chunk):
                raise CheckpointError(f"{entry.file}: became shorter while it was read")
            digest.update(chunk)
    if digest.hexdigest() != entry.digest:
        raise CheckpointError(f"{entry.file}: its {entry.nbytes} bytes are not what was written")
    return _restored(data, entry)


def check_size(file: BufferedReader, entry: TensorEntry) -> None:
    """Raise a CheckpointError if the file of `entry` does not have the size it was written with."""
    found = os.fstat(file.fileno()).st_size
    if found != entry.nbytes:
        raise CheckpointError(f"{entry.file}: {found} of {entry.nbytes} bytes")


def _is_header_of(header: bytes, entry: TensorEntry) -> bool:
    try:
        found = json.loads(header)
    except (ValueError, RecursionError):
        return False
    return bool(found == entry.header())


def _allocated(entry: TensorEntry) -> torch.Tensor:
    dtype, shape = entry.stored()
    try:
        return torch.empty(shape, dtype=dtype)
    except RuntimeError as error:  # torch raises it when there is no memory
        raise CheckpointError(
            f"{entry.file}: no memory for its {entry.nbytes} bytes",
            got=first_line(error),
            next="free host memory, or load on a machine that has more.",
        ) from error


def _restored(data: torch.Tensor, entry: TensorEntry) -> torch.Tensor:
    try:
        if entry.stored_as == "real pairs":
            data = torch.view_as_complex(data)
        elif entry.stored_as == "bytes":
            data = data.view(DTYPES[entry.dtype]).reshape(entry.shape)
        if entry.parameter:
            return torch.nn.Parameter(data, requires_grad=entry.requires_grad)
        return data.requires_grad_(entry.requires_grad)
    except RuntimeError as error:
        raise CheckpointFormatError(
            f"{entry.file}: there is no such tensor of {entry.dtype}", got=str(error)
        ) from error
