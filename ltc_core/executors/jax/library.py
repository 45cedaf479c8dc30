"""JAX: loaded once, for the hardware that LTC_DEVICE names. Its settings stay those of the user's own code.

In a job the processes join before JAX makes its client, so that programs may span the devices of all of them. All
processes join, or none. Where they do not, `why_alone` says why, and collectives run on the host.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import os
import re
import sys
import tempfile
import time
import warnings
from collections.abc import Iterator, Sequence
from typing import Any, TextIO

from ltc_core.device.hardware import hardware_kind
from ltc_core.errors import DeviceError, first_line
from ltc_core.executors import companions
from ltc_core.executors.companions import Companions, NotTogether, Run
from ltc_core.settings import settings

__all__ = [
    "agree",
    "any_device",
    "devices",
    "devices_of_mesh",
    "devices_of_ranks",
    "owners_of",
    "require",
    "wait_together",
    "why_alone",
    "wide_types",
    "without_greeting",
]

# The hardware, and JAX's name of it.
_PLATFORMS = {"CPU": "cpu", "CUDA": "cuda", "TPU": "tpu"}
_JOIN_S = 60  # for all processes to connect, once all have come
# Several threads of gloo print theirs at a time, in pieces.
_GREETING = re.compile(
    rb"(\[Gloo\] Rank |\d+| is connected to | peer ranks\. |Expected number of connected peer ranks is : |\s)*"
)
_ABOUT_RECOVERY = re.compile(rb"W.*recoverable task feature.*\s*")
_LOOK_S = 1.0  # between two checks whether a process has ended
_LATE_S = 5.0  # who is at something else for so long has not just been quicker
_LONGEST_PAUSE_S = 0.005
_alone = ""
_joined: tuple[Any, ...] = ()
_of_mesh: tuple[Any, ...] = ()
_job: Companions | None = None


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


def is_installed() -> bool:
    return importlib.util.find_spec("jax") is not None


def require(what: str, instead: str = "") -> None:
    """Check that JAX is installed.

    Raises:
        DeviceError: it is not; `what` needs it, `instead` is what else the user can do.
    """
    if not is_installed():
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
    if settings.spmd and _alone:
        raise DeviceError(
            "the devices of the processes cannot be one mesh",
            got=_alone,
            next="let each process make its device at the same place, before it waits for others; or unset LTC_SPMD",
        )
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


def devices_of_mesh() -> tuple[Any, ...]:
    """The devices that a mesh has: this process's, or with LTC_SPMD those of all processes, in the order of ranks."""
    own = devices()
    return _of_mesh or own


def owners_of(chosen: Sequence[Any]) -> str:
    """Text of devices and the processes that have them, for the key of programs on disk."""
    return " ".join(f"{device.id}@{device.process_index}" for device in chosen)


def agree(lane: str, what: str, where: str) -> None:
    """Wait until each process of a mesh of all of them is about to do the same, in one order for each lane.

    Raises:
        CollectiveError: a process is about to do something else, has ended, or does not come in time.
    """
    assert _job is not None
    _job.agree(lane, what, where)


def wait_together(arrays: Sequence[Any], run: Run) -> None:
    """Wait for results of a run of a program of all processes.

    Raises:
        PeerEndedError: a process has ended, for which the program may wait for ever.
        CollectiveError: a process is at something else.
    """
    assert _job is not None
    begun = looked = time.monotonic()
    pause_s = 0.0
    while not all(map(_is_done, arrays)):
        time.sleep(pause_s)
        pause_s = min(2 * pause_s or 2e-5, _LONGEST_PAUSE_S)
        now = time.monotonic()
        if now - looked >= _LOOK_S:
            _job.check(run, now - begun >= _LATE_S)
            looked = now
    _job.end_wait()


def _is_done(array: Any) -> bool:
    """Whether an array is computed; one that a later program has overwritten was."""
    try:
        return array.is_deleted() or array.is_ready()  # type: ignore[no-any-return]
    except RuntimeError:
        if array.is_deleted():
            return True
        raise


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
            # Else each process waits at its end for all others, and one that has failed is not told.
            library.config.update("jax_enable_recoverability", settings.spmd)
            with _without(_ABOUT_RECOVERY, sys.__stderr__):
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
    if library._src.xla_bridge.backends_are_initialized() or library.distributed.is_initialized():
        return "the script has used JAX before its first tensor was on the device"
    if settings.spmd:
        return ""
    if settings.collectives == "host":
        return "LTC_COLLECTIVES=host"
    if settings.collectives == "auto" and settings.device == "cpu":
        return "gloo is slower within programs than between them on a CPU"
    if settings.num_devices > 1:
        return f"it has {settings.num_devices} devices, and only processes with one join"
    return ""


def _connect(library: Any, job: Companions, platform: str) -> None:
    """Connect the devices of all processes by a first collective.

    On a CPU nothing is exchanged through JAX's coordinator afterwards. It is ended: it would abort each process that
    outlives rank 0. With LTC_SPMD each group of devices that a program connects is connected through it.
    """
    global _joined, _of_mesh, _job
    if settings.spmd:
        _job = job
        everywhere = library.devices(platform)
        _of_mesh = tuple(sorted(everywhere, key=lambda device: (device.process_index, device.id)))
        # JAX would end the coordinator first of all that rank 0 does at its end, and with it all other processes.
        state = library._src.distributed.global_state
        parts = [part for part in (state.client, state.service) if part is not None]
        state.client = state.service = None
        job.keep_connected(lambda: [part.shutdown() for part in parts])
        return
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
    with without_greeting():
        library.block_until_ready(library.jit(add)(whole))
    if platform == "cpu":
        library.distributed.shutdown()
    _joined = found


def without_greeting() -> contextlib.AbstractContextManager[None]:
    """Leave out the lines that gloo prints to stdout when it has connected; what others print meanwhile is kept."""
    return _without(_GREETING, sys.__stdout__)


@contextlib.contextmanager
def _without(lines: re.Pattern[bytes], stream: TextIO | None) -> Iterator[None]:
    """Leave out lines that libraries print to a stream of the process."""
    try:
        number = stream.fileno() if stream is not None else -1
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
                rest = [line for line in printed if not lines.fullmatch(line)]
                os.write(number, b"".join(rest))
    finally:
        os.close(kept)


def wide_types() -> Any:
    """Context in which JAX keeps 64 bits. Without it, JAX makes 32 of them, silently."""
    return _jax().enable_x64(True)
