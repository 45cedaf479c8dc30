"""How hosts find each other: two of them, as network namespaces with a cable between them."""

import contextlib
import dataclasses
import os
import re
import signal
import socket
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from torch.distributed.elastic.rendezvous import (
    RendezvousClosedError,
    RendezvousError,
    RendezvousInfo,
)

from ltc_launch.rendezvous import StaticRendezvous
from ltc_launch.spec import Spec
from tests.launching import ROOT, Job, launcher
from tests.two_hosts import ADDRESSES, two_hosts

pytestmark = pytest.mark.dist

SCRIPT = """
import os, sys
import psutil
import torch
import torch.distributed as dist
import ltc_dist as ltd

ones = torch.ones(2, device=ltd.lazy_device())
found = ltd.mesh_reduce("ranks", ltd.get_ordinal(), list), ltd.all_reduce("sum", ones).tolist()
if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0" and ltd.get_ordinal() == 3:
    raise LookupError("in the first attempt")
listening = {c.laddr.ip for c in psutil.Process().net_connections() if c.status == "LISTEN"}
ltd.rendezvous("all have looked")
dist.init_process_group("gloo")
dist.all_reduce(total := torch.ones(2))
dist.destroy_process_group()
print("found", *found, total.tolist(), listening, os.environ["MASTER_ADDR"])
"""


