"""A request to the compiler's process, and the key of its artifact.

A `Request` is a subgraph, a device, a number of threads and the numeric flags. Its key is a digest of these, of the
machine, of PyTorch and of the sources that lower the subgraph: equal keys mean equal programs, in any process and run.
Made by `tiers`, sent by `service`, and decoded in the compiler's process by `build_artifact`.
"""

from __future__ import annotations

import copyreg
import dataclasses
import functools
import hashlib
import io
import os
import pickle
import platform
import shutil
from pathlib import Path
from typing import Any

import torch

from ltc_core.executors.inductor.compiler.compiler_variables import compiler_variables
from ltc_core.executors.inductor.numeric_flags import NumericFlags
from ltc_core.executors.processor import processor
from ltc_core.graph.ir import TensorMeta
from ltc_core.program.lowering.retrace import Refused
from ltc_core.program.subgraph import Subgraph

__all__ = ["Request", "decode", "encode", "key"]


_PACKAGE = Path(__file__).parents[3]
# These sources decide how a subgraph is compiled: what the compiler's process imports.
_SOURCES = (
    "graph/*.py",
    "program/*.py",
    "program/lowering/*.py",
    "executors/processor.py",
    "executors/inductor/lowering/*.py",
    "executors/inductor/numeric_flags.py",
    "executors/inductor/compiler/build_artifact.py",
    "executors/inductor/compiler/kernels.py",
    "executors/inductor/compiler/shared_runtime.py",
    "executors/inductor/compiler/compiler_variables.py",
    "executors/inductor/compiler/request.py",
)


@dataclasses.dataclass(frozen=True)
class Request:
    """A subgraph to be compiled for a device, tuned for a number of threads, under numeric flags."""

    subgraph: Subgraph
    device: str
    num_threads: int
    flags: NumericFlags


class _Pickler(pickle.Pickler):
    dispatch_table = copyreg.dispatch_table.copy()


def _reduce_op(op: torch._ops.OpOverload) -> tuple[Any, ...]:
    return _find_op, (op.namespace, op._opname, op._overloadname)


def _reduce_meta(meta: TensorMeta) -> tuple[Any, ...]:
    return TensorMeta.of, (tuple(meta.size), meta.stride, meta.offset, meta.dtype)


def _reduce_memory_format(value: torch.memory_format) -> tuple[Any, ...]:
    # PyTorch gives a name with a dot. A pickler looks for a module that has it, and takes the script if that is
    # `__mp_main__`, as in a job.
    return _find_memory_format, (str(value).removeprefix("torch."),)


def _find_memory_format(name: str) -> torch.memory_format:
    return getattr(torch, name)  # type: ignore[no-any-return]


_Pickler.dispatch_table[torch.memory_format] = _reduce_memory_format
_Pickler.dispatch_table[torch._ops.OpOverload] = _reduce_op
_Pickler.dispatch_table[TensorMeta] = _reduce_meta


def _find_op(namespace: str, name: str, overload: str) -> torch._ops.OpOverload:
    try:
        packet = getattr(getattr(torch.ops, namespace), name)
        return getattr(packet, overload)  # type: ignore[no-any-return]
    except AttributeError:
        op = f"{namespace}.{name}.{overload}"
        raise Refused(op, "it is defined by the script, which the compiler does not run") from None


def encode(request: Request) -> bytes:
    out = io.BytesIO()
    _Pickler(out).dump(request)
    return out.getvalue()


def decode(payload: bytes) -> Request:
    """The request that `encode` wrote.

    Raises:
        Refused: the subgraph has an op that this process does not have.
    """
    return pickle.loads(payload)  # type: ignore[no-any-return]


def key(request: Request) -> str:
    """Key of a request, 64 hexadecimal digits. Cost: about 5 us a node."""
    digest = hashlib.sha256(_environment().encode())
    digest.update(f"{request.device} {_gpu(request.device)} {request.num_threads}\n".encode())
    digest.update(f"{request.flags}\n".encode())
    digest.update(request.subgraph.text().encode())
    return digest.hexdigest()


@functools.cache
def _gpu(device: str) -> str:
    """Compute capability of the GPU, on which its compiled programs depend; "" for the CPU."""
    is_there = device == "cuda" and torch.cuda.is_available()
    return f"{torch.cuda.get_device_capability()}" if is_there else ""


@functools.cache
def _environment() -> str:
    """Text of everything that programs depend on besides the request."""
    return " ".join(
        (
            torch.__version__,
            platform.machine(),
            processor(),
            _compiler(),
            _sources(),
            *(f"{name}={value}" for name, value in compiler_variables().items()),
        )
    )


def _compiler() -> str:
    """Path, size and time of the C++ compiler; its version is not asked for, as that would start a process."""
    path = shutil.which(os.environ.get("CXX", "g++").split()[0])
    if path is None:
        return "none"
    status = os.stat(path)
    return f"{os.path.realpath(path)} {status.st_size} {status.st_mtime_ns}"


def _sources() -> str:
    """Digest of the sources that decide how a subgraph is compiled. Cost: 3 ms, once a process."""
    digest = hashlib.sha256()
    for path in sorted(path for folder in _SOURCES for path in _PACKAGE.glob(folder)):
        digest.update(str(path.relative_to(_PACKAGE)).encode())
        digest.update(path.read_bytes())
    return digest.hexdigest()[:16]
