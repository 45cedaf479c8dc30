"""The old modules: what they have, what they say of what they do not have, and the faults of theirs that ours lack."""

import os
from pathlib import Path

import pytest

from ltc_dist.expected_name import expected_by
from tests.compat.running import run

# What scripts use, most used first: shared by all versions.
FREQUENT = """
xm.xla_device xm.optimizer_step xm.xrt_world_size xr.world_size xm.get_ordinal xr.global_ordinal xm.is_master_ordinal
xm.master_print xm.rendezvous xm.mesh_reduce xm.save xm.mark_step xmp.spawn pl.ParallelLoader pl.MpDeviceLoader
xm.add_step_closure xm.all_reduce xm.RateTracker met.metrics_report xu.SampleGenerator xm.reduce_gradients
xm.all_gather xser.save xser.load xmp.MpModelWrapper xmp.MpSerialExecutor xm.send_cpu_data_to_device
xm.get_xla_supported_devices xm.get_local_ordinal dp.DataParallel xm.wait_device_ops xm._fetch_gradients
xm.collective_broadcast xm.broadcast_master_param xf.all_gather torch_xla.version.__xla_gitrev__
torch_xla._XLAC._xla_get_default_device torch_xla._XLAC._xla_metrics_report
"""
IMPORTS = """
import torch, torch_xla
import torch_xla.core.functions as xf
import torch_xla.core.xla_model as xm
import torch_xla.debug.metrics as met
import torch_xla.distributed.data_parallel as dp
import torch_xla.distributed.parallel_loader as pl
import torch_xla.distributed.xla_multiprocessing as xmp
import torch_xla.runtime as xr
import torch_xla.utils.serialization as xser
import torch_xla.utils.utils as xu
import pytest
"""


def test_what_scripts_use_is_there(tmp_path: Path) -> None:
    run(tmp_path, f"{IMPORTS}\nfor name in {FREQUENT.split()!r}: eval(name)")


def test_every_module_can_be_imported(tmp_path: Path) -> None:
    code = """
import importlib
from ltc_dist.compat.table import ABSENT, SERVED
for name in (*SERVED, *ABSENT):
    module = importlib.import_module(name)
    assert module.__name__ == name, name
print(len(SERVED))
"""
    assert int(run(tmp_path, code)) >= 40


