"""OpenMP threads: how many a Python thread uses, and release of a team before another thread computes.

libgomp gives each thread that opens a parallel region its own team of OpenMP threads, and keeps it. If the process has
more OpenMP threads than cores, libgomp lets all of them spin much shorter, and each parallel region waits for the
kernel: a step of the MLP takes 5.4 instead of 1.4 ms in the worker if the main thread has a team.
So a thread releases its team before it submits work to the worker, and before a fork: a child with an inherited team
hangs.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import torch

__all__ = [
    "addresses",
    "has_teams",
    "one_thread",
    "release_team",
    "use_threads",
]

_SOFT_PAUSE = 1  # omp_pause_soft
_RUNTIME = "libgomp"  # other runtimes free the teams of all threads, or none


class _DlInfo(ctypes.Structure):
    _fields_ = (
        ("dli_fname", ctypes.c_char_p),
        ("dli_fbase", ctypes.c_void_p),
        ("dli_sname", ctypes.c_char_p),
        ("dli_saddr", ctypes.c_void_p),
    )


def has_teams() -> bool:
    """Whether PyTorch uses libgomp (9 or later), whose teams of threads can be released."""
    return _pause is not None


def release_team() -> None:
    """Free the calling thread's OpenMP team; its next parallel region makes a new one.

    Does nothing inside of a parallel region, or if PyTorch does not use libgomp (9 or later).

    Cost:
        0.2 us if there is no team, 18 us if there is one, 30 us for the next one (two threads).
    """
    if _release is not None:
        _release()


def release_by(function: Callable[[], object]) -> None:
    """Have `release_team` call this: the C++ part notes that the calling thread has no team."""
    global _release
    if _release is not None:
        _release = function


def use_threads(count: int) -> None:
    """Set the number of OpenMP and MKL threads that the calling thread uses.

    Other threads keep theirs. If PyTorch does not use libgomp, `torch.set_num_threads` is called instead, which sets
    MKL's number for all threads.
    """
    if _set_threads is None:
        torch.set_num_threads(count)
        return
    torch.get_num_threads()  # a thread's first call sets PyTorch's default, which would undo ours
    _set_threads(count)
    if _set_mkl_threads is not None:
        _set_mkl_threads(count)


@contextmanager
def one_thread() -> Iterator[None]:
    """Compute without a team: its threads would go on to spin on the cores that the worker computes on. Cost: 3 us."""
    count = torch.get_num_threads()
    if count == 1 or _set_threads is None:
        yield
        return
    use_threads(1)
    try:
        yield
    finally:
        use_threads(count)


def addresses() -> tuple[int, ...]:
    """Those of the functions that set OpenMP's and MKL's threads of the calling thread, and free and call its team.

    0: there is none.
    """
    found = _set_threads, _set_mkl_threads, _pause, getattr(_openmp, "GOMP_parallel", None)
    return tuple(0 if _set_threads is None else _address_of(each) for each in found)


def _address_of(function: object | None) -> int:
    return ctypes.cast(function, ctypes.c_void_p).value or 0 if function else 0  # type: ignore[arg-type]


def _file_of(function: object) -> str:
    """Name of the file that a C function was loaded from."""
    info = _DlInfo()
    found = ctypes.CDLL(None).dladdr(ctypes.c_void_p(_address_of(function)), ctypes.byref(info))
    return os.path.basename(os.fsdecode(info.dli_fname)) if found and info.dli_fname else ""


def _candidates() -> list[ctypes.CDLL]:
    """Libraries that may be PyTorch's OpenMP runtime: the process itself, and libgomp files beside PyTorch."""
    package = Path(torch.__file__).parent
    found: list[ctypes.CDLL] = [ctypes.PyDLL(None)]
    for path in (*package.glob("lib/libgomp*"), *package.parent.glob("torch.libs/libgomp*")):
        try:
            found.append(ctypes.PyDLL(str(path), mode=os.RTLD_NOLOAD | os.RTLD_LAZY))
        except OSError:  # this file is not loaded
            continue
    return found


def _find_runtime() -> ctypes.CDLL | None:
    # PyDLL holds the GIL during a call: to acquire it again could cost more than the call.
    for library in _candidates():
        try:
            pause = library.omp_pause_resource_all
        except AttributeError:  # no OpenMP runtime, or an old one
            continue
        # PyTorch is bound to the first runtime in the process's symbol order.
        return library if _file_of(pause).startswith(_RUNTIME) else None
    return None


def _find_mkl() -> Callable[[int], int] | None:
    library = ctypes.PyDLL(str(Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"))
    return getattr(library, "MKL_Set_Num_Threads_Local", None)


_openmp = _find_runtime()
_pause: Callable[[int], int] | None = getattr(_openmp, "omp_pause_resource_all", None)
_release: Callable[[], object] | None = None if _pause is None else partial(_pause, _SOFT_PAUSE)
_set_threads: Callable[[int], None] | None = getattr(_openmp, "omp_set_num_threads", None)
_set_mkl_threads = None if _openmp is None else _find_mkl()
