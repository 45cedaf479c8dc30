"""`torch_xla._internal.tpu`: what a script learns of its TPU host, and the variables that it sets."""

from pathlib import Path

from tests.compat.running import run

SERVER = """
import http.server, threading

class Handler(http.server.BaseHTTPRequestHandler):
    texts = {}
    def do_GET(self):
        key = self.path.removeprefix("/computeMetadata/v1/instance/attributes/")
        is_known = key in self.texts and self.headers["Metadata-Flavor"] == "Google"
        self.send_response(200 if is_known else 404)
        self.end_headers()
        if is_known:
            self.wfile.write(self.texts[key].encode())
    def log_message(self, *args):
        pass

server = http.server.HTTPServer(("127.0.0.1", 0), Handler)
threading.Thread(target=server.serve_forever, daemon=True).start()
ADDRESS = f"127.0.0.1:{server.server_port}"
"""

V4_ENV = """
ACCELERATOR_TYPE: 'v4-16'
TPU_CHIPS_PER_PROCESS_BOUNDS: '2,2,1'
TPU_PROCESS_BOUNDS: "1,1,2"
WORKER_ID: 1
"""


def test_a_host_of_a_slice(tmp_path: Path) -> None:
    code = f"""
import os
import torch_xla.core.xla_env_vars as xenv
from torch_xla._internal import tpu
{SERVER}
Handler.texts = {{"tpu-env": {V4_ENV!r}, "worker-network-endpoints": "w-0:1:10.0.0.31,w-1:2:10.0.0.30"}}
tpu._METADATA_SERVER = ADDRESS
assert tpu.get_tpu_env()["TPU_PROCESS_BOUNDS"] == "1,1,2"
assert (tpu.version(), tpu.get_tpu_type(), tpu.worker_id()) == (4, "v4", 1)
assert tpu.get_worker_ips() == ["10.0.0.31", "10.0.0.30"] and tpu.num_tpu_workers() == 2
assert tpu.num_logical_cores_per_chip() == 1 and tpu.process_bounds_size() is None

before = dict(os.environ)
os.environ[xenv.TPU_VISIBLE_CHIPS] = "3"  # the script's own choice stays
tpu.configure_topology(local_rank=1, local_world_size=4)
assert {{k: v for k, v in os.environ.items() if before.get(k) != v}} == {{
    "TPU_CHIPS_PER_PROCESS_BOUNDS": "1,1,1",
    "TPU_PROCESS_BOUNDS": "2,2,2",
    "CLOUD_TPU_TASK_ID": "5",
    "TPU_PROCESS_ADDRESSES": ",".join(f"10.0.0.{{h}}:{{p}}" for h in (31, 30) for p in range(8476, 8480)),
    "TPU_VISIBLE_CHIPS": "3",
    "TPU_PROCESS_PORT": "8477",
}}
assert tpu.task_id() == 5 and tpu.process_bounds_size() == 8

tpu.worker_id = lambda: 0  # one process, on the first host
assert tpu.discover_master_worker_ip() == "10.0.0.31"
tpu.num_available_chips = lambda: 4  # for the other functions, too
assert tpu.num_available_devices() == 4 and tpu.num_local_processes() == 4
assert tpu.num_expected_global_devices() == 8
tpu.version = lambda: 3
assert tpu.num_available_devices() == 8
server.shutdown(), server.server_close()
"""
    run(tmp_path, code)


def test_facts_that_cannot_be_read(tmp_path: Path) -> None:
    code = f"""
import os
import pytest
from torch_xla._internal import tpu
{SERVER}
tpu._METADATA_SERVER = ADDRESS
for ask in (tpu.get_tpu_env, tpu.version, tpu.get_worker_ips):
    with pytest.raises(OSError, match=r"(?s)facts of this TPU host.*http://127.*404.*Next: set TPU_SKIP"):
        ask()
Handler.texts = {{"tpu-env": "ACCELERATOR_TYPE: 'gpu'", "worker-network-endpoints": "<html>"}}
with pytest.raises(RuntimeError, match="got: ACCELERATOR_TYPE is 'gpu'"):
    tpu.version()
with pytest.raises(EnvironmentError, match="got: WORKER_ID is not among the metadata tpu-env"):
    tpu.worker_id()
with pytest.raises(EnvironmentError, match="got: worker-network-endpoints is '<html>'"):
    tpu.get_worker_ips()
server.shutdown(), server.server_close()
with pytest.raises(OSError, match="(?s)facts of this TPU host.*ConnectionRefusedError"):
    tpu.get_tpu_env()
with pytest.raises(NotImplementedError, match="(?s)TpuPlugin is not here: devices are not PJRT plugins.*Next: choose"):
    tpu.TpuPlugin()
"""
    run(tmp_path, code)


def test_variables_in_place_of_a_metadata_server(tmp_path: Path) -> None:
    code = """
import os
import pytest
from torch_xla._internal import tpu
assert (tpu.version(), tpu.get_tpu_type(), tpu.worker_id()) == (2, "v2", 1)
assert tpu.get_worker_ips() == ["a", "b", "c", "d"]
tpu.configure_topology(0, 4)
assert os.environ["TPU_PROCESS_BOUNDS"] == "4,4,1" and tpu.task_id() == 4
del os.environ["TPU_ACCELERATOR_TYPE"], os.environ["TPU_WORKER_HOSTNAMES"]
assert tpu.discover_master_worker_ip() == "localhost"
with pytest.raises(OSError, match="got: ACCELERATOR_TYPE is not among the variables"):
    tpu.get_tpu_type()

for name in ("TPU_PROCESS_BOUNDS", "TPU_VISIBLE_CHIPS", "TPU_CHIPS_PER_PROCESS_BOUNDS"):
    del os.environ[name]
tpu.configure_one_chip_topology()
assert os.environ["TPU_VISIBLE_CHIPS"] == "0" and tpu.process_bounds_size() == 1
mesh = tpu.MeshShape.from_string("2,2,1") * tpu.MeshShape(1, 2, 3)
assert mesh == (2, 4, 3) and mesh.size == 24
with pytest.raises(ValueError, match="Mesh shape '2,2' should be length 3"):
    tpu.MeshShape.from_string("2,2")
"""
    environ = {
        "TPU_SKIP_MDS_QUERY": "1",
        "TPU_ACCELERATOR_TYPE": "v2-32",
        "TPU_WORKER_ID": "1",
        "TPU_WORKER_HOSTNAMES": "a,b,c,d",
    }
    run(tmp_path, code, **environ)


def test_a_host_without_chips_has_the_devices_of_ltc(tmp_path: Path) -> None:
    code = """
from torch_xla._internal import tpu
assert (tpu.num_available_chips(), tpu.num_available_devices(), tpu.num_local_processes()) == (0, 3, 3)
assert tpu.task_id() is None
"""
    run(tmp_path, code, CPU_NUM_DEVICES="3")