def test_both_generations_of_signatures(tmp_path: Path) -> None:
    code = f"""{IMPORTS}
assert xm.get_xla_supported_devices() == ["xla:0", "xla:1"]
assert xm.get_xla_supported_devices("CPU", 1) == xm.get_xla_supported_devices(1) == ["xla:0"]
assert xm.get_xla_supported_devices(devkind="CPU", max_devices=1) == ["xla:0"]
assert xm.get_xla_supported_devices(None) == xm.get_xla_supported_devices(devkind=None) == ["xla:0", "xla:1"]
assert xm.xla_real_devices() == ["CPU:0", "CPU:1"] and xm.xla_real_devices(["xla:1"]) == ["CPU:1"]
assert xm.parse_xla_device("xla:1") == ("CPU", 1) and xm.parse_xla_device("cpu") is None
assert xm.get_local_ordinal(0) == xm.get_ordinal(defval=0) == 0 and xm.xrt_world_size(defval=5) == 5
assert xm.xla_device_hw("xla:0") == xm.xla_device_kind() == xr.device_type() == "CPU"
t = torch.arange(4.0, device="xla:0")
assert t.device.type == "xla" and xm.is_xla_tensor(t) and torch.device("xla:1") == xm.xla_device(1)
assert xm.all_reduce("sum", t, 2.0, None, None, True).tolist() == [0, 2, 4, 6]
assert [v.tolist() for v in xm.all_gather([t, t[:1]])] == [[0, 1, 2, 3], [0]]
assert xm.reduce_scatter("sum", t, 1.0, 0, 1, channel_id=1).tolist() == t.tolist()
assert xm.all_to_all(t, 0, 0, 1, None, pin_layout=False).tolist() == t.tolist()
assert xm.rendezvous("x", b"1") == xm.xla_rendezvous(b"1") == [b"1"]
assert xm.get_memory_info("xla:0").keys() >= {{"kb_free", "bytes_used"}}
xm.set_rng_state(7)
assert xm.get_rng_state() == 7 and isinstance(xm.get_rng_state("xla:1"), int)
drawn = torch.rand(3, device="xla")
then = xm.get_rng_state()
drawn = [torch.rand(3, device="xla").tolist() for _ in range(2)]
xm.set_rng_state(then)
assert isinstance(then, int) and drawn == [torch.rand(3, device="xla").tolist() for _ in range(2)]
torch.manual_seed(5)
assert xm.get_rng_state() == 5
arena = xm.ToXlaTensorArena(lambda found: [v + 1 for v in found], lambda v: isinstance(v, int))
assert arena.transform(({{"a": 1}}, (2, "b"))) == ({{"a": 2}}, (3, "b"))
assert torch_xla.device_count() == xr.addressable_device_count() == 2 and torch_xla.devices()[1].index == 1

@torch_xla.compile(full_graph=True)
def twice(v):
    return v * 2

assert twice(t).tolist() == [0, 2, 4, 6]
reached = []

@torch_xla.compile(full_graph=True)
def synced(v):
    v = v + 5
    reached.append(1)
    torch_xla.sync()  # two graphs: the error is here, not at the end
    reached.append(2)

forbidden = "Unexpected execution happens inside the compiled function, exiting"
with pytest.raises(RuntimeError, match=forbidden):
    synced(t)
assert reached == [1] and torch_xla._XLAC._get_allow_execution()
with torch_xla.compile(full_graph=True):
    more = t + 5
    with pytest.raises(RuntimeError, match=forbidden):
        more.tolist()
    assert not torch_xla._XLAC._get_allow_execution()
    with pytest.raises(RuntimeError, match=forbidden), torch_xla.compile():  # which clears what is pending
        pass
assert more.tolist() == [5, 6, 7, 8]
torch_xla._XLAC._set_allow_execution(False)
with pytest.raises(RuntimeError, match=forbidden):
    print(t * 3)
torch_xla._XLAC._set_allow_execution(True)
assert (t * 3).tolist() == [0, 3, 6, 9]
grow = torch_xla.compile(lambda n: torch.ones(n, device="xla") + 1, max_different_graphs=2)
with pytest.raises(RuntimeError, match="Maximum number of different graphs allowed per function exceeded: 2"):
    for n in range(1, 5):
        made = grow(n)

def branching(v, way):
    r = v + v
    return r * 2 if way == 0 else r + v if way == 1 else r / 3 if way == 2 else r

def refused(way, limit):
    with pytest.raises(RuntimeError) as caught:
        torch_xla.compile(branching, max_different_graphs=limit)(t, way)
    return str(caught.value).splitlines()[1:]

for way in (0, 0, 1, 0):
    torch_xla.compile(branching, max_different_graphs=2)(t, way)
shown = "[] aten::{{}}, xla_shape=f32[4]{{{{0}}}}, dynamic_dims: ()".format
either = ["Expected either of:", f"  - {{shown('mul')}}", f"  - {{shown('add')}}"]
assert refused(2, 2) == [f"Got: {{shown('div')}}", *either]
assert refused(3, 2) == [f"Reached the end of the function at: {{shown('add')}}", *either]
"""
    run(tmp_path, code, LTC_NUM_DEVICES="2")


