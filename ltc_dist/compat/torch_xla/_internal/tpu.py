"""`torch_xla._internal.tpu`: the chips of this TPU host, and its place in its slice.

In: variables, the PCI bus, and the metadata of the virtual machine. Out: numbers for libraries that ask before they use
a device, and the variables of a process with one chip. ltc sets these variables itself (`ltc_core.executors.torch_xla.
topology`); here a script reads or sets them.
"""

from __future__ import annotations

import math
import os
import re
from typing import Any, NamedTuple

import ltc_core as ltc
import ltc_dist as ltd
from ltc_core.executors.torch_xla import topology
from ltc_core.tpu_chips import CHIP_IDS as _TPU_PCI_DEVICE_IDS
from ltc_core.tpu_chips import GOOGLE as _GOOGLE_PCI_VENDOR_ID
from ltc_core.tpu_chips import count_chips
from ltc_dist.compat.absent import Absent
from ltc_dist.compat.table import PLUGINS
from ltc_dist.compat.torch_xla.core import xla_env_vars as xenv
from ltc_dist.compat.torch_xla.runtime import local_device_count
from ltc_dist.compat.torch_xla.utils.utils import getenv_as

__all__ = [
    "_GOOGLE_PCI_VENDOR_ID",
    "_TPU_PCI_DEVICE_IDS",
    "MeshShape",
    "TpuEnv",
    "TpuPlugin",
    "build_tpu_env_from_vars",
    "configure_one_chip_topology",
    "configure_topology",
    "discover_master_worker_ip",
    "get_tpu_env",
    "get_tpu_type",
    "get_worker_ips",
    "num_available_chips",
    "num_available_devices",
    "num_expected_global_devices",
    "num_local_processes",
    "num_logical_cores_per_chip",
    "num_tpu_workers",
    "process_bounds_size",
    "task_id",
    "version",
    "worker_id",
]

TpuEnv = dict[str, Any]
TpuPlugin = Absent("torch_xla._internal.tpu.TpuPlugin", PLUGINS)

_METADATA_SERVER = topology.METADATA_SERVER


class MeshShape(NamedTuple):
    """Chips, processes or hosts along the three axes of a slice."""

    x: int
    y: int
    z: int

    @classmethod
    def from_string(cls, mesh: str) -> MeshShape:
        """Read the text of a variable, such as '2,2,1'.

        Raises:
            ValueError: there are not three numbers.
        """
        dims = [int(dim) for dim in mesh.split(",")]
        if len(dims) != 3:
            raise ValueError(f"Mesh shape '{mesh}' should be length 3")
        return cls(*dims)

    @property
    def size(self) -> int:
        return math.prod(self)

    def __mul__(self, other: Any) -> MeshShape:
        return MeshShape(*(a * b for a, b in zip(self, other, strict=True)))


# -- the chips of this host -------------------------------------------------------------------------


def num_available_chips() -> int:
    """Count the TPU chips on this host's PCI bus."""
    return count_chips()


def num_logical_cores_per_chip() -> int:
    """Devices of a chip."""
    return 2 if version() <= 3 else 1


def num_available_devices() -> int:
    """Count the devices of this host's TPU chips. A host without chips has the devices of ltc."""
    chips = num_available_chips()
    return chips * num_logical_cores_per_chip() if chips else local_device_count()


def num_expected_global_devices() -> int:
    """Count the devices of the slice, if each of its hosts has as many."""
    return num_available_devices() * num_tpu_workers()


def num_local_processes() -> int:
    """Count the processes that `xmp.spawn` starts: one a chip, and no more than TPU_PROCESS_BOUNDS has."""
    chips = num_available_chips() or ltc.settings.num_devices
    return min(chips, process_bounds_size() or chips)


def process_bounds_size() -> int | None:
    """Count the processes of all hosts that TPU_PROCESS_BOUNDS has; None if it is not set."""
    bounds = os.environ.get(xenv.TPU_PROCESS_BOUNDS)
    return MeshShape.from_string(bounds).size if bounds else None


# -- the place of this host in its slice ------------------------------------------------------------


def _get_metadata(key: str) -> str:
    """Text of an attribute of this virtual machine.

    Raises:
        TpuHostError: no metadata server answers within 5 s, or it does not have the attribute.
    """
    return topology.fetch_attribute(_METADATA_SERVER, key)


def _using_env_vars() -> bool:
    return bool(os.environ.get(xenv.TPU_SKIP_MDS_QUERY))


def build_tpu_env_from_vars() -> TpuEnv:
    """The facts of this host that are variables; None for each that is not set."""

    def first(*names: str) -> str | None:
        return next((os.environ[name] for name in names if name in os.environ), None)

    return {
        xenv.ACCELERATOR_TYPE: first(xenv.TPU_ACCELERATOR_TYPE),
        xenv.TPU_PROCESS_BOUNDS: first(xenv.TPU_PROCESS_BOUNDS, xenv.TPU_HOST_BOUNDS),
        xenv.TPU_CHIPS_PER_PROCESS_BOUNDS: first(
            xenv.TPU_CHIPS_PER_PROCESS_BOUNDS, xenv.TPU_CHIPS_PER_HOST_BOUNDS
        ),
        xenv.WORKER_ID: first(xenv.CLOUD_TPU_TASK_ID, xenv.TPU_WORKER_ID),
    }


