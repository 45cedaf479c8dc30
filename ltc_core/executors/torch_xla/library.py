"""Loads torch_xla's native library, and sets the environment variables that it reads.

Only the library (`_XLAC`) is loaded, not the Python package, which patches PyTorch and starts other things: 0.1 s
instead of 3, and the name `torch_xla` stays free for scripts that expect the old package. Variables that the user has
set are kept, except for CPU_NUM_DEVICES, XLA_USE_BF16 and XLA_DOWNCAST_BF16. Used by `device`.
"""

from __future__ import annotations

import atexit
import functools
import importlib
import importlib.metadata
import importlib.util
import os
from pathlib import Path
from typing import Any

import torch

from ltc_core.device.hardware import hardware_kind
from ltc_core.errors import DeviceError
from ltc_core.executors.torch_xla import topology
from ltc_core.settings import settings
from ltc_core.tpu_chips import has_megacores

__all__ = ["load"]

# Flags that torch_xla's package sets too. With fast math, numbers would differ from eager's.
_XLA_FLAGS = {"xla_cpu_enable_fast_math": "false"}
_LIBTPU_FLAGS = {
    "xla_latency_hiding_scheduler_rerun": "1",
    "xla_tpu_prefer_async_allgather_to_allreduce": "true",
    "xla_tpu_use_enhanced_launch_barrier": "false",
    "xla_tpu_enable_flash_attention": "false",
}
_STORED_NARROW = {"XLA_USE_BF16": "LTC_USE_BF16", "XLA_DOWNCAST_BF16": "LTC_DOWNCAST_BF16"}
_HOW_TO_GET_IT = "pip install '.[tpu]' in an environment of its own: torch_xla 2.9 and the torch 2.9 it is built for"


@functools.cache
def load() -> Any:
    """torch_xla's library, initialised.

    Raises:
        DeviceError: it is not installed, does not fit this torch or cannot be loaded; or the chip of this process
            cannot be determined.

    Cost:
        0.1 s; the first use of a device then starts PJRT's client.
    """
    _check_versions()
    _check_name()
    _prepare_environment()
    try:
        library: Any = importlib.import_module("_XLAC")
    except ImportError as error:
        raise DeviceError(
            f"torch_xla's library cannot be loaded: {error}", next=_HOW_TO_GET_IT
        ) from error
    library._init_xla_lazy_backend()
    library._xla_set_enable_alias_with_buffer_donor_config(True)
    atexit.register(library._prepare_to_exit)
    return library


def _check_versions() -> None:
    asked = f"LTC_DEVICE={settings.device}"
    ours = ".".join(torch.__version__.split(".")[:2])
    try:
        found = importlib.metadata.version("torch_xla")
    except importlib.metadata.PackageNotFoundError:
        found = ""
    if not found or importlib.util.find_spec("_XLAC") is None:
        raise DeviceError(
            f"{asked} needs the package torch_xla, which is not installed",
            got=f"torch {torch.__version__}; torch_xla 2.9 with torch 2.9 is what fits",
            next=_HOW_TO_GET_IT,
        )
    if ".".join(found.split(".")[:2]) != ours:
        raise DeviceError(
            f"{asked}: torch_xla {found} loads only with the torch it is built for",
            got=f"torch {torch.__version__}, expected {'.'.join(found.split('.')[:2])}",
            next=_HOW_TO_GET_IT,
        )


def _check_name() -> None:
    if settings.device_name == "xla":
        raise DeviceError(
            f"the device cannot be called 'xla' with LTC_DEVICE={settings.device}: torch_xla's own is called so",
            next="unset LTC_DEVICE_NAME, or give it another name",
        )


def _prepare_environment() -> None:
    """Set the variables that the library, XLA and libtpu read when they are loaded."""
    environ = os.environ
    kind = environ.setdefault("PJRT_DEVICE", hardware_kind())
    environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "1")
    environ.setdefault("GRPC_VERBOSITY", "ERROR")
    _add_flags("XLA_FLAGS", _XLA_FLAGS)
    for theirs, ours in _STORED_NARROW.items():  # else the library would narrow dtypes as well
        if theirs in environ:
            environ.setdefault(ours, environ.pop(theirs))
    if kind.upper() == "CPU":  # no cache on disk: programs for the CPU cannot be read back
        environ["CPU_NUM_DEVICES"] = str(settings.num_devices)
        if settings.num_devices > 1:
            _prepare_cpu_replicas()
    else:
        cache = settings.compiled_cache_dir or os.path.join(settings.cache_dir, "xla")
        read_only = str(int(settings.compiled_cache_read_only))
        environ.setdefault("XLA_PERSISTENT_CACHE_PATH", cache)
        environ.setdefault("XLA_PERSISTENT_CACHE_READ_ONLY", read_only)
    if kind.upper() == "TPU":
        _prepare_tpu()
    settings.accept_environment()


def _prepare_cpu_replicas() -> None:
    """Make the programs of all devices run at the same time, because their collectives wait for each other.

    The asynchronous CPU client runs the programs that one thread launches one after the other, and torch_xla launches
    in a thread pool. If two devices got the same thread, one program waited for the thread and the other for the
    collective, until XLA ended the process. The synchronous client runs a program in the launching thread, so that
    thread launches no other meanwhile.
    """
    os.environ.setdefault("PJRT_CPU_ASYNC_CLIENT", "0")
    num_threads = (os.cpu_count() or 1) + settings.num_devices
    os.environ.setdefault("XLA_THREAD_POOL_SIZE", str(num_threads))


def _prepare_tpu() -> None:
    environ = os.environ
    _add_flags("LIBTPU_INIT_ARGS", _LIBTPU_FLAGS)
    environ.setdefault("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")
    environ.setdefault("TPU_ML_PLATFORM", "PyTorch/XLA")
    if has_megacores():
        environ.setdefault("TPU_MEGACORE", "megacore_dense")
    if "TPU_LIBRARY_PATH" not in environ and importlib.util.find_spec("libtpu") is not None:
        path = Path(importlib.import_module("libtpu").get_library_path())
        environ.setdefault("PTXLA_TPU_LIBRARY_PATH", str(path))
    environ.update(topology.chip_variables(environ))


def _add_flags(name: str, flags: dict[str, str]) -> None:
    """Add flags to a variable, except for flags that it already has."""
    words = os.environ.get(name, "").split()
    known = {word.lstrip("-").partition("=")[0] for word in words}
    words += [f"--{flag}={value}" for flag, value in flags.items() if flag not in known]
    os.environ[name] = " ".join(words)