def test_faults_of_theirs_that_ours_lack(tmp_path: Path) -> None:
    code = f"""{IMPORTS}
import numpy as np
assert xm.mesh_reduce("t", np.array([1.0]), np.mean) == 1
with pytest.raises(RuntimeError, match="no device|there is no"):
    torch_xla.device(torch_xla.device_count())
with pytest.raises(IndexError, match="there is no device xla:9"):
    torch_xla.device(9)
assert xm.do_on_ordinals(lambda: 3, (), 0) == 3
net = torch.nn.Linear(2, 1)
assert dp.DataParallel(net, [])(lambda model, loader, device, context: list(loader), [1, 2]) == [[1, 2]]
saved = {{"pair": (torch.ones(1, device="xla"), 2)}}
xm.save(saved, "saved.pt")
assert isinstance(torch.load("saved.pt")["pair"], tuple)

class Broken(torch.utils.data.Dataset):
    def __len__(self):
        return 10
    def __getitem__(self, k):
        if k == 4:
            raise ValueError("sample 4 is broken")
        return torch.ones(2)

import inspect, threading
import lazy_tensor_core.core.lazy_model as ltm
assert inspect.signature(ltm.mark_step).parameters["device"].default is None
assert ltm.is_lazy_tensor(torch.ones(1, device="xla")) and not ltm.is_lazy_tensor(torch.ones(1))
taken = threading.Event()
def one_at_a_time():
    yield torch.ones(1)
    assert taken.wait(30), "the first batch waits for more of them"
    yield torch.ones(1)
for batch in pl.MpDeviceLoader(one_at_a_time(), xm.xla_device(), device_prefetch_size=8):
    taken.set()
seen = []
with pytest.raises(ValueError, match="sample 4 is broken"):
    for batch in pl.MpDeviceLoader(torch.utils.data.DataLoader(Broken()), xm.xla_device()):
        seen.append(batch)
assert len(seen) == 4
embed, head = torch.nn.Embedding(4, 4), torch.nn.Linear(4, 4, bias=False)
head.weight = embed.weight
both = torch.nn.ModuleList([embed, head]).to("xla")
assert both[0].weight is both[1].weight
"""
    run(tmp_path, code, XLA_MAX_ASYNC_QUEUE="10")


def test_faults_of_theirs_between_processes(tmp_path: Path) -> None:
    code = f"""{IMPORTS}
import os
import torch.distributed as dist
from torch_xla._internal import pjrt

def fail(rank):
    if rank == 1:
        raise ValueError("the original error")
    xm.rendezvous("never")

def nested(rank):
    assert pjrt.run_multiprocess(xm.get_ordinal) == {{rank: rank}}

def numbers(offset):
    dist.init_process_group("xla", init_method="xla://")
    rank = xm.get_ordinal()
    weight = torch.nn.Parameter(torch.zeros(1, device=xm.xla_device()))
    weight.grad = torch.full_like(weight, float(rank + offset))
    xm.reduce_gradients(torch.optim.SGD([weight], lr=0.1), groups=[[0], [1]])
    if rank == 0:
        open("written", "w").close()
    dist.barrier()
    import os
    found = os.path.exists("written"), weight.grad.item(), dist.get_backend()
    dist.destroy_process_group()
    return found

if __name__ == "__main__":
    context = xmp.spawn(fail, nprocs=2, join=False)
    with pytest.raises(ValueError, match="the original error"):
        context.join()
    xmp.spawn(nested, nprocs=2)
    assert pjrt.run_multiprocess(numbers, offset=5) == {{0: (True, 5.0, "xla"), 1: (True, 6.0, "xla")}}
    for count in (1, 3):  # what the environment says now; never in this process
        os.environ["CPU_NUM_DEVICES"] = str(count)
        found = pjrt.run_multiprocess(os.getpid)
        assert sorted(found) == list(range(count)) and os.getpid() not in found.values()
    os.environ["CPU_NUM_DEVICES"] = "2"
    ranks = []
    pjrt.spawn_threads(lambda rank, name: ranks.append((rank, name, xm.get_ordinal(), xm.xla_device().index)), ("a",))
    assert sorted(ranks) == [(0, "a", 0, 0), (1, "a", 1, 1)]
"""
    run(tmp_path, code, CPU_NUM_DEVICES="2")


