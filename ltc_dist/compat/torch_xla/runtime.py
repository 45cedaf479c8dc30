"""`xr`: `torch_xla.runtime`. Ranks are those of the job; a query initialises nothing."""

from __future__ import annotations

import os
from typing import Any

import torch

import ltc_core as ltc
import ltc_dist as ltd
from ltc_core.api.sharding import expect_mesh
from ltc_core.api.verbs import DeviceLike
from ltc_core.errors import DeviceError
from ltc_dist import spmd
from ltc_dist.compat import auto_sharding
from ltc_dist.compat.absent import NotHereError
from ltc_dist.job.ranks import ranks
from ltc_dist.spmd import num_devices

__all__ = [
    "addressable_device_count",
    "addressable_runtime_device_count",
    "device_type",
    "get_master_ip",
    "get_num_cached_compilation_graph",
    "global_device_count",
    "global_ordinal",
    "global_runtime_device_attributes",
    "global_runtime_device_count",
    "host_index",
    "initialize_cache",
    "is_bf16_supported",
    "is_spmd",
    "local_device_count",
    "local_ordinal",
    "local_process_count",
    "process_count",
    "process_index",
    "runtime_device_attributes",
    "set_device_type",
    "use_spmd",
    "using_pjrt",
    "world_size",
    "xla_device",
]


def using_pjrt() -> bool:
    """True: each process has its own devices. Scripts for 2.0 to 2.4 ask."""
    return True


def world_size() -> int:
    """Return the number of processes of the job; with `use_spmd` 1, since all of them train one model on one mesh."""
    return 1 if ltc.settings.spmd else ltd.world_size()


def global_ordinal() -> int:
    """Return this process's rank in the job; with `use_spmd` 0."""
    return 0 if ltc.settings.spmd else ltd.get_ordinal()


def local_ordinal() -> int:
    """Return this process's rank on its host."""
    return ltd.get_local_ordinal()


def process_index() -> int:
    """Return this process's rank in the job."""
    return ranks().rank


def process_count() -> int:
    """Return the number of processes of the job."""
    return ranks().world_size


def local_process_count() -> int:
    """Return the number of processes of this host."""
    return ranks().local_world_size


def host_index() -> int:
    """Index of this host, if all hosts have as many processes."""
    here = ranks()
    return here.rank // here.local_world_size


def addressable_device_count() -> int:
    """Return the devices of this process; with `use_spmd` 1, since a script then sees one device."""
    return 1 if is_spmd() else addressable_runtime_device_count()


def local_device_count() -> int:
    """Return the devices of this host; with `use_spmd` one for each process."""
    return addressable_device_count() * ranks().local_world_size


def global_device_count() -> int:
    """Return the devices of the job; with `use_spmd` 1."""
    return 1 if is_spmd() else global_runtime_device_count()


def addressable_runtime_device_count() -> int:
    """Return the devices of this process, also with `use_spmd`."""
    return len(ltc.get_lazy_supported_devices())


def global_runtime_device_count() -> int:
    """Return the devices of the job, also with `use_spmd`."""
    return addressable_runtime_device_count() * ranks().world_size


def xla_device(n: int | None = None, devkind: str | None = None) -> torch.device:
    """Return device `n` of this process, by default the current one."""
    return ltc.lazy_device(n, devkind)


def device_type() -> str:
    """Return what the devices compute on: 'CPU', 'CUDA', 'TPU'."""
    return ltc.lazy_device_hw()


def set_device_type(pjrt_device: str) -> None:
    """Choose what the devices compute on, before their first use.

    Raises:
        DeviceError: the devices are in use with another type, or LTC_DEVICE names another type.
    """
    settings = ltc.settings
    before = os.environ.get("PJRT_DEVICE")
    if not settings.is_used("device"):
        os.environ["PJRT_DEVICE"] = pjrt_device
    if pjrt_device.upper() != device_type():
        if before is None:
            os.environ.pop("PJRT_DEVICE", None)
        else:
            os.environ["PJRT_DEVICE"] = before
        raise DeviceError(
            f"the devices cannot be made {pjrt_device} in a running program",
            got=device_type(),
            next=f"start it with LTC_DEVICE={pjrt_device.lower()}",
        )


def is_bf16_supported() -> bool:
    """Whether bfloat16 is supported: always True."""
    return True


def runtime_device_attributes(device: DeviceLike) -> dict[str, Any]:
    """Return what is known of a device."""
    return {
        "name": str(torch.device(device or "cpu")),
        "kind": ltc.lazy_device_hw(device),
        "num_threads": torch.get_num_threads(),
    }


def global_runtime_device_attributes() -> list[dict[str, Any]]:
    """Return what is known of each device of this process."""
    return [runtime_device_attributes(name) for name in ltc.get_lazy_supported_devices()]


def get_num_cached_compilation_graph() -> int:
    """Return the number of graphs that programs were made for."""
    return ltc.metrics.counter_value("UncachedCompile") or 0


def get_master_ip() -> str:
    """Return the address of the host that the processes meet at."""
    return os.environ.get("MASTER_ADDR", "127.0.0.1")


def initialize_cache(path: str, readonly: bool = False) -> None:
    """Set the directory of compiled programs, also for the processes that this one starts.

    Raises:
        AssertionError: graphs were built already; the text is torch_xla's.
    """
    if get_num_cached_compilation_graph():
        raise AssertionError("Computation cache has already been initialized")
    settings = ltc.settings
    settings.compiled_cache_dir, settings.compiled_cache_read_only = path, readonly
    os.environ["LTC_COMPILED_CACHE_DIR"] = path
    os.environ["LTC_COMPILED_CACHE_READ_ONLY"] = str(int(readonly))


_has_set_variable = False  # whether `use_spmd` has set XLA_USE_SPMD


def is_spmd() -> bool:
    """Whether `use_spmd` was called, or LTC_SPMD or XLA_USE_SPMD is true.

    A script that deletes the variable which `use_spmd` has set is told False, as by torch_xla. Nothing else changes.
    """
    is_deleted = _has_set_variable and "XLA_USE_SPMD" not in os.environ
    return bool(ltc.settings.peek("spmd")) and not is_deleted


def use_spmd(auto: bool = False) -> None:
    """Say that tensors are divided over all devices of the process, by `torch_xla.distributed.spmd`.

    Processes that this one starts find XLA_USE_SPMD in their environment, as with torch_xla. From now on the metric
    `ExecuteReplicatedTime` is `ExecuteTime`.

    Args:
        auto: divide large tensors that nobody marks, too, when they come to the device: along their longest
            dimensions over a mesh of one axis, or of the shape in XLA_AUTO_SPMD_MESH, such as 2,4.

    Raises:
        NotHereError: the executor cannot divide tensors over the devices that there are.
    """
    spmd.use_spmd()
    ltc.metrics.register_metric("ExecuteReplicatedTime", of="ExecuteTime")
    count = len(ltc.get_lazy_supported_devices())
    if count > 1 and num_devices() == 1:
        raise NotHereError(
            f"tensors are not divided over the {count} devices of this process",
            got=f"LTC_EXECUTOR={ltc.settings.executor}",
            next="LTC_EXECUTOR=jax, with the package jax; or run a process for each device, with ltc-launch",
        )
    global _has_set_variable
    ltc.settings.spmd = _has_set_variable = True
    os.environ["XLA_USE_SPMD"] = "1"
    if count > 1:
        expect_mesh(ltc.lazy_device())
    if auto:
        auto_sharding.begin()
