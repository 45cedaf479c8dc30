"""The chip of a TPU host that a process gets, as variables that libtpu reads when its client is made.

In: the environment of a process of a job. Out: the PJRT_* and TPU_* variables to set before the client is made. The
facts of the host come from its metadata server or from variables; chips are counted on the PCI bus. A chip of v2, v3 or
v7x has two devices: its process sees both, and torch_xla runs a thread for each. Other chips have one. Called by
`library`.

Source: `torch_xla/_internal/tpu.py` and `pjrt.py` of torch_xla 2.9. Checked against these, and not on a TPU.
"""

from __future__ import annotations

import http.client
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from ltc_core.errors import DeviceError, TpuHostError, listed
from ltc_core.tpu_chips import count_chips

__all__ = [
    "METADATA_SERVER",
    "TpuHost",
    "chip_variables",
    "fetch_attribute",
    "hosts_by_cores",
    "parse_tpu_env",
    "read_tpu_host",
    "unreadable",
]

METADATA_SERVER = "metadata.google.internal"

_BASE_PORT = 8476
_ATTRIBUTES = "/computeMetadata/v1/instance/attributes/"
_OF_SLICE = frozenset({"TPU_PROCESS_BOUNDS", "TPU_PROCESS_ADDRESSES", "CLOUD_TPU_TASK_ID"})
_BY_HAND = (
    "set TPU_SKIP_MDS_QUERY=1 and, as for a v5litepod-8 alone, TPU_ACCELERATOR_TYPE=v5litepod-8, "
    "TPU_HOST_BOUNDS=1,1,1, TPU_CHIPS_PER_HOST_BOUNDS=2,4,1, TPU_WORKER_ID=0, TPU_WORKER_HOSTNAMES=localhost"
)

# Fact -> its names in the metadata (of a TPU VM, of a plain VM with chips), and its names as a variable.
_FACTS = {
    "type": (("ACCELERATOR_TYPE", "TPU_ACCELERATOR_TYPE"), ("TPU_ACCELERATOR_TYPE",)),
    "worker": (("WORKER_ID", "TPU_WORKER_ID"), ("TPU_WORKER_ID", "CLOUD_TPU_TASK_ID")),
    "hosts": (("TPU_PROCESS_BOUNDS", "HOST_BOUNDS"), ("TPU_HOST_BOUNDS", "TPU_PROCESS_BOUNDS")),
    "chips": (
        ("TPU_CHIPS_PER_PROCESS_BOUNDS", "CHIPS_PER_HOST_BOUNDS"),
        ("TPU_CHIPS_PER_HOST_BOUNDS", "TPU_CHIPS_PER_PROCESS_BOUNDS"),
    ),
}


@dataclass(frozen=True)
class TpuHost:
    """A TPU slice, seen from one of its hosts; `shape` is the number of chips of the slice along each axis."""

    type: str
    generation: int
    shape: tuple[int, int, int]
    worker: int = 0
    hosts: tuple[str, ...] = ("localhost",)

    @property
    def num_chips(self) -> int:
        return math.prod(self.shape) // len(self.hosts)


def read_tpu_host(
    environ: Mapping[str, str], server: str = METADATA_SERVER, timeout_s: float = 5.0
) -> TpuHost:
    """Facts of this host: from variables if TPU_SKIP_MDS_QUERY is set (as on GKE), else from its metadata server.

    Raises:
        TpuHostError: a fact is missing or malformed, or the server cannot be read.

    Cost: two requests to the metadata server.
    """
    facts, of, place = environ, 1, "environment"
    hosts = environ.get("TPU_WORKER_HOSTNAMES", "").split(",")
    if not environ.get("TPU_SKIP_MDS_QUERY"):
        facts = parse_tpu_env(fetch_attribute(server, "tpu-env", timeout_s))
        of, place = 0, "metadata tpu-env"
        # "name:id:address,...", in the order of the workers.
        workers = fetch_attribute(server, "worker-network-endpoints", timeout_s).split(",")
        hosts = [worker.strip().split(":")[-1] for worker in workers]

    def fact(key: str, pattern: str) -> re.Match[str]:
        names = _FACTS[key][of]
        text = next((facts[name] for name in names if facts.get(name)), "")
        match = re.fullmatch(pattern, text.replace(" ", "").lower())
        if match is None:
            raise unreadable(f"{' or '.join(names)} is {text!r} in the {place}")
        return match

    kind = fact("type", r"(?:v|tpu)(\d+)[a-z]*-(\d+)")
    if int(kind[1]) >= 4:
        bounds = [
            fact(key, r"([1-9]\d*),([1-9]\d*),([1-9]\d*)").groups() for key in ("hosts", "chips")
        ]
        x, y, z = (int(a) * int(b) for a, b in zip(*bounds, strict=True))
    else:
        hosts_x, hosts_y = hosts_by_cores(int(kind[2]))
        x, y, z = 2 * hosts_x, 2 * hosts_y, 1
    return TpuHost(
        kind[0],
        int(kind[1]),
        (x, y, z),
        int(fact("worker", r"\d+")[0]),
        tuple(hosts) if len(hosts) > 1 else ("localhost",),
    )