def test_native_functions(tmp_path: Path) -> None:
    code = f"""{IMPORTS}
from torch_xla import _XLAC
xr.initialize_cache("programs", readonly=True)
assert not _XLAC._xla_runtime_is_initialized()
x = torch.ones(2, 3, device="xla") + 1
assert _XLAC._xla_runtime_is_initialized()
with pytest.raises(RuntimeError, match="the devices cannot be made TPU in a running program"):
    xr.set_device_type("TPU")
text = _XLAC._get_xla_tensor_debug_info(x)
assert "Device: xla:0" in text and "XLA Shape: f32[2,3]" in text and "aten::add" in text and "XLAData: None" in text
assert "aten::add" in _XLAC._get_xla_tensors_text([x]) and "digraph" in _XLAC._get_xla_tensors_dot([x])
assert _XLAC._get_graph_hash([x]) == _XLAC._get_graph_hash([torch.ones(2, 3, device="xla") + 1])
_XLAC._xla_sync_multi([x], [])
text = _XLAC._get_xla_tensor_debug_info(x)
assert "IR: None" in text and "Data Shape: f32[2,3]" in text and "XLAData: None" not in text
assert _XLAC._get_xla_tensor_debug_info(torch.ones(2)).strip() == "Not a XLATensor"
x2 = torch.ones(4, 2, dtype=torch.bfloat16).to("xla")
assert _XLAC._get_xla_tensors_text([(x2 * 3).sum(), x2]).splitlines() == [
    "IR {{",
    "  %0 = bf16[] prim::Constant()",
    "  %1 = bf16[4,2]{{1,0}} xla::device_data(), device=CPU:0, ROOT=1",
    "  %2 = bf16[4,2]{{1,0}} aten::mul(%1, %0)",
    "  %3 = bf16[] aten::sum(%2), ROOT=0",
    "}}",
]
assert _XLAC._get_xla_tensors_text([torch.full((3,), 2, device="xla"), x2 > 0.5]).splitlines()[1:] == [
    "  %0 = s64[] prim::Constant()",
    "  %1 = bf16[] prim::Constant()",
    "  %2 = bf16[4,2]{{1,0}} xla::device_data(), device=CPU:0",
    "  %3 = s64[3]{{0}} aten::full(%0), ROOT=0",
    "  %4 = pred[4,2]{{1,0}} aten::gt(%2, %1), ROOT=1",
    "}}",
]
texts = _XLAC._get_xla_tensors_hlo([x2 * x2]), _XLAC._get_xla_tensors_hlo([x2 * x2.float()])
assert "f32" not in texts[0] and "f32[4,2]" in texts[1]
assert _XLAC._xla_get_cpu_tensors([x])[0].tolist() == [[2] * 3] * 2
assert _XLAC._xla_get_tensor_id(x) == _XLAC._xla_get_tensor_id(x.view(-1)) != _XLAC._xla_get_tensor_id(x + 0)
size = _XLAC._xla_get_tensor_dimension_size(x, 1)
assert (size.item(), size.dtype, size.device) == (3, torch.int32, x.device)
from torch_xla.utils import dlpack
capsule = dlpack.to_dlpack(x)
again = dlpack.from_dlpack(capsule)
assert again.device == x.device and torch.equal(again, x)
with pytest.raises(RuntimeError, match="consumed only once"):
    dlpack.from_dlpack(capsule)
assert dlpack.from_dlpack(torch.arange(3)).tolist() == [0, 1, 2]
assert _XLAC._xla_set_default_device("xla:1") == "xla:0" and _XLAC._xla_get_default_device() == "xla:1"
_XLAC._xla_sync_multi([x], devices=[], wait=True, sync_xla_data=True)
_XLAC._xla_set_use_full_mat_mul_precision(use_full_mat_mul_precision=True)
assert "aten::mul" in _XLAC._get_xla_tensors_hlo([x * 2]) and _XLAC._xla_get_replication_devices_count() == 1
import importlib.metadata
from torch_xla._internal import tpu
from torch_xla.experimental import tpu as older
assert importlib.metadata.version("torch_xla") == importlib.metadata.version("torch-xla") == torch_xla.__version__
assert torch_xla.__version__.startswith("2.9") and importlib.metadata.version("torch") == torch.__version__
assert tpu.num_available_devices() == older.num_available_devices() == 2 and tpu.task_id() is None
assert xm._maybe_convert_to_cpu({{"a": (x, 1)}})["a"][0].device.type == "cpu"
assert xm._maybe_convert_to_cpu(x, convert=False) is x
with pytest.raises(RuntimeError, match="Input tensor is not an XLA tensor: torch.FloatTensor"):
    x @ torch.ones(3, 2)
assert _XLAC._xla_num_devices() == 2 and _XLAC._xla_real_devices() == ["CPU:0", "CPU:1"]
assert _XLAC._xla_counter_value("MarkStep") is None and _XLAC._xla_memory_info("xla:0")["bytes_limit"] > 0
from torch_xla.distributed.fsdp import XlaFullyShardedDataParallel as FSDP
assert not isinstance(x, FSDP) and isinstance(x, torch.Tensor | FSDP)
from torch_xla.distributed.fsdp.xla_flatten_params_wrapper import XlaFlattenParamsWrapper as Flat
inner = torch.nn.Sequential(torch.nn.Linear(3, 2))
wrapped = FSDP(inner, auto_wrap_policy=lambda module, recurse, unwrapped_params: True)
assert isinstance(wrapped.module, Flat) and wrapped.module.module is inner and isinstance(inner[0], FSDP)
assert wrapped[0] is wrapped.module[0] is inner[0] and inner[0].module.in_features == 3
assert wrapped.module(torch.ones(1, 3, device=xm.xla_device())).shape == (1, 2)
for absent in (xm.send, xm.recv):
    with pytest.raises(NotImplementedError, match="is not here"):
        absent(x)
with pytest.raises(AssertionError, match="Computation cache has already been initialized"):
    xr.initialize_cache("others")
assert xr.get_master_ip() == "127.0.0.1"
"""
    run(tmp_path, code, CPU_NUM_DEVICES="2", MASTER_ADDR="127.0.0.1")


