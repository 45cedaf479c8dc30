"""The variables that give a process its TPU chip, by tables of environments and hosts; where the facts come from.

No TPU and no network: the metadata server is one of this process, the PCI bus a directory.
"""

import re
import socket
import threading
from collections.abc import Iterator, Mapping
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import NoReturn

import pytest

from ltc_core.errors import DeviceError
from ltc_core.executors.torch_xla.topology import TpuHost, chip_variables, read_tpu_host

V4_16 = TpuHost("v4-16", 4, (2, 2, 2), 1, ("10.0.0.31", "10.0.0.30"))
HOSTS = {
    "v3-8": TpuHost("v3-8", 3, (2, 2, 1)),
    "v4-8": TpuHost("v4-8", 4, (2, 2, 1)),
    "v5litepod-8": TpuHost("v5litepod-8", 5, (2, 4, 1)),
    "v5litepod-4": TpuHost("v5litepod-4", 5, (2, 2, 1)),
    "v5p-8": TpuHost("v5p-8", 5, (2, 2, 1)),
    "v6e-8": TpuHost("v6e-8", 6, (2, 4, 1)),
}


def job(rank: int, local_size: int, hosts: int = 1, **more: str) -> dict[str, str]:
    return {
        "PJRT_DEVICE": "TPU",
        "RANK": str(rank),
        "WORLD_SIZE": str(local_size * hosts),
        "LOCAL_RANK": str(rank % local_size),
        "LOCAL_WORLD_SIZE": str(local_size),
        **more,
    }


def never(environ: Mapping[str, str]) -> NoReturn:
    raise AssertionError("the facts of the host are not needed")


def variables(environ: dict[str, str], tpu: TpuHost, seen: int = 0) -> dict[str, str]:
    return chip_variables(environ, lambda asked: tpu, lambda: seen)


class TestSeveralProcesses:
    @pytest.mark.parametrize(("kind", "bounds", "size"), [
        ("v3-8", "2,2,1", 4), ("v4-8", "2,2,1", 4), ("v5litepod-8", "2,4,1", 8), ("v5litepod-4", "2,2,1", 4),
        ("v5p-8", "2,2,1", 4), ("v6e-8", "2,4,1", 8),
    ])  # fmt: skip
    def test_one_host(self, kind: str, bounds: str, size: int) -> None:
        ports = [str(8476 + k) for k in range(size)]
        for rank in range(size):
            assert variables(job(rank, size), HOSTS[kind]) == {
                "TPU_VISIBLE_CHIPS": str(rank),
                "TPU_CHIPS_PER_PROCESS_BOUNDS": "1,1,1",
                "TPU_PROCESS_BOUNDS": bounds,
                "TPU_PROCESS_ADDRESSES": ",".join(f"localhost:{port}" for port in ports),
                "TPU_PROCESS_PORT": ports[rank],
                "CLOUD_TPU_TASK_ID": str(rank),
                "PJRT_LOCAL_PROCESS_RANK": str(rank),
                "PJRT_LOCAL_PROCESS_COUNT": str(size),
                "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
            }

    def test_two_hosts(self) -> None:
        found = variables(job(6, 4, hosts=2), V4_16)
        assert found["TPU_PROCESS_BOUNDS"] == "2,2,2"
        assert found["TPU_PROCESS_ADDRESSES"] == (
            "10.0.0.31:8476,10.0.0.31:8477,10.0.0.31:8478,10.0.0.31:8479,"
            "10.0.0.30:8476,10.0.0.30:8477,10.0.0.30:8478,10.0.0.30:8479"
        )
        assert (found["CLOUD_TPU_TASK_ID"], found["TPU_VISIBLE_CHIPS"]) == ("6", "2")
        assert (found["TPU_PROCESS_PORT"], found["PJRT_LOCAL_PROCESS_RANK"]) == ("8478", "2")

    def test_the_two_devices_of_a_v7x_chip_are_a_fourth_axis(self) -> None:
        found = variables(job(3, 4), TpuHost("tpu7x-8", 7, (2, 2, 1)))
        assert found["TPU_PROCESS_BOUNDS"] == "2,2,1,2"

    @pytest.mark.parametrize("more", [
        {"RANK": "1", "WORLD_SIZE": "4"},
        {"LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4"},
        {"SLURM_PROCID": "5", "SLURM_LOCALID": "1", "SLURM_NTASKS": "8", "SLURM_NNODES": "2"},
    ])  # fmt: skip
    def test_other_ways_to_say_which_process_this_is(self, more: dict[str, str]) -> None:
        tpu = V4_16 if "SLURM_NNODES" in more else HOSTS["v4-8"]
        found = variables({"PJRT_DEVICE": "TPU", **more}, tpu)
        task = "5" if "SLURM_NNODES" in more else "1"
        assert (found["TPU_VISIBLE_CHIPS"], found["CLOUD_TPU_TASK_ID"]) == ("1", task)
        assert found["PJRT_LOCAL_PROCESS_COUNT"] == "4"

    def test_what_the_user_set_is_left_alone(self) -> None:
        own = {"TPU_PROCESS_PORT": "9000", "TPU_VISIBLE_CHIPS": "3", "CLOUD_TPU_TASK_ID": ""}
        plain = variables(job(0, 4), HOSTS["v4-8"])
        found = variables(job(0, 4, **own), HOSTS["v4-8"])
        assert found == {name: value for name, value in plain.items() if name not in own}

    def test_no_facts_are_needed_if_the_user_set_what_depends_on_them(self) -> None:
        own = {
            "TPU_PROCESS_BOUNDS": "1,1,1",
            "TPU_PROCESS_ADDRESSES": "localhost:1",
            "CLOUD_TPU_TASK_ID": "0",
        }
        found = chip_variables(job(2, 4, **own), never, lambda: 0)
        assert found["TPU_VISIBLE_CHIPS"] == "2" and not own.keys() & found.keys()