@pytest.mark.parametrize("backend", ["static", "c10d"])
def test_two_hosts_and_a_second_attempt(backend: str, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(textwrap.dedent(SCRIPT))
    options = ["--nprocs", "2", "--nnodes", "2", "--rdzv-endpoint", f"{ADDRESSES[0]}:29511"]
    options += ["--rdzv-backend", backend, "--max-restarts", "1"]
    environ = {**os.environ, "PYTHONPATH": str(ROOT), "TMPDIR": str(tmp_path)}
    launchers = []
    with two_hosts() as hosts, contextlib.ExitStack() as ends:
        for k, host in enumerate(hosts):
            command = [sys.executable, "-m", "ltc_launch", *options, "--node-rank", str(k)]
            launched = subprocess.Popen(
                [*host, *command, "train.py"],
                cwd=tmp_path,
                env={**environ, "GLOO_SOCKET_IFNAME": "cable"},
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
            ends.enter_context(launched)
            ends.callback(launched.kill)
            launchers.append(launched)
        answers = [launched.communicate(timeout=300) for launched in launchers]
    told = "".join(err for _, err in answers)
    assert [launched.returncode for launched in launchers] == [0, 0], told
    lines = sorted(line for out, _ in answers for line in out.splitlines())
    row = "found [0, 1, 2, 3] [4.0, 4.0] [4.0, 4.0] {{'{}'}} {}"
    masters = {line.rpartition(" ")[2] for line in lines}
    assert len(masters) == 1 and masters <= set(ADDRESSES)
    expected = [row.format(ADDRESSES[rank // 2], *masters) for rank in range(4)]
    assert [line[4:] for line in lines] == expected
    said = [line for line in told.splitlines() if "without authentication" in line]
    assert len(said) == 1 and f"listen on {ADDRESSES[0]}, port 29511" in said[0]


_RUN_AND_LIST_THREADS = """
import sys, threading
from ltc_launch import agent, spec
code = agent.run(spec.parse(sys.argv[1:]))
print(code, [thread.name for thread in threading.enumerate()])
"""


@pytest.mark.parametrize("backend", ["static", "c10d"])
def test_a_launcher_has_no_thread_when_it_ends(backend: str, endpoint: str, tmp_path: Path) -> None:
    """A thread that comes back from PyTorch's store while Python ends aborts the process (exit code -6)."""
    (tmp_path / "train.py").write_text("")
    options = ["--nnodes", "2", "--rdzv-endpoint", endpoint, "--rdzv-backend", backend]
    command = [sys.executable, "-c", _RUN_AND_LIST_THREADS, *options, "--node-rank"]
    environ = {"PYTHONPATH": str(ROOT), "TMPDIR": str(tmp_path), "GLOO_SOCKET_IFNAME": "lo"}
    with contextlib.ExitStack() as ends:
        launched = [
            subprocess.Popen(
                [*command, str(rank), "train.py"],
                cwd=tmp_path,
                env={**os.environ, **environ},
                stdout=subprocess.PIPE,
                text=True,
            )
            for rank in range(2)
        ]
        for process in launched:
            ends.enter_context(process)
            ends.callback(process.kill)
        said = [process.communicate(timeout=120)[0] for process in launched]
    assert said == ["0 ['MainThread']\n"] * 2


@pytest.fixture
def endpoint() -> str:
    with socket.create_server(("127.0.0.1", 0)) as free:
        return f"127.0.0.1:{free.getsockname()[1]}"


def spec(endpoint: str, rank: int, nnodes: int = 2) -> Spec:
    return Spec("a.py", nnodes=nnodes, node_rank=rank, endpoint=endpoint)


@pytest.fixture
def hosts(endpoint: str) -> Iterator[list[StaticRendezvous]]:
    """Two hosts, both of them in this process."""
    found = [StaticRendezvous(spec(endpoint, rank)) for rank in range(2)]
    yield found
    for host in found[::-1]:
        host.shutdown()
    found.clear()  # with their stores


def attempt(hosts: list[StaticRendezvous]) -> list[RendezvousInfo]:
    with ThreadPoolExecutor(2) as pool:
        return list(pool.map(StaticRendezvous.next_rendezvous, hosts))


def test_each_attempt_has_keys_and_a_store_of_its_own(hosts: list[StaticRendezvous]) -> None:
    assert hosts[0].get_run_id() == hosts[1].get_run_id()
    assert re.fullmatch("[0-9a-f]{32}", hosts[0].get_run_id())
    first = attempt(hosts)
    assert [(info.rank, info.world_size) for info in first] == [(0, 2), (1, 2)]
    first[0].store.set("key", "0")
    first[1].store.wait(["key"])  # nobody answers a `set`
    assert [host.num_nodes_waiting() for host in hosts] == [0, 0]
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(hosts[1].next_rendezvous)
        while not hosts[0].num_nodes_waiting():  # that is how the other one is drawn along
            time.sleep(0.01)
        second = [hosts[0].next_rendezvous(), waiting.result()]
    assert not any(info.store.check(["key"]) for info in second)
    ports = [info.bootstrap_store_info.master_port for info in (*first, *second)]
    assert ports[0] == ports[1] and ports[2] == ports[3] and ports[0] != ports[2]


def test_a_launcher_that_is_started_again_comes_to_the_next_attempt(
    hosts: list[StaticRendezvous], endpoint: str
) -> None:
    attempt(hosts)
    hosts[1]._lease.stop()  # it is killed
    again = StaticRendezvous(spec(endpoint, 1))
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(again.next_rendezvous)
        while not hosts[0].num_nodes_waiting():
            time.sleep(0.01)
        first, second = hosts[0].next_rendezvous(), waiting.result()
    ports = {info.bootstrap_store_info.master_port for info in (first, second)}
    assert len(ports) == 1


def test_a_host_that_came_and_was_killed_does_not_keep_the_job_from_beginning(
    endpoint: str,
) -> None:
    hosts = [StaticRendezvous(spec(endpoint, rank, nnodes=3)) for rank in range(3)]
    with ThreadPoolExecutor(3) as pool:
        dead = pool.submit(hosts[2].next_rendezvous)
        while not hosts[0]._leases.is_alive(2, hosts[2]._lease.token):
            time.sleep(0.01)
        hosts[2]._lease.stop()
        hosts.append(StaticRendezvous(spec(endpoint, 2, nnodes=3)))  # when the lease has ended
        infos = pool.map(StaticRendezvous.next_rendezvous, [hosts[0], hosts[1]])
        ports = {hosts[3].next_rendezvous().bootstrap_store_info.master_port}
        assert len(ports | {info.bootstrap_store_info.master_port for info in infos}) == 1
        hosts[0].shutdown()  # the one that was killed would wait for ever
        assert "host 0 has ended" in str(dead.exception())
    for host in hosts[1:]:
        host.shutdown()
    hosts.clear()  # with their stores
    del dead


def test_a_second_launcher_of_a_host_is_refused(
    hosts: list[StaticRendezvous], endpoint: str
) -> None:
    attempt(hosts)
    with pytest.raises(RendezvousError, match=rf"host 1 runs already, on .*\(pid {os.getpid()}\)"):
        StaticRendezvous(spec(endpoint, 1))
    assert [host.num_nodes_waiting() for host in hosts] == [0, 0]  # nobody restarts
    other = StaticRendezvous(dataclasses.replace(spec(endpoint, 1), rdzv_id="another job"))
    assert other.get_run_id() != hosts[0].get_run_id()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_launcher_that_waits_for_the_first_host_ends_at_once(number: int, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("")
    with socket.create_server(("127.0.0.1", 0)) as free:
        endpoint = f"127.0.0.1:{free.getsockname()[1]}"
    options = ["--nnodes", "2", "--node-rank", "1", "--rdzv-endpoint", endpoint]
    job = Job([*launcher(*options), "train.py"], tmp_path)
    assert job.process.stderr is not None
    assert b"waits for the first host" in job.process.stderr.readline()
    job.process.send_signal(number)
    code, _, err = job.end(within_s=20)
    assert code in (128 + number, -number) and "Traceback" not in err


def test_a_host_that_has_ended_is_not_waited_for(hosts: list[StaticRendezvous]) -> None:
    attempt(hosts)
    hosts[1].shutdown()
    with pytest.raises(RendezvousClosedError, match="host 1 has ended"):
        hosts[0].next_rendezvous()
