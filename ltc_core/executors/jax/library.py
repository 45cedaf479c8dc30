"""JAX: loaded once, for the hardware that LTC_DEVICE names. Its settings stay those of the user's own code."""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import warnings
from typing import Any

from ltc_core.errors import DeviceError
from ltc_core.executors.hardware import hardware_kind
from ltc_core.settings import settings

__all__ = ["devices", "wide_types"]

# The hardware, and JAX's name of it.
_PLATFORMS = {"CPU": "cpu", "CUDA": "cuda", "TPU": "tpu"}


@functools.cache
def _jax() -> Any:
    if importlib.util.find_spec("jax") is None:
        raise DeviceError(
            "LTC_EXECUTOR=jax needs the package jax",
            got="no such package in this environment",
            next="pip install '.[jax]' (on a TPU '.[jax-tpu]', on a GPU '.[jax-cuda]'), or unset LTC_EXECUTOR",
        )
    import jax

    # JAX warns at each fork. The runtime holds its devices still at one, and a DataLoader's workers do not use them.
    warnings.filterwarnings("ignore", r"os\.fork\(\) was called\.", RuntimeWarning)
    if settings.num_devices > 1 and hardware_kind() == "CPU":
        # Only before JAX makes its client; later it raises, and the number of devices is checked below.
        with contextlib.suppress(RuntimeError):
            jax.config.update("jax_num_cpu_devices", settings.num_devices)
    return jax


@functools.cache
def devices() -> tuple[Any, ...]:
    """JAX's devices of this process.

    Raises:
        DeviceError: JAX is not installed, or finds no such hardware.
    """
    kind = hardware_kind()
    platform = _PLATFORMS.get(kind, kind.lower())
    library = _jax()
    try:
        return tuple(library.local_devices(backend=platform))
    except RuntimeError as error:
        raise DeviceError(
            f"JAX finds no {kind}",
            got=str(error).partition("\n")[0],
            next="install JAX's build for it and its driver, or set LTC_DEVICE",
        ) from error


def wide_types() -> Any:
    """Context in which JAX keeps 64 bits. Without it, JAX makes 32 of them, silently."""
    return _jax().enable_x64(True)