class TestNamedChips:
    def test_a_process_is_placed_where_its_chip_lies(self) -> None:
        """It is what torch_xla makes of the process whose local rank is that chip."""
        for rank, chip in enumerate([3, 0, 2, 1]):
            found = variables(job(rank, 4, LTC_DEVICES="3,0,2,1"), HOSTS["v4-8"])
            there = variables(job(chip, 4), HOSTS["v4-8"])
            assert found == {**there, "PJRT_LOCAL_PROCESS_RANK": str(rank)}

    def test_the_ordinal_of_the_process_comes_first(self) -> None:
        environ = job(0, 4, LTC_DEVICES="3,0,2,1", LTC_DEVICE_ORDINAL="2")
        assert variables(environ, HOSTS["v4-8"])["TPU_VISIBLE_CHIPS"] == "2"

    def test_fewer_processes_than_chips_where_the_user_says_how_these_lie(self) -> None:
        own = {"TPU_PROCESS_BOUNDS": "1,2,1", "LTC_DEVICES": "3,2"}
        found = variables(job(0, 2, **own), HOSTS["v4-8"])
        assert (found["TPU_VISIBLE_CHIPS"], found["CLOUD_TPU_TASK_ID"]) == ("3", "1")
        assert found["TPU_PROCESS_ADDRESSES"] == "localhost:8476,localhost:8477"
        assert "TPU_PROCESS_BOUNDS" not in found

    @pytest.mark.parametrize("more", [{"LTC_DEVICES": "2"}, {"LTC_DEVICE_ORDINAL": "2"}])
    def test_a_single_process_takes_it_alone(self, more: dict[str, str]) -> None:
        assert chip_variables({"PJRT_DEVICE": "TPU", **more}, never, lambda: 4) == {
            "TPU_VISIBLE_CHIPS": "2",
            "TPU_CHIPS_PER_PROCESS_BOUNDS": "1,1,1",
            "TPU_PROCESS_BOUNDS": "1,1,1",
            "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
        }


@pytest.mark.parametrize("environ", [
    {"PJRT_DEVICE": "TPU"},  # threads
    job(1, 1, hosts=2),
    job(1, 4, PJRT_DEVICE="CPU", LTC_DEVICES="0,1,2,3"),
    {"LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4"},
])  # fmt: skip
def test_nothing_to_set(environ: dict[str, str]) -> None:
    assert chip_variables(environ, never, lambda: 4) == {}