def get_tpu_env() -> TpuEnv:
    """The facts of this host, from variables if TPU_SKIP_MDS_QUERY is set, else from its metadata. All are texts.

    Raises:
        TpuHostError: no metadata server answers.
    """
    if _using_env_vars():
        return build_tpu_env_from_vars()
    return topology.parse_tpu_env(_get_metadata("tpu-env"))


def _fact(name: str) -> str:
    text = get_tpu_env().get(name)
    if text is None:
        place = "variables" if _using_env_vars() else "metadata tpu-env"
        raise topology.unreadable(f"{name} is not among the {place}")
    return str(text)


def version() -> int:
    """Generation of the chips: 4 for a v4-16.

    Raises:
        TpuHostError: no metadata server answers, or the type is of another form.
    """
    kind = _fact(xenv.ACCELERATOR_TYPE)
    found = re.fullmatch(r"(?:v|tpu)(\d+)[A-Za-z]*-\d+", kind)
    if found is None:
        raise topology.unreadable(f"{xenv.ACCELERATOR_TYPE} is {kind!r}")
    return int(found[1])


def get_tpu_type() -> str:
    """Type of the chips: v6e for a v6e-8."""
    return _fact(xenv.ACCELERATOR_TYPE).partition("-")[0]


def task_id() -> int | None:
    """Index of this process among all that use the slice; None if CLOUD_TPU_TASK_ID is not set."""
    index: int | None = getenv_as(xenv.CLOUD_TPU_TASK_ID, int)
    return index


def worker_id() -> int:
    """Index of this host among those of the slice."""
    return int(_fact(xenv.WORKER_ID))


def get_worker_ips() -> list[str]:
    """Addresses of the hosts of the slice, in the order of their indices; `localhost` where there is one.

    Raises:
        TpuHostError: no metadata server answers, or its text has no addresses.
    """
    if _using_env_vars():
        hosts = os.environ.get(xenv.TPU_WORKER_HOSTNAMES, "").split(",")
    else:
        text = _get_metadata("worker-network-endpoints")
        workers = [worker.strip().split(":") for worker in text.split(",")]  # name, id, address
        if any(len(worker) != 3 for worker in workers):
            raise topology.unreadable(f"worker-network-endpoints is {text[:100]!r}")
        hosts = [address for _, _, address in workers]
    return hosts if len(hosts) > 1 else ["localhost"]


def num_tpu_workers() -> int:
    """Count the hosts of the slice."""
    return len(get_worker_ips())


def discover_master_worker_ip(use_localhost: bool = True) -> str:
    """Address of the host of process 0; `localhost` where the slice has one host.

    Cost: waits for the other processes, which must call it, too.
    """
    del use_localhost  # torch_xla does not read it either
    hosts = get_worker_ips()
    if len(hosts) == 1:
        return hosts[0]
    workers = ltd.rendezvous("tpu.discover_master_worker_ip", str(worker_id()).encode())
    return hosts[int(workers[0])]


# -- the variables of a process ---------------------------------------------------------------------


def configure_one_chip_topology() -> None:
    """Set the variables of one process with chip 0. Those that are set stay."""
    os.environ.setdefault(xenv.TPU_VISIBLE_CHIPS, "0")
    os.environ.setdefault(xenv.TPU_CHIPS_PER_PROCESS_BOUNDS, "1,1,1")
    os.environ.setdefault(xenv.TPU_PROCESS_BOUNDS, "1,1,1")


def configure_topology(local_rank: int, local_world_size: int, base_port: int = 8476) -> None:
    """Set the variables of a process with one chip, from the facts of its host. Those that are set stay.

    Args:
        local_rank: index of the process on its host.
        local_world_size: processes of each host.
        base_port: first of the ports that they use, one each.

    Raises:
        TpuHostError: the facts cannot be read.
    """
    generation, index = version(), worker_id()
    if generation >= 4:
        hosts = MeshShape.from_string(_fact(xenv.TPU_PROCESS_BOUNDS))
        chips = MeshShape.from_string(_fact(xenv.TPU_CHIPS_PER_PROCESS_BOUNDS))
    else:
        num_cores = int(_fact(xenv.ACCELERATOR_TYPE).rpartition("-")[2])
        hosts = MeshShape(*topology.hosts_by_cores(num_cores), 1)
        chips = MeshShape(2, 2, 1)
    bounds = (*(hosts * chips), *((2,) if generation == 7 else ()))
    ports = range(base_port, base_port + local_world_size)
    found = {
        xenv.TPU_CHIPS_PER_PROCESS_BOUNDS: "1,1,1",
        xenv.TPU_PROCESS_BOUNDS: ",".join(map(str, bounds)),
        xenv.CLOUD_TPU_TASK_ID: str(index * local_world_size + local_rank),
        xenv.TPU_PROCESS_ADDRESSES: ",".join(f"{h}:{p}" for h in get_worker_ips() for p in ports),
        xenv.TPU_VISIBLE_CHIPS: str(local_rank),
        xenv.TPU_PROCESS_PORT: str(ports[local_rank]),
    }
    for name, value in found.items():
        os.environ.setdefault(name, value)