def parse_tpu_env(text: str) -> dict[str, str]:
    """The facts of the metadata `tpu-env`: lines of a name and a value, which may be quoted."""
    return dict(re.findall(r"^\s*(\w+)\s*:\s*['\"]?(.*?)['\"]?\s*$", text, re.MULTILINE))


def hosts_by_cores(num_cores: int) -> tuple[int, int]:
    """Hosts along x and y of a slice of v2 or v3, whose metadata has no bounds.

    A host has eight cores on 2 x 2 chips: v3-32 is 2 x 2 hosts, v3-64 is 2 x 4.
    """
    count = max(num_cores // 8, 1)
    across = 2 ** ((count.bit_length() - 1) // 2)
    return across, count // across


def chip_variables(
    environ: Mapping[str, str],
    read: Callable[[Mapping[str, str]], TpuHost] = read_tpu_host,
    count: Callable[[], int] = count_chips,
) -> dict[str, str]:
    """Variables to set in this process before the client is made, without those that `environ` has.

    Empty if PJRT_DEVICE is not TPU. Several processes of a host get one chip each, in the order of LTC_DEVICES, and
    form one slice with the processes of the other hosts; ports from 8476 on, one for each process, must be free. A
    single process gets the chip that LTC_DEVICE_ORDINAL or LTC_DEVICES names, as a slice of its own. If none is named,
    nothing is set, and the process sees all chips of its host; on a TPU of several hosts, such a client waits until
    each host runs one. torch_xla does the same for threads, but its `spawn` with one process takes chip 0 alone.

    Args:
        read: returns the facts of the host; called only if the host runs several processes.
        count: returns the number of chips on the PCI bus; 0 if they cannot be seen.

    Raises:
        DeviceError: processes and chips do not match, a named chip does not exist, or the facts cannot be read.
    """
    if environ.get("PJRT_DEVICE", "").split("_")[0].upper() != "TPU":
        return {}
    process = _Process.of(environ)
    is_named = environ.get("LTC_DEVICE_ORDINAL") or environ.get("LTC_DEVICES")
    if process.local_world_size == 1 and not is_named:
        return {}
    found = {
        "TPU_VISIBLE_CHIPS": str(process.chip),
        "TPU_CHIPS_PER_PROCESS_BOUNDS": "1,1,1",
        "TPU_PROCESS_BOUNDS": "1,1,1",
        "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",  # loaded by each process of the host
    }
    tpu = None
    if process.local_world_size > 1:
        found["TPU_PROCESS_PORT"] = str(_BASE_PORT + process.place)
        found["PJRT_LOCAL_PROCESS_RANK"] = str(process.local_rank)
        found["PJRT_LOCAL_PROCESS_COUNT"] = str(process.local_world_size)
        tpu = None if environ.keys() >= _OF_SLICE else read(environ)
    _check_chips(process, count() or (tpu.num_chips if tpu else 0))
    if tpu is not None:
        if "TPU_PROCESS_BOUNDS" not in environ:  # else the user has chosen chips of the slice
            _check_slice(process, tpu)
        found |= _of_slice(process, tpu)
    return {name: value for name, value in found.items() if name not in environ}


def _of_slice(process: _Process, tpu: TpuHost) -> dict[str, str]:
    ports = range(_BASE_PORT, _BASE_PORT + process.local_world_size)
    cores = (2,) if tpu.generation == 7 else ()
    return {
        "TPU_PROCESS_BOUNDS": ",".join(map(str, tpu.shape + cores)),
        "TPU_PROCESS_ADDRESSES": ",".join(f"{host}:{port}" for host in tpu.hosts for port in ports),
        "CLOUD_TPU_TASK_ID": str(tpu.worker * process.local_world_size + process.place),
    }


@dataclass(frozen=True)
class _Process:
    """Ranks of a process, as `ltc_dist.job.ranks` reads and checks them; its chip, as in `settings.device_ordinal`."""

    local_rank: int
    local_world_size: int
    world_size: int
    chip: int
    chips: list[int]  # of this host's processes

    @classmethod
    def of(cls, environ: Mapping[str, str]) -> _Process:
        def number(name: str, default: int) -> int:
            text = environ.get(name, "").strip()
            return int(text) if text.isdecimal() else default

        if "RANK" in environ or "SLURM_LOCALID" not in environ:
            size = number("WORLD_SIZE", 1)
            local_size = max(number("LOCAL_WORLD_SIZE", size), 1)
            local_rank = number("LOCAL_RANK", number("RANK", 0) % local_size)
        else:
            size, local_rank = number("SLURM_NTASKS", 1), number("SLURM_LOCALID", 0)
            # All hosts of a TPU run the same number of processes.
            local_size = max(size // max(number("SLURM_NNODES", 1), 1), 1)
        named = dict(enumerate(environ.get("LTC_DEVICES", "").split(",")))
        chips = [int(named[k]) if named.get(k, "").strip() else k for k in range(local_size)]
        chip = number("LTC_DEVICE_ORDINAL", chips[local_rank % local_size])
        return cls(local_rank, local_size, max(size, local_size), chip, chips)

    @property
    def place(self) -> int:
        """Index of the process among those of its host, in the order of their chips, as in torch_xla."""
        return sorted(self.chips).index(self.chip) if self.chip in self.chips else self.local_rank


def _check_chips(process: _Process, num_chips: int) -> None:
    """Check processes and chip numbers against the chips of this host; `num_chips` is 0 if it is not known."""
    if 0 < num_chips < process.local_world_size:
        raise DeviceError(
            "this host has fewer TPU chips than processes, and each process takes one",
            got=f"{num_chips} chips, {process.local_world_size} processes",
            next=f"ltc-launch --nprocs {num_chips}",
        )
    if 0 < num_chips <= process.chip:
        raise DeviceError(
            f"there is no TPU chip {process.chip} on this host",
            got=f"{num_chips} chips, numbered from 0",
            next="name others in LTC_DEVICES or LTC_DEVICE_ORDINAL",
        )
    if len(set(process.chips)) < len(process.chips):
        raise DeviceError(
            "LTC_DEVICES gives one TPU chip to two processes",
            got=f"chips {listed(process.chips, 8)}, by local rank",
            next="name a chip for each process",
        )


def _check_slice(process: _Process, tpu: TpuHost) -> None:
    """Check that the job has a process for each chip of the slice: libtpu would wait for missing ones."""
    size, hosts = math.prod(tpu.shape), len(tpu.hosts)
    if process.local_world_size * hosts != size:
        raise DeviceError(
            "a TPU slice needs a process for each of its chips",
            got=f"{tpu.type}: {tpu.num_chips} chips on a host, {process.local_world_size} processes",
            next=f"ltc-launch --nprocs {tpu.num_chips}; or say in TPU_PROCESS_BOUNDS how the chips of fewer "
            "processes lie, such as 1,2,1 for two",
        )
    if process.world_size < size:
        raise DeviceError(
            "this TPU has more hosts than the job",
            got=f"{tpu.type}: {hosts} hosts, {listed(tpu.hosts)}; {process.world_size} processes in the job",
            next=f"ltc-launch --nnodes {hosts} on each host; for this host alone {_BY_HAND}",
        )


def fetch_attribute(server: str, key: str, timeout_s: float = 5.0) -> str:
    """Text of an attribute of this virtual machine.

    Raises:
        TpuHostError: no metadata server answers in time, or it does not have the attribute.

    Cost: a request to the metadata server.
    """
    url = f"http://{server}{_ATTRIBUTES}{key}"
    connection = http.client.HTTPConnection(server, timeout=timeout_s)  # without proxies
    try:
        connection.request("GET", _ATTRIBUTES + key, headers={"Metadata-Flavor": "Google"})
        reply = connection.getresponse()
        text = reply.read().decode()
    except (OSError, ValueError, http.client.HTTPException) as error:
        raise unreadable(f"{url}: {type(error).__name__}: {error}") from error
    finally:
        connection.close()
    if reply.status != http.HTTPStatus.OK:
        raise unreadable(f"{url}: {reply.status} {reply.reason}")
    return text


def unreadable(problem: str) -> TpuHostError:
    """The error of a fact that is missing or malformed."""
    return TpuHostError("the facts of this TPU host cannot be read", got=problem, next=_BY_HAND)