class TestErrors:
    def test_more_processes_than_chips(self) -> None:
        for seen in (0, 4):  # from the bounds, and on the bus
            with pytest.raises(DeviceError, match=r"4 chips, 8 processes\n  Next: .*--nprocs 4$"):
                variables(job(0, 8), HOSTS["v4-8"], seen)

    def test_fewer_processes_than_chips(self) -> None:
        text = r"each of its chips\n  got: v5litepod-8: 8 chips on a host, 4 processes\n  Next: .*--nprocs 8; .*1,2,1"
        with pytest.raises(DeviceError, match=text):
            variables(job(0, 4), HOSTS["v5litepod-8"])

    def test_a_job_on_one_of_two_hosts(self) -> None:
        got = "v4-16: 2 hosts, 10.0.0.31, 10.0.0.30; 4 processes in the job"
        text = f"more hosts than the job\n  got: {got}\n  Next: .*--nnodes 2 .*TPU_SKIP_MDS_QUERY"
        with pytest.raises(DeviceError, match=text):
            variables(job(0, 4), V4_16)

    @pytest.mark.parametrize("more", [{"LTC_DEVICES": "4"}, {"LTC_DEVICE_ORDINAL": "4"}])
    @pytest.mark.parametrize("size", [1, 4])
    def test_no_such_chip(self, more: dict[str, str], size: int) -> None:
        text = r"no TPU chip 4 on this host\n  got: 4 chips, numbered from 0\n  Next: .*LTC_DEVICES"
        with pytest.raises(DeviceError, match=text):
            variables(job(0, size, **more), HOSTS["v4-8"], seen=4)

    def test_a_chip_for_two(self) -> None:
        text = r"one TPU chip to two processes\n  got: chips 3, 1, 2, 3, by local rank\n  Next"
        with pytest.raises(DeviceError, match=text):
            variables(job(0, 4, LTC_DEVICES="3"), HOSTS["v4-8"])


class TestFactsFromVariables:
    GKE = {
        "TPU_SKIP_MDS_QUERY": "true",
        "TPU_ACCELERATOR_TYPE": "v5litepod-16",
        "TPU_HOST_BOUNDS": "2,2,1",
        "TPU_CHIPS_PER_HOST_BOUNDS": "2,2,1",
        "TPU_WORKER_ID": "2",
        "TPU_WORKER_HOSTNAMES": "a,b,c,d",
    }

    def test_of_a_slice(self) -> None:
        host = read_tpu_host(self.GKE)
        assert host == TpuHost("v5litepod-16", 5, (4, 4, 1), 2, ("a", "b", "c", "d"))
        assert host.num_chips == 4

    def test_of_one_host(self) -> None:
        environ = {**self.GKE, "TPU_ACCELERATOR_TYPE": "v5litepod-1", "TPU_HOST_BOUNDS": "1,1,1"}
        environ |= {"TPU_CHIPS_PER_HOST_BOUNDS": "1,1,1", "TPU_WORKER_ID": "0"}
        environ["TPU_WORKER_HOSTNAMES"] = "a"
        host = TpuHost("v5litepod-1", 5, (1, 1, 1))
        assert read_tpu_host(environ) == host and host.hosts == ("localhost",)

    def test_the_names_of_processes_serve_too(self) -> None:
        environ = {
            **self.GKE,
            "TPU_HOST_BOUNDS": "",
            "TPU_PROCESS_BOUNDS": "2,2,1",
            "TPU_CHIPS_PER_HOST_BOUNDS": "",
            "TPU_CHIPS_PER_PROCESS_BOUNDS": "2,2,1",
            "TPU_WORKER_ID": "",
            "CLOUD_TPU_TASK_ID": "2",
        }
        assert read_tpu_host(environ) == read_tpu_host(self.GKE)

    @pytest.mark.parametrize(("kind", "shape"), [
        ("v2-8", (2, 2, 1)), ("v3-32", (4, 4, 1)), ("v3-64", (4, 8, 1)), ("v3-256", (8, 16, 1)),
        ("v3-2048", (32, 32, 1)),
    ])  # fmt: skip
    def test_v2_and_v3_have_bounds_by_their_size(
        self, kind: str, shape: tuple[int, int, int]
    ) -> None:
        environ = {"TPU_SKIP_MDS_QUERY": "1", "TPU_ACCELERATOR_TYPE": kind, "TPU_WORKER_ID": "0"}
        assert read_tpu_host(environ).shape == shape

    @pytest.mark.parametrize(("name", "text"), [
        ("TPU_ACCELERATOR_TYPE", ""), ("TPU_ACCELERATOR_TYPE", "gpu-8"), ("TPU_HOST_BOUNDS", "2,2"),
        ("TPU_CHIPS_PER_HOST_BOUNDS", "2,0,1"), ("TPU_WORKER_ID", "first"),
    ])  # fmt: skip
    def test_missing_or_wrong(self, name: str, text: str) -> None:
        got = f"cannot be read\n  got: .*{name}.* is {text!r} in the environment\n  Next: set .*TPU_WORKER_HOSTNAMES="
        with pytest.raises(DeviceError, match=got):
            read_tpu_host({**self.GKE, name: text})