def test_worker_processes_of_a_loader(tmp_path: Path) -> None:
    """They are started anew and import the script: torch first, which brings the old modules along."""
    code = """
import torch
import torch_xla.core.xla_model as xm
import torch_xla.distributed.parallel_loader as pl

class Numbers(torch.utils.data.Dataset):
    def __len__(self):
        return 4
    def __getitem__(self, k):
        return torch.tensor(float(k))

if __name__ == "__main__":
    loader = torch.utils.data.DataLoader(Numbers(), 2, num_workers=2, multiprocessing_context="spawn")
    found = [(batch.tolist(), str(batch.device)) for batch in pl.MpDeviceLoader(loader, xm.xla_device())]
    assert found == [([0, 1], "xla:0"), ([2, 3], "xla:0")], found
"""
    run(tmp_path, code)


def test_reports_as_people_know_them(tmp_path: Path) -> None:
    code = f"""{IMPORTS}
def train_step(n):
    x = torch.ones(n + 1, device=xm.xla_device())
    (x * 2).sum().item()
    y = x + 3
    xm.mark_step()
    return y

for n in range(12):
    train_step(n)
"""
    run(
        tmp_path, code, PT_XLA_DEBUG="1", PT_XLA_DEBUG_FILE="report.txt", LTC_DYNAMIC_SHAPES="never"
    )
    report = (tmp_path / "report.txt").read_text()
    for known in (
        "Compilation Analysis: Compilation Cause\nCompilation Analysis:   user torch_xla.sync\n",
        "Compilation Analysis:   most likely user code trying to access tensor value before torch_xla.sync",
        "Compilation Analysis:   Number of Graph Outputs: 1\n",
        "Post Compilation Analysis: Graph input size: ",
        "Execution Analysis: Python Frame Triggered Execution:\nExecution Analysis:   train_step (",
        "Execution Analysis:   sync (torch_xla/torch_xla.py)\nExecution Analysis:   train_step (",
        " GB\nPost Compilation Analysis: Compiled program size: 0.000000 GB\nPost Compilation Analysis: ----",
        "pt-xla-profiler: CompileTime too frequent: 24 counts during 12 steps\n",
        "pt-xla-profiler: TransferFromDeviceTime too frequent: 12 counts during 12 steps\n",
    ):
        assert known in report, known


