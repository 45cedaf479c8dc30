"""JAX: loaded once, for the hardware that LTC_DEVICE names. Its settings stay those of the user's own code.

In a job the processes join before JAX makes its client, so that programs may span the devices of all of them. All
processes join, or none. Where they do not, `why_alone` says why, and collectives run on the host.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import os
import sys
import tempfile
import warnings
from collections.abc import Iterator
from typing import Any

from ltc_core.errors import DeviceError, first_line
from ltc_core.executors import companions
from ltc_core.executors.companions import Companions, NotTogether
from ltc_core.executors.hardware import hardware_kind
from ltc_core.settings import settings

__all__ = ["any_device", "devices", "devices_of_ranks", "require", "wide_types", "why_alone"]

# The hardware, and JAX's name of it.
_PLATFORMS = {"CPU": "cpu", "CUDA": "cuda", "TPU": "tpu"}
_JOIN_S = 60  # for all processes to connect, once all have come
_alone = ""
_joined: tuple[Any, ...] = ()


@functools.cache
def _jax() -> Any:
    require("LTC_EXECUTOR=jax", ", or unset LTC_EXECUTOR")
    import jax

    # JAX warns at each fork. The runtime holds its devices still at one, and a DataLoader's workers do not use them.
    warnings.filterwarnings("ignore", r"os\.fork\(\) was called\.", RuntimeWarning)
    if settings.num_devices > 1 and hardware_kind() == "CPU":
        # Only before JAX makes its client; later it raises, and the number of devices is checked below.
        with contextlib.suppress(RuntimeError):
            jax.config.update("jax_num_cpu_devices", settings.num_devices)
    return jax


def require(what: str, instead: str = "") -> None:
    """Check that JAX is installed.

    Raises:
        DeviceError: it is not; `what` needs it, `instead` is what else the user can do.
    """
    if importlib.util.find_spec("jax") is None:
        raise DeviceError(
            f"{what} needs the package jax",
            got="no such package in this environment",
            next=f"pip install '.[jax]' (on a TPU '.[jax-tpu]', on a GPU '.[jax-cuda]'){instead}",
        )


def any_device() -> Any:
    """JAX's device for a program of its own: the runtime's, or JAX's first one where another executor runs."""
    return devices()[0] if settings.executor == "jax" else _jax().local_devices()[0]


@functools.cache
def devices() -> tuple[Any, ...]:
    """JAX's devices of this process.

    Raises:
        DeviceError: JAX is not installed, or finds no such hardware.
    """
    kind = hardware_kind()
    platform = _PLATFORMS.get(kind, kind.lower())
    library = _jax()
    job = _join(library)
    try:
        found = tuple(library.local_devices(backend=platform))
        if job is not None:
            _connect(library, job, platform)
        return found
    except RuntimeError as error:
        raise DeviceError(
            f"JAX finds no {kind}",
            got=str(error).partition("\n")[0],
            next="install JAX's build for it and its driver, or set LTC_DEVICE",
        ) from error


def devices_of_ranks() -> tuple[Any, ...]:
    """The device of each process of the job, if programs can span them; else empty."""
    devices()
    return _joined


def why_alone() -> str:
    """Why the devices of the job are not joined; empty if they are, or if there is one process."""
    devices()
    return _alone


def _join(library: Any) -> Companions | None:
    """Join the other processes of the job, before JAX has a client; None if they are not joined."""
    global _alone
    job = companions.find()
    if job is None:
        return None
    try:
        address = job.meet(_refusal(library))
        failure = ""
        try:
            library.config.update("jax_cpu_collectives_implementation", "gloo")
            library.config.update("jax_enable_preemption_service", False)  # it would take SIGTERM
            library.distributed.initialize(
                address,
                job.count,
                job.rank,
                coordinator_bind_address=address,
                initialization_timeout=_JOIN_S,
                cluster_detection_method="deactivate",
            )
        except (RuntimeError, ValueError) as error:
            failure = first_line(error)
        try:
            job.confirm(failure)
        except NotTogether:
            if not failure:
                library.distributed.shutdown()
            raise
    except NotTogether as error:
        _alone = str(error)
        return None
    return job


def _refusal(library: Any) -> str:
    """Why this process cannot join the others; empty if it can."""
    if settings.collectives == "host":
        return "LTC_COLLECTIVES=host"
    if settings.collectives == "auto" and settings.device == "cpu":
        return "gloo is slower within programs than between them on a CPU"
    if settings.num_devices > 1:
        return f"it has {settings.num_devices} devices, and only processes with one join"
    if library._src.xla_bridge.backends_are_initialized() or library.distributed.is_initialized():
        return "the script has used JAX before its first tensor was on the device"
    return ""


def _connect(library: Any, job: Companions, platform: str) -> None:
    """Connect the devices of all processes by a first collective.

    On a CPU nothing is exchanged through JAX's coordinator afterwards. It is ended: it would abort each process that
    outlives rank 0.
    """
    global _joined
    own = {device.process_index: device for device in reversed(library.devices(platform))}
    found = tuple(own[rank] for rank in range(job.count))
    mesh = library.sharding.Mesh(found, ["ranks"])
    spec = library.sharding.PartitionSpec("ranks")
    lies = library.sharding.NamedSharding(mesh, spec)
    ones = library.device_put(library.numpy.ones(1), found[job.rank])
    whole = library.make_array_from_single_device_arrays((job.count,), lies, [ones])
    add = library.shard_map(
        lambda x: library.lax.psum(x, "ranks"), mesh=mesh, in_specs=spec, out_specs=spec
    )
    with _without_greeting():
        library.block_until_ready(library.jit(add)(whole))
    if platform == "cpu":
        library.distributed.shutdown()
    _joined = found


@contextlib.contextmanager
def _without_greeting() -> Iterator[None]:
    """Leave out the line that gloo prints to stdout when it has connected; what others print meanwhile is kept."""
    try:
        number = sys.__stdout__.fileno() if sys.__stdout__ is not None else -1
    except (OSError, ValueError):
        number = -1
    if number < 0:
        yield
        return
    kept = os.dup(number)
    try:
        with tempfile.TemporaryFile() as printed:
            os.dup2(printed.fileno(), number)
            try:
                yield
            finally:
                os.dup2(kept, number)
                printed.seek(0)
                rest = [line for line in printed if not line.startswith(b"[Gloo] ")]
                os.write(number, b"".join(rest))
    finally:
        os.close(kept)


def wide_types() -> Any:
    """Context in which JAX keeps 64 bits. Without it, JAX makes 32 of them, silently."""
    return _jax().enable_x64(True)