V4_ENV = """ACCELERATOR_TYPE: 'v4-16'
CHIPS_PER_HOST_BOUNDS: '2,2,1'
HOST_BOUNDS: '1,1,2'
TPU_CHIPS_PER_PROCESS_BOUNDS: '2,2,1'
TPU_PROCESS_BOUNDS: '1,1,2'
WORKER_ID: '1'
INJECT_SLICE_BUILDER_FAULT: ''
"""
V6E_ENV = """TPU_WORKER_ID: '0'
TPU_ACCELERATOR_TYPE: 'v6e-1'
HOST_BOUNDS: '1,1,1'
CHIPS_PER_HOST_BOUNDS: '1,1,1'
"""


class Metadata(HTTPServer):
    attributes: dict[str, str]

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.server_port}"


class Answer(BaseHTTPRequestHandler):
    server: Metadata

    def do_GET(self) -> None:
        text = self.server.attributes.get(
            self.path.removeprefix("/computeMetadata/v1/instance/attributes/")
        )
        is_known = text is not None and self.headers["Metadata-Flavor"] == "Google"
        self.send_response(200 if is_known else 404)
        self.end_headers()
        self.wfile.write((text or "").encode())

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture
def metadata() -> Iterator[Metadata]:
    with Metadata(("127.0.0.1", 0), Answer) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield server
        server.shutdown()
        thread.join()


class TestFactsFromMetadata:
    def test_of_a_tpu_vm(self, metadata: Metadata) -> None:
        hosts = "w-0:12345:10.0.0.31,w-1:12346:10.0.0.30"
        metadata.attributes = {"tpu-env": V4_ENV, "worker-network-endpoints": hosts}
        assert read_tpu_host({"TPU_WORKER_ID": "7"}, metadata.address) == V4_16

    def test_of_a_plain_vm_with_chips(self, metadata: Metadata) -> None:
        metadata.attributes = {"tpu-env": V6E_ENV, "worker-network-endpoints": "instance-1"}
        assert read_tpu_host({}, metadata.address) == TpuHost("v6e-1", 6, (1, 1, 1))

    def test_to_variables(self, metadata: Metadata) -> None:
        hosts = "w-0:12345:10.0.0.31,w-1:12346:10.0.0.30"
        metadata.attributes = {"tpu-env": V4_ENV, "worker-network-endpoints": hosts}
        environ = job(6, 4, hosts=2)
        found = chip_variables(environ, lambda e: read_tpu_host(e, metadata.address), lambda: 4)
        assert found == variables(environ, V4_16)

    def test_another_text(self, metadata: Metadata) -> None:
        metadata.attributes = {"tpu-env": "<html>", "worker-network-endpoints": ""}
        with pytest.raises(DeviceError, match=r"ACCELERATOR_TYPE .*is '' in the metadata tpu-env"):
            read_tpu_host({}, metadata.address)

    def test_no_such_attribute(self, metadata: Metadata) -> None:
        metadata.attributes = {}
        with pytest.raises(
            DeviceError, match=r"attributes/tpu-env: 404 Not Found\n  Next: set TPU_SKIP"
        ):
            read_tpu_host({}, metadata.address)

    def test_no_server(self) -> None:
        with socket.socket() as bound:  # and not listening
            bound.bind(("127.0.0.1", 0))
            address = f"127.0.0.1:{bound.getsockname()[1]}"
            text = f"got: http://{re.escape(address)}/.*Refused.*\n  Next: set TPU_SKIP_MDS_QUERY=1 and"
            with pytest.raises(DeviceError, match=text):
                read_tpu_host({}, address)

    def test_no_answer_in_time(self) -> None:
        with socket.create_server(("127.0.0.1", 0)) as silent:
            address = f"127.0.0.1:{silent.getsockname()[1]}"
            with pytest.raises(DeviceError, match="cannot be read\n  got: .*timed out"):
                read_tpu_host({}, address, timeout_s=0.05)