def test_reports_of_compiled_functions(tmp_path: Path) -> None:
    code = f"""{IMPORTS}
def forward(x):
    return x.sin()

pending = torch.ones(3, device=xm.xla_device()) * 4
torch_xla.compile(forward)(pending)
before = open("report.txt").read()
with torch_xla.experimental.eager_mode_context(True):
    torch.ones(3, device=xm.xla_device()).cos()
assert open("report.txt").read() == before
names = [line.partition("Graph Name: ")[2] for line in before.splitlines() if "Graph Name" in line]
assert names == ["forward_clear_pending"] * 2 + ["forward"] * 2, names
assert "  torch_xla.compile clear the pending graph prior calling the target function\\n" in before
assert "  torch_xla.compile\\n" in before
"""
    run(tmp_path, code, PT_XLA_DEBUG="1", PT_XLA_DEBUG_FILE="report.txt")


def test_collectives_with_gradients(tmp_path: Path) -> None:
    """They are torch_xla's: of a loss that all processes compute alike, each takes its own part."""
    code = f"""{IMPORTS}
def gradients(rank):
    def of(make, *values):
        value = torch.tensor(values, device=xm.xla_device(), requires_grad=True)
        made = make(value)
        (made * torch.arange(1.0, made.numel() + 1, device=value.device)).sum().backward()
        return [round(v, 4) for v in made.tolist()], [round(v, 4) for v in value.grad.tolist()]
    r = float(rank)
    assert of(lambda v: xf.all_reduce("sum", v, 0.5), 1.0, 2.0 + r) == ([1.0, 2.5], [0.5, 1.0])
    assert of(lambda v: xf.all_reduce("max", v), 1.0 + r, 5.0 - r) == ([2.0, 5.0], [r, 2 - 2 * r])
    assert of(lambda v: xf.all_reduce("mul", v), 2.0 + r, 3.0) == ([6.0, 9.0], [3.0 - r, 6.0])
    gathered = [1.0, 1.0, 1.0, 2.0]
    assert of(xf.all_gather, 1.0, 1.0 + r) == (gathered, [1.0 + 2 * r, 2.0 + 2 * r])
    torch.manual_seed(0)
    w, x = torch.randn(3, 4), torch.randn(4, 10)
    shard, mine = w.chunk(2, 1)[rank].to(xm.xla_device()), x.chunk(2, 1)[rank].to(xm.xla_device())
    expected = (w @ x).chunk(2, 1)[rank]
    torch.testing.assert_close(xf.distributed_mm(shard, mine).cpu(), expected)
    torch.testing.assert_close(xf.distributed_mm(shard, mine, split=5).cpu(), expected)
    with pytest.raises(RuntimeError, match="distributed_mm cannot multiply these"):
        xf.distributed_mm(shard, mine, split=3)
    with pytest.raises(RuntimeError, match="no gradient for the reduction 'or'"):
        of(lambda v: xf.all_reduce("or", v), 1.0)

if __name__ == "__main__":
    xmp.spawn(gradients, nprocs=2)
"""
    run(tmp_path, code)


def test_loops_get_what_they_are_written_for(tmp_path: Path) -> None:
    code = f"""{IMPORTS}
data = [(torch.full((2,), float(k)), torch.tensor(k)) for k in range(3)]
def documents(model, loader, device, context):
    found = []
    for k, (x, y) in loader:
        found.append((k, int(y)))
    return found
def later(model, loader, device, context):
    found = []
    for k, (x, y) in enumerate(loader):
        found.append((k, int(y)))
    return found
def plain(model, loader, device, context):
    found = []
    for x, y in loader:
        found.append(int(y))
    return found
parallel = dp.DataParallel(torch.nn.Linear(2, 1), ["xla:0"])
assert parallel(documents, data) == parallel(later, data) == [[(0, 0), (1, 1), (2, 2)]]
assert parallel(plain, data) == [[0, 1, 2]]
"""
    run(tmp_path, code)


def test_what_cannot_exist_is_imported_and_refused_when_used(tmp_path: Path) -> None:
    code = """
import pytest
import torch_xla.distributed.spmd as xs
import torch_xla.tf_saved_model_integration as of_tensorflow
from torch_xla.experimental.custom_kernel import ragged_paged_attention
import torch_xla.runtime as xr

assert not xr.is_spmd()
for use in (lambda: xs.annotate_custom_sharding(1), lambda: of_tensorflow.a.b(), lambda: ragged_paged_attention(1)):
    with pytest.raises(NotImplementedError, match="(?s)Next: "):
        use()
with pytest.raises(ModuleNotFoundError, match="ltc_dist.compat serves torch_xla, but not this part"):
    import torch_xla.no_such_part
import importlib.util
assert importlib.util.find_spec("torch_xla.no_such_part") is None
assert importlib.util.find_spec("torch_xla.core.no_such_part") is None
import torch
from torch_xla.distributed.fsdp import XlaFullyShardedDataParallel
from torch_xla.distributed.fsdp.wrap import transformer_auto_wrap_policy
with pytest.raises(NotImplementedError, match="_debug_dummy_all_gather_op is not here"):
    XlaFullyShardedDataParallel(torch.nn.Linear(2, 2), _debug_dummy_all_gather_op=True)
with pytest.raises(AttributeError, match="no attribute 'nothing'"):
    import torch_xla
    torch_xla.nothing
"""
    run(tmp_path, code)


def test_nothing_is_served_unless_asked(tmp_path: Path) -> None:
    code = """
import importlib.util
import ltc_dist
print(importlib.util.find_spec("torch_xla"), ltc_dist.lazy_device())
import torch._lazy
assert "site-packages" in torch._lazy.__file__ or "torch" in torch._lazy.__file__
"""
    assert run(tmp_path, code, is_served=False).split() == ["None", "ltc:0"]


def test_what_was_imported_before_is_not_replaced(tmp_path: Path) -> None:
    code = """
import torch._lazy
import pytest
with pytest.raises(ImportError, match="torch._lazy was imported before"):
    import ltc_dist.compat
"""
    run(tmp_path, code, is_served=False)


@pytest.mark.parametrize(
    "before", ["import ltc_core", "import ltc_dist", "from ltc_dist import compat"]
)
def test_a_device_that_has_its_name_keeps_it(tmp_path: Path, before: str) -> None:
    code = f"""
import pytest
with pytest.raises(ImportError, match="the device is called ltc already"):
    {before}
    import ltc_dist.compat
"""
    run(tmp_path, code, is_served=False)


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("import torch_xla.core.xla_model as xm", "xla"),
        ("from torch_xla import runtime", "xla"),
        ("import torch_xla_py.xla_model", "xla"),
        ("def f():\n    import torch._lazy.ts_backend", "lazy"),
        ("from torch import _lazy", "lazy"),
        ("import lazy_tensor_core.core.lazy_model as ltm", "lazy"),
        ("import torch", "xla"),
        ("not a script", "xla"),
    ],
)
def test_the_name_of_the_device_is_that_of_the_scripts_world(
    tmp_path: Path, text: str, name: str
) -> None:
    script = tmp_path / "script.py"
    script.write_text(text)
    assert expected_by(os.fspath(script)) == name
    assert expected_by(os.fspath(tmp_path / "none.py")) == "xla"
