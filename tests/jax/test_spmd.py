"""Sharding by annotation: eight devices of a CPU, in one process, with the losses of eager on one."""

import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("jax")

ROOT = Path(__file__).parents[2]
PRELUDE = """
import copy, json
import torch
from torch import nn
import ltc_core as ltc
import ltc_dist as ltd
from ltc_dist import spmd
device = ltd.lazy_device()
torch.manual_seed(0)
"""


def run(code: str, devices: int = 8, **environ: str) -> Any:
    """What a program prints as JSON at its end, with so many devices of a CPU."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith("LTC_")}
    given = {"LTC_EXECUTOR": "jax", "LTC_RANDOM": "host", "LTC_NUM_DEVICES": str(devices)}
    caches = {k: v for k, v in os.environ.items() if k.startswith("LTC_") and "CACHE" in k}
    done = subprocess.run(
        [sys.executable, "-c", PRELUDE + textwrap.dedent(code)],
        capture_output=True,
        text=True,
        timeout=140,
        env={**kept, **caches, **given, "PYTHONPATH": str(ROOT), **environ},
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


FSDP = """
class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
    def forward(self, x):
        return x + self.down(torch.nn.functional.gelu(self.up(self.norm(x))))
net = nn.Sequential(nn.Embedding(64, 32), Block(32), Block(32), nn.Linear(32, 64))
plain = copy.deepcopy(net)
mesh = spmd.Mesh(range(8), (8, 1), ("fsdp", "model"))
spmd.set_global_mesh(mesh)
net = spmd.SpmdFullyShardedDataParallel(
    net, auto_wrap_policy=lambda module, recurse, nonwrapped_numel: recurse or isinstance(module, Block)
)
optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)
beside = torch.optim.AdamW(plain.parameters(), lr=0.01)
tokens = torch.randint(64, (6, 16, 8))
loader = ltd.MpDeviceLoader(list(tokens), device, input_sharding=spmd.ShardingSpec(mesh, ("fsdp", None)))
losses, eager = [], []
for x, y in zip(loader, tokens):
    optimizer.zero_grad()
    loss = nn.functional.cross_entropy(net(x).flatten(0, 1), x.flatten())
    loss.backward()
    optimizer.step()
    losses.append(loss)
    beside.zero_grad()
    other = nn.functional.cross_entropy(plain(y).flatten(0, 1), y.flatten())
    other.backward()
    beside.step()
    eager.append(other.item())
    ltc.mark_step()
"""


def test_fully_sharded() -> None:
    """Losses are eager's; a device has an eighth of parameters and optimizer state; there are two programs."""
    found = run(
        FSDP
        + """
held = [0] * 8
whole = 0
for p in net.parameters():
    for t in (p, optimizer.state[p]["exp_avg"], optimizer.state[p]["exp_avg_sq"]):
        whole += t.nbytes
        for part in spmd.local_shards(t):
            held[part.device] += part.data.nbytes
print(json.dumps({
    "losses": [l.item() for l in losses], "eager": eager, "held": held, "whole": whole,
    "built": ltc.metrics.counter_value("UncachedCompile"), "fallbacks": ltc.metrics.num_fallbacks(),
}))
"""
    )
    assert found["losses"] == pytest.approx(found["eager"], rel=1e-5)
    assert max(found["held"]) <= found["whole"] / 6 and len(set(found["held"])) == 1
    assert found["built"] == 2 and found["fallbacks"] == 0


def test_a_later_process_compiles_nothing() -> None:
    code = (
        FSDP
        + 'print(json.dumps([ltc.metrics.counter_value("PersistentCacheMiss"), losses[-1].item()]))'
    )
    first = run(code)
    second = run(code)
    assert second == [None, pytest.approx(first[1], rel=1e-6)]


def test_two_axes() -> None:
    """Batches over one axis, columns and rows of a block over the other: one all-reduce for each direction."""
    found = run("""
    from ltc_core.executors.jax import launch
    texts = []
    class Noted(launch.JaxLaunch):
        def __init__(self, *args):
            super().__init__(*args)
            texts.append(self._program.as_text())
    import ltc_core.executors.jax.device as of_device
    of_device.JaxLaunch = Noted
    mesh = spmd.Mesh(range(8), (2, 4), ("data", "model"))
    up, down = nn.Linear(16, 64, bias=False), nn.Linear(64, 16, bias=False)
    x = torch.randn(8, 16)
    plain = [copy.deepcopy(up), copy.deepcopy(down)]
    up, down = up.to(device), down.to(device)
    spmd.mark_sharding(up.weight, mesh, ("model", None))
    spmd.mark_sharding(down.weight, mesh, (None, "model"))
    there = spmd.mark_sharding(x.to(device), mesh, ("data", None))
    hidden = spmd.mark_sharding(torch.relu(up(there)), mesh, ("data", "model"))
    loss = down(hidden).square().mean()
    loss.backward()
    expected = plain[1](torch.relu(plain[0](x))).square().mean()
    expected.backward()
    print(json.dumps({
        "loss": [loss.item(), expected.item()],
        "grad": (up.weight.grad.cpu() - plain[0].weight.grad).abs().max().item(),
        "parts": [list(p.data.shape) for p in spmd.local_shards(up.weight)],
        "sharding": spmd.sharding_of(up.weight)[1],
        "all_reduces": [[line.split("=")[1].split("all-reduce")[0].strip() for line in text.splitlines()
                         if " all-reduce(" in line] for text in texts],
    }))
    """)
    assert found["loss"][0] == pytest.approx(found["loss"][1], rel=1e-5) and found["grad"] < 1e-6
    # One of the block's result over "model", and one of loss and gradients over "data".
    ((of_result, of_gradients),) = found["all_reduces"]
    assert of_result.startswith("f32[4,16]") and "f32[16,16]" in of_gradients
    assert found["parts"] == [[16, 16]] * 8 and found["sharding"] == ["model", None]


def test_a_changed_sharding_is_another_program_with_the_same_numbers() -> None:
    found = run("""
    mesh = spmd.get_1d_mesh("x")
    w = torch.randn(16, 16)
    there = w.to(device)
    seen = []
    for spec in (("x", None), ("x", None), (None, "x"), None):
        if spec is None:
            spmd.clear_sharding(there)
        else:
            spmd.mark_sharding(there, mesh, spec)
        y = (there @ there).sum(0)
        ltc.mark_step()
        shape = list(spmd.local_shards(there)[3].data.shape)
        seen.append([(y.cpu() - (w @ w).sum(0)).abs().max().item() < 1e-4, shape])
    print(json.dumps({
        "seen": seen,
        "compiled": ltc.metrics.counter_value("CompiledProgram"),
        "causes": [s for s in ltc.metrics.summary().splitlines() if "because of" in s],
    }))
    """)
    assert found["seen"] == [[True, [2, 16]], [True, [2, 16]], [True, [16, 2]], [True, [16, 16]]]
    assert found["compiled"] == 3
    (causes,) = found["causes"]
    assert "shardings, 2" in causes


def test_what_is_recorded_viewed_or_uneven() -> None:
    found = run("""
    mesh = spmd.get_1d_mesh("x")
    x = torch.randn(8, 6).to(device)
    y = spmd.mark_sharding(x * 2, mesh, ("x", None))          # only recorded
    z = spmd.mark_sharding(y.t(), mesh, (None, "x"))          # a view
    spmd.mark_sharding(x, mesh, (None, "x"))                  # 6 is not divided by 8
    total = (y.sum() + z.sum() + x.sum()).item()
    shapes = [list(spmd.local_shards(t)[0].data.shape) for t in (y, x)]
    print(json.dumps([total, (x.sum() * 5).item(), *shapes]))
    """)
    assert found[0] == pytest.approx(found[1], rel=1e-4)
    assert found[2:] == [[1, 6], [8, 6]]


def test_a_result_that_two_axes_divide_in_a_program_without_divided_inputs() -> None:
    """JAX describes the results of a program in terms of an input's mesh; each mesh has axes that are small enough."""
    found = run("""
    mesh = spmd.Mesh(range(8), (4, 2), ("a", "b"))
    x = torch.randn(4, 2, 3).to(device).requires_grad_()
    y = x * 2
    spmd.mark_sharding(y, mesh, ("a", "b", None))
    y.square().sum().backward()
    ltc.mark_step(wait=True)
    shapes = [list(part.data.shape) for part in spmd.local_shards(y)]
    print(json.dumps([shapes, torch.equal(x.grad.cpu(), 8 * x.detach().cpu())]))
    """)
    assert found == [[[1, 1, 3]] * 8, True]


def test_memory_stays_divided_when_its_values_are_replaced() -> None:
    found = run("""
    mesh = spmd.get_1d_mesh("x")
    net = nn.Linear(16, 16).to(device)
    spmd.mark_sharding(net.weight, mesh, ("x", None))
    shapes = []
    def look():
        shapes.append(list(spmd.local_shards(net.weight)[0].data.shape))
    net.load_state_dict({"weight": torch.ones(16, 16), "bias": torch.ones(16)})
    look()
    with torch.no_grad():
        net.weight.mul_(2)
        look()
        net.weight.copy_(torch.full((16, 16), 3.0))
        look()
        nn.init.normal_(net.weight)
        look()
    print(json.dumps([shapes, net(torch.ones(2, 16).to(device)).shape]))
    """)
    assert found == [[[2, 16]] * 4, [2, 16]]


def test_gradients_are_divided_too() -> None:
    found = run("""
    mesh = spmd.get_1d_mesh("x")
    x = torch.randn(8, 4)
    w = nn.Parameter(x.to(device))
    spmd.mark_sharding_with_gradients(w, mesh, ("x", None)).pow(3).sum().backward()
    print(json.dumps([(w.grad.cpu() - 3 * x ** 2).abs().max().item(), list(spmd.local_shards(w.grad)[0].data.shape)]))
    """)
    assert found[0] < 1e-5 and found[1] == [1, 4]


def test_pytorch_s_own_words() -> None:
    found = run("""
    from torch.distributed.tensor import Replicate, Shard
    mesh = spmd.Mesh(range(8), (2, 4), ("data", "model"))
    t = spmd.xla_distribute_tensor(torch.ones(8, 8), mesh, [Shard(0), Replicate()])
    def partition(name, module, mesh):
        if isinstance(module, nn.Linear):
            module.weight = spmd.xla_distribute_tensor(module.weight, mesh, [Replicate(), Shard(1)])
    net = spmd.xla_distribute_module(nn.Sequential(nn.Linear(8, 8, bias=False)), mesh, partition)
    print(json.dumps([list(spmd.local_shards(t)[0].data.shape), list(spmd.local_shards(net[0].weight)[0].data.shape),
                      (net(t).cpu() - net[0].weight.cpu().sum(1)).abs().max().item()]))
    """)
    assert found[:2] == [[4, 8], [8, 2]] and found[2] < 1e-5


def test_batches_that_are_dicts() -> None:
    """Each name has a spec of its own, or None; a name without one is refused, as torch_xla does."""
    found = run("""
    mesh = spmd.get_1d_mesh("x")
    spec = spmd.ShardingSpec(mesh, ("x", None))
    def parts(batch, specs):
        try:
            (batch,) = ltd.MpDeviceLoader([batch], device, input_sharding=specs)
            return {name: list(spmd.local_shards(t)[0].data.shape) for name, t in batch.items()}
        except ValueError as error:
            assert isinstance(error, KeyError) is str(error).startswith("Keys")  # torch_xla's types of both
            return str(error)
    two = {"tokens": torch.ones(8, 4), "mask": torch.ones(8, 4)}
    print(json.dumps([parts(two, {"tokens": spec, "mask": None, "labels": spec}), parts(two, {"tokens": spec}),
                      parts(two["mask"], {"tokens": spec})]))
    """)
    parts, missing, no_dict = found
    assert parts == {"tokens": [1, 4], "mask": [8, 4]}
    assert missing.startswith("Keys: ['mask'] are missing from input_sharding.")
    assert "Next: give each name a ShardingSpec, or None" in missing
    assert no_dict.startswith("input batch should be a dict when input sharding is a dict.")


def test_data_that_torch_xla_s_function_uploads_are_divided() -> None:
    found = run(
        """
        import torch_xla.core.xla_model as xm
        import torch_xla.distributed.spmd as xs
        spec = xs.ShardingSpec(xs.get_1d_mesh("x"), ("x", None))
        sent = xm.send_cpu_data_to_device([torch.ones(8, 4), torch.ones(8)], device, input_sharding=spec)
        (alone,) = xm.send_cpu_data_to_device(torch.ones(16, 4), device, spec)
        print(json.dumps([list(t.local_shards[0].data.shape) for t in (*sent, alone)]))
        """,
        LTC_COMPAT="1",
    )
    assert found == [[1, 4], [8], [2, 4]]


def test_the_text_of_a_sharding_is_torch_xla_s() -> None:
    cases = {
        "((8,), (0, None))": "{devices=[8,1]0,1,2,3,4,5,6,7}",
        "((4, 2), (0, 1))": "{devices=[4,2]0,1,2,3,4,5,6,7}",
        "((2, 4), (1, 0))": "{devices=[4,2]0,4,1,5,2,6,3,7}",
        "((4, 2), (None, 0))": "{devices=[1,4,2]0,1,2,3,4,5,6,7 last_tile_dim_replicate}",
        "((4, 2), (1, None))": "{devices=[2,1,4]0,2,4,6,1,3,5,7 last_tile_dim_replicate}",
        "((4, 2), ((0, 1), None))": "{devices=[8,1]0,1,2,3,4,5,6,7}",
        "((4, 2), (None, None))": "{replicated}",
    }
    found = run(
        f"""
        import torch_xla
        import torch_xla.distributed.spmd as xs
        texts = [torch_xla._XLAC._get_xla_sharding_spec(torch.ones(8, 8, device=device))]
        for shape, spec in map(eval, {list(cases)!r}):
            t = xs.mark_sharding(torch.ones(8, 8, device=device), xs.Mesh(range(8), shape), spec)
            assert t.sharding_spec == torch_xla._XLAC._get_xla_sharding_spec(t)
            texts.append(t.sharding_spec)
        print(json.dumps(texts))
        """,
        LTC_COMPAT="1",
    )
    assert found == ["", *cases.values()]


def test_what_is_refused() -> None:
    cases = {
        "spmd.Mesh(range(4), (4,))": "must match the global number of devices (8)",
        "spmd.Mesh(range(8), (8,), ('x', 'y'))": "Number of axis names (2)",
        "spmd.Mesh([0] * 8, (8,))": "Device IDs must be unique",
        "spmd.Mesh(range(1, 9), (8,))": "Device IDs must be less than mesh size",
        "spmd.mark_sharding(torch.ones(8), mesh, (0,))": "only tensors on the device can be sharded",
        "spmd.mark_sharding(there[0], mesh, (0, None))": "should be equal to the input rank (1)",
        "spmd.mark_sharding(there, mesh, ('x', 'x'))": "should appear at most once",
        "spmd.mark_sharding(there[0], mesh, ('y',))": "Axis name y is not defined",
        "ltd.MpDeviceLoader([there], device, input_sharding=mesh)": "input_sharding is no ShardingSpec",
        "spmd.SpmdFullyShardedDataParallel(nn.Linear(2, 2), mesh=mesh)": "must have an axis named 'fsdp'",
        "spmd.SpmdFullyShardedDataParallel(nn.Linear(2, 2))": "No mesh is provided",
        "spmd.Mesh(range(16), (16,))": "LTC_NUM_DEVICES=16 makes 16",
        "spmd.Mesh(range(8), (3, 2))": "multiply to 8, not (3, 2)",
        "spmd.Mesh(range(8), (4, 2), ('x', 'x'))": "Axis names must be unique",
        "spmd.HybridMesh(ici_mesh_shape=(8,), dcn_mesh_shape=(1, 1))": "must have one length",
        "spmd.mark_sharding(there, mesh, (1, None))": "Axis 1 is not one of the 1 of the mesh",
        "spmd.mark_sharding(there, mesh, (0.5, None))": "Axis 0.5 is not one of the 1 of the mesh",
        "spmd.mark_sharding(there, mesh, None)": "an entry for each dimension, not None",
        "spmd.mark_sharding(there, mesh, 'xx')": "an entry for each dimension, not 'xx'",
        "spmd.mark_sharding(there, ('x', None), mesh)": "takes a Mesh as its second argument, not tuple",
        "spmd.mark_sharding([1.0], mesh, (0,))": "only tensors on the device can be sharded",
        "spmd.local_shards(torch.ones(8))": "only tensors on the device can be read by parts",
        "spmd.xla_distribute_tensor(there, mesh, [Shard(0), Shard(1)])": "must have the same length",
        "spmd.xla_distribute_tensor(there, mesh, [Shard(2)])": "Unsupported placement: Shard(dim=2)",
        "spmd.xla_distribute_tensor(there, mesh, ['x'])": "Unsupported placement: 'x'",
    }
    found = run(f"""
    from torch.distributed.tensor import Shard
    mesh = spmd.get_1d_mesh("x")
    there = torch.ones(8, 8).to(device)
    said = []
    for code in {list(cases)!r}:
        try:
            eval(code)
            said.append("nothing")
        except Exception as error:
            said.append(str(error))
    print(json.dumps(said))
    """)
    for (code, told), said in zip(cases.items(), found, strict=True):
        assert told in said and "Next: " in said, (code, said)


def test_other_executors_have_a_mesh_of_one_device() -> None:
    found = run(
        """
        mesh = spmd.get_1d_mesh("x")
        weight = spmd.mark_sharding(nn.Linear(2, 2).to(device).weight, mesh, ("x", None))
        (part,) = spmd.local_shards(weight)
        assert torch.equal(part.data, weight.cpu())
        try:
            spmd.Mesh(range(8), (8,))
        except AssertionError as error:
            print(json.dumps([mesh.size(), str(error)]))
        """,
        devices=1,
        LTC_EXECUTOR="inductor",
    )
    size, said = found
    assert size == 1
    assert said.startswith(
        "Number of device IDs (8) must match the global number of devices (1) (called at "
    )
    assert (
        "Next: pass range(1) and a shape of 1 devices; LTC_EXECUTOR=jax LTC_NUM_DEVICES=8 makes 8"
        in said
    )


# As pytorch/xla's examples write it: a decoder with FSDPv2, a mesh of two axes.
OLD_SCRIPT = """
import functools
import json
import os
import numpy as np
import torch
from torch import nn
import torch_xla
import torch_xla.core.xla_model as xm
import torch_xla.distributed.parallel_loader as pl
import torch_xla.distributed.spmd as xs
import torch_xla.runtime as xr
from torch_xla.distributed.fsdp.wrap import transformer_auto_wrap_policy
from torch_xla.distributed.spmd.xla_sharding import apply_xla_patch_to_nn_linear
from torch_xla.experimental.spmd_fully_sharded_data_parallel import SpmdFullyShardedDataParallel as FSDPv2

assert xr.global_device_count() == xr.addressable_device_count() == len(xm.get_xla_supported_devices()) == 8
xr.use_spmd()
assert xr.is_spmd() and os.environ["XLA_USE_SPMD"] == "1" and xr.world_size() == 1
assert xr.global_device_count() == xr.local_device_count() == xr.addressable_device_count() == 1  # a script sees one
assert xm.get_xla_supported_devices() == ["xla:0"] and torch_xla.device_count() == 1
assert xr.addressable_runtime_device_count() == xr.global_runtime_device_count() == 8
count = xr.global_runtime_device_count()
mesh = xs.Mesh(np.arange(count), (count // 2, 2), ("fsdp", "tensor"))
xs.set_global_mesh(mesh)
torch.manual_seed(0)

class Decoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.attention = nn.MultiheadAttention(16, 2, batch_first=True)
        self.mlp = nn.Sequential(nn.Linear(16, 32), nn.SiLU(), nn.Linear(32, 16))
    def forward(self, x):
        x = x + self.attention(x, x, x, need_weights=False)[0]
        return x + self.mlp(x)

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(32, 16)
        self.layers = nn.ModuleList(Decoder() for _ in range(2))
        self.head = nn.Linear(16, 32, bias=False)
    def forward(self, tokens):
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)

device = xm.xla_device()
model = apply_xla_patch_to_nn_linear(Model().to(device))
policy = functools.partial(transformer_auto_wrap_policy, transformer_layer_cls={Decoder})
model = FSDPv2(model, mesh=mesh, auto_wrap_policy=policy)
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
data = list(torch.randint(32, (5, 8, 6)))
loader = pl.MpDeviceLoader(data, device, input_sharding=xs.ShardingSpec(mesh, ("fsdp", None), minibatch=False))
losses = []
for tokens in loader:
    optimizer.zero_grad()
    loss = nn.functional.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())
    loss.backward()
    xm.optimizer_step(optimizer)
    losses.append(loss.item())
weight = model.head.weight
marked = xs.mark_sharding(torch.ones(8, 4, device=device), mesh, ("fsdp", "tensor"))
assert isinstance(marked, xs.XLAShardedTensor) and marked.sharding_type == xs.ShardingType.TILED
assert len(marked.local_shards) == count and torch_xla._XLAC._get_xla_sharding_spec(marked) != ""
torch.manual_seed(0)
plain = Model()
beside = torch.optim.AdamW(plain.parameters(), lr=0.01)
for tokens, found in zip(data, losses):
    beside.zero_grad()
    loss = nn.functional.cross_entropy(plain(tokens).flatten(0, 1), tokens.flatten())
    loss.backward()
    beside.step()
    assert abs(loss.item() - found) < 1e-4 * found, (loss.item(), found)
print(json.dumps(list(weight.local_shards[0].data.shape)))
"""


def run_old_script(text: str, tmp_path: Path, *args: str) -> Any:
    """What a script for torch_xla prints as JSON at its end, on eight devices of a CPU."""
    (tmp_path / "train.py").write_text(text)
    given = {"LTC_COMPAT": "1", "LTC_EXECUTOR": "jax", "LTC_NUM_DEVICES": "8", "LTC_RANDOM": "host"}
    done = subprocess.run(
        [sys.executable, "train.py", *args],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=140,
        env={**os.environ, **given, "PYTHONPATH": str(ROOT)},
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


def test_an_old_script_with_fsdp_v2(tmp_path: Path) -> None:
    assert run_old_script(OLD_SCRIPT, tmp_path) == [8, 16]


# As pytorch/xla's example trains a ResNet: images are divided along batch and width, or kernels along their channels.
RESNET_SCRIPT = """
import copy
import json
import sys
import numpy as np
import torch
from torch import nn
import torch_xla
import torch_xla.core.xla_model as xm
import torch_xla.debug.metrics as met
import torch_xla.debug.profiler as xp
import torch_xla.distributed.parallel_loader as pl
import torch_xla.distributed.spmd as xs
import torch_xla.utils.utils as xu
from torch_xla import runtime as xr

xr.use_spmd()

class Block(nn.Module):
    def __init__(self, before, after, stride):
        super().__init__()
        self.conv1 = nn.Conv2d(before, after, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(after)
        self.conv2 = nn.Conv2d(after, after, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(after)
        self.downsample = nn.Sequential(nn.Conv2d(before, after, 1, stride, bias=False), nn.BatchNorm2d(after))
    def forward(self, x):
        y = self.bn2(self.conv2(torch.relu(self.bn1(self.conv1(x)))))
        return torch.relu(y + self.downsample(x))

class ResNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(3, 8, 3, 1, 1, bias=False), nn.BatchNorm2d(8)
        self.layers = nn.Sequential(Block(8, 8, 1), Block(8, 16, 2))
        self.fc = nn.Linear(16, 10)
    def forward(self, x):
        return self.fc(self.layers(torch.relu(self.bn1(self.conv1(x)))).mean((2, 3)))

torch.manual_seed(42)
device = torch_xla.device()
plain = ResNet()
model = copy.deepcopy(plain).to(device)
num_devices = xr.global_runtime_device_count()
device_ids = np.arange(num_devices)
torch.manual_seed(1)
batches = [(torch.randn(8, 3, 8, 8), torch.randint(10, (8,))) for _ in range(4)]
if sys.argv[1] == "kernels":
    mesh = xs.Mesh(device_ids, (2, num_devices // 2, 1, 1), ("w", "x", "y", "z"))
    for name, layer in model.named_modules():
        if "conv" in name:
            xs.mark_sharding(layer.weight, mesh, (0, 1, 2, 3))
    loader = pl.MpDeviceLoader(batches, device)
else:
    input_mesh = xs.Mesh(device_ids, (num_devices // 2, 1, 2, 1), ("B", "C", "W", "H"))
    assert input_mesh.get_logical_mesh().shape == (num_devices // 2, 1, 2, 1)
    loader = pl.MpDeviceLoader(batches, device, input_sharding=xs.ShardingSpec(input_mesh, (0, 1, 2, 3)),
                               loader_prefetch_size=8, device_prefetch_size=4, host_to_device_transfer_threads=1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-4)
loss_fn = nn.CrossEntropyLoss()
tracker = xm.RateTracker()
losses = []
model.train()
for step, (data, target) in enumerate(loader):
    x, y = data.to(device), target.to(device)
    with xp.StepTrace("train_imagenet"), xp.Trace("build_graph"):
        optimizer.zero_grad()
        loss = loss_fn(model(x), y)
        loss.backward()
        optimizer.step()
    xm.mark_step()
    tracker.add(8)
    losses.append(loss)
found = [loss.item() for loss in losses]
beside = torch.optim.SGD(plain.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-4)
expected = []
for x, y in batches:
    beside.zero_grad()
    loss = loss_fn(plain(x), y)
    loss.backward()
    beside.step()
    expected.append(loss.item())
weight = model.layers[1].conv2.weight
print(json.dumps({
    "found": found, "expected": expected, "programs": met.counter_value("UncachedCompile"),
    "part": list(weight.local_shards[0].data.shape) if sys.argv[1] == "kernels" else [],
    "host": [n for n in met.counter_names() if n.startswith("aten::") and n != "aten::_local_scalar_dense"],
}))
"""


@pytest.mark.parametrize("divided", ["images", "kernels"])
def test_an_old_script_with_a_resnet_on_a_mesh_of_two_axes(divided: str, tmp_path: Path) -> None:
    found = run_old_script(RESNET_SCRIPT, tmp_path, divided)
    assert found["found"] == pytest.approx(found["expected"], rel=1e-2)
    assert found["found"][:2] == pytest.approx(found["expected"][:2], rel=1e-4)
    assert found["programs"] == 2 and found["host"] == []
    assert found["part"] == ([8, 4, 3, 3] if divided == "kernels" else [])


def test_marking_as_a_function_of_autograd() -> None:
    found = run(
        """
        import torch_xla.runtime as xr
        from torch_xla.distributed.spmd import api, xla_sharding as xs
        assert xr.is_spmd() and api.Mesh is xs.Mesh  # by the variable, without use_spmd()
        from torch_xla.experimental.distributed_checkpoint import _helpers
        w = torch.ones(8, 4, device=device, requires_grad=True)
        y = xs.MarkShardingFunction.apply(w, xs.get_1d_mesh("x"), ("x", None))
        y.sum().backward()
        assert _helpers._is_sharded_tensor(y) and not _helpers._is_sharded_tensor(w)
        copied = _helpers._sharded_cpu_state_dict({"y": y, "w": w, "step": 3})
        assert isinstance(copied["y"], _helpers._CpuShards) and copied["y"].global_shape == y.shape
        assert torch.equal(copied["w"], w.detach().cpu()) and copied["step"] == 3
        print(json.dumps([list(spmd.local_shards(t)[0].data.shape) for t in (y, w.grad)]))
        """,
        LTC_COMPAT="1",
        XLA_USE_SPMD="1",
    )
    assert found == [[1, 4], [1, 4]]


def test_what_a_marked_tensor_has_of_a_dtensor() -> None:
    found = run(
        """
        import pytest
        from torch.distributed.tensor import DeviceMesh, Partial, Replicate, Shard, distribute_tensor
        from torch_xla.distributed.spmd import XLAShardedTensor, api, xla_sharding as xs
        devices = DeviceMesh("xla", torch.arange(8).reshape(2, 4), mesh_dim_names=("x", "y"))
        t = distribute_tensor(torch.arange(32.0).reshape(8, 4), devices, [Replicate(), Shard(1)])
        assert t.placements == (Replicate(), Shard(1)) and t.partition_spec == (None, 1)
        assert t._spec is t._spec and t._spec.tensor_meta.shape == t.shape
        assert t.device_mesh.mesh_dim_names == ("x", "y") and t.device_mesh.shape == (2, 4)
        assert api.convert_to_xla_mesh(devices).mesh_shape == (2, 4)
        assert api.convert_to_xla_partition_spec(t, [Shard(1), Replicate()]) == (None, 0)
        moved = t.redistribute(devices, [Shard(0), Shard(1)])
        assert moved.placements == (Shard(0), Shard(1)) and t.placements == (Replicate(), Shard(1))
        assert torch.equal(moved.cpu(), t.cpu())
        first = t._spec
        assert xs.wrap_as_sharded_tensor(t, (8,), (0, None)) is t and t._spec is not first
        assert t.placements == (Shard(0),)
        assert isinstance(XLAShardedTensor(torch.ones(8, device=device), (8,), (0,)), XLAShardedTensor)
        plain = torch.ones(8, device=device)
        assert not hasattr(plain, "placements")
        for unmarked in (plain, XLAShardedTensor(torch.ones(8))):
            with pytest.raises(ValueError, match="Placements not available: XLAShardedTensor requires") as told:
                unmarked._spec
            assert any("Next: mark_sharding" in note for note in told.value.__notes__)
        with pytest.raises(ValueError, match="(?s)needs both mesh_shape and partition_spec.*Next: pass both"):
            xs.wrap_as_sharded_tensor(plain, (8,))
        with pytest.raises(AssertionError, match="a mesh of 4 devices; there are 8"):
            api.convert_to_xla_mesh(DeviceMesh("xla", list(range(4))))
        with pytest.raises(ValueError, match="Number of placements .1. must match mesh dimensions .2."):
            t.redistribute(devices, [Shard(0)])
        with pytest.raises(IndexError, match="divides a dimension that is not there"):
            t.redistribute(devices, [Shard(2), Replicate()])
        with pytest.raises(NotImplementedError, match="no partial placement"):
            t.redistribute(devices, [Partial(), Replicate()])
        crossed = xs.mark_sharding(torch.ones(8, device=device), api.convert_to_xla_mesh(devices), (("y", "x"),))
        with pytest.raises(ValueError, match="by the axes of the mesh in their order"):
            crossed.placements
        print(json.dumps([list(part.data.shape) for part in spmd.local_shards(moved)[:1]]))
        """,
        LTC_COMPAT="1",
        XLA_USE_SPMD="1",
    )
    assert found == [[4, 1]]


def test_parts_of_a_tensor_know_their_place_and_are_loaded() -> None:
    found = run(
        """
        import pytest
        import torch_xla.distributed.spmd as xs
        import torch_xla.distributed.spmd.debugging as debugging
        whole = torch.arange(128.0).reshape(16, 8)
        t = whole.to(device)
        ids, shape = list(range(8)), [4, 2]
        same = torch.ops.xla.dynamo_mark_sharding(t, ids, shape, "('x', 'y')", "(None, 'y')")
        assert same is t and t.sharding_type is xs.ShardingType.PARTIAL
        assert [shard.replica_id for shard in t.local_shards] == [0, 0, 1, 1, 2, 2, 3, 3]
        for shard in t.local_shards:
            assert torch.equal(whole[shard.indices], shard.data) and shard.data.shape == (16, 4)
        table = debugging.visualize_tensor_sharding(t, use_color=False)
        assert (table.row_count, len(table.columns)) == (1, 2)

        mesh = xs.Mesh(ids, (8,), ("x",))
        tiled = xs.mark_sharding(whole.to(device), mesh, ("x", None))
        parts = tiled.local_shards
        assert [part.replica_id for part in parts] == [0] * 8
        assert [part.indices[0] for part in parts] == [slice(k, k + 2, 1) for k in range(0, 16, 2)]
        for part in parts:
            part.data *= -1
        tiled.load_local_shards_(parts)
        assert torch.equal(tiled.cpu(), -whole) and list(tiled.local_shards[0].data.shape) == [2, 8]

        copied = xs.mark_sharding(whole.to(device), mesh, (None, None))
        assert [(shard.indices, shard.replica_id) for shard in copied.local_shards] == [(..., k) for k in range(8)]
        parts[0].data = parts[0].data[:1]
        for target, wrong in ((tiled, parts), (tiled, parts[1:]), (copied, copied.local_shards)):
            with pytest.raises(RuntimeError, match="(?s)cannot be loaded.*Next: pass what t.local_shards"):
                target.load_local_shards_(wrong)
        print(json.dumps([debugging.construct_v1_sharding_str(tiled)]))
        """,
        LTC_COMPAT="1",
    )
    assert found == ["{devices=[8,1]0,1,2,3,4,5,6,7}"]


def test_what_xla_s_op_shardings_make() -> None:
    found = run(
        """
        import pytest
        import torch_xla
        import torch_xla.distributed.spmd as xs
        c, ids = torch_xla._XLAC, list(range(8))
        mesh = xs.Mesh(ids, (4, 2), ("x", "y"))
        whole = torch.arange(48.0).reshape(8, 6)
        tiled, copied = mesh.get_op_sharding(("x", "y")), mesh.get_op_sharding((None, "y"))
        assert tiled is mesh.get_op_sharding(("x", "y"))
        assert tiled.tile_assignment.tolist() == [[0, 1], [2, 3], [4, 5], [6, 7]]
        none = mesh.get_op_sharding((None, None))
        kinds = xs.ShardingType
        assert [s.sharding_type for s in (tiled, copied, none)] == [kinds.TILED, kinds.PARTIAL, kinds.REPLICATED]
        texts = []
        for spec in (("x", "y"), ("y", None), (None, ("x",)), (("x", "y"), None), (None, None)):
            marked = xs.mark_sharding(whole.new_zeros(8, 8).to(device), mesh, spec)
            shards = [shard.data + k for k, shard in enumerate(marked.local_shards)]
            t = c._global_tensor_from_cpu_shards(shards, mesh.get_op_sharding(spec))
            assert t.sharding_spec == marked.sharding_spec
            firsts = {str(s.indices): s.data for s in reversed(t.local_shards)}
            assert all(torch.equal(firsts[str(s.indices)], s.data) for s in t.local_shards)
            assert t.cpu().max() >= (0 if spec == (None, None) else 1)
            texts.append(t.sharding_spec)
        pieces = [torch.full((2, 3), float(k)) for k in ids]
        cut = c._global_tensor_from_cpu_shards(pieces, tiled, (7, 5))
        assert cut.shape == (7, 5) and cut.cpu()[6].tolist() == [6, 6, 6, 7, 7]
        for wrong in ((pieces[1:], tiled), (pieces, tiled, (9, 6)), (pieces, tiled, (4, 6)), (pieces, tiled, (8,)),
                      (pieces, mesh.get_op_sharding((None,)), (2,)), ([*pieces[1:], torch.ones(1)], tiled)):
            with pytest.raises(RuntimeError, match="(?s)do not fit how they are to be.*got: .*Next: pass mesh.get"):
                c._global_tensor_from_cpu_shards(*wrong)

        x = whole.to(device)
        with pytest.raises(RuntimeError, match="(?s)a tensor that is not marked.*Next: mark_sharding"):
            c._spmd_full_to_shard_shape(x)
        own = c._spmd_full_to_shard_shape(xs.mark_sharding(x, mesh, ("x", "y"))) + 1
        with pytest.raises(RuntimeError, match="(?s)that is not marked as manual"):
            c._spmd_shard_to_full_shape(x, tiled, x.shape, x.dtype)
        full = c._spmd_shard_to_full_shape(xs._mark_manual_sharding(own), tiled, x.shape, x.dtype)
        assert own.shape == (2, 3) and torch.equal(full.cpu(), whole + 1) and full.sharding_spec == texts[0]
        print(json.dumps(texts))
        """,
        LTC_COMPAT="1",
    )
    assert found == [
        "{devices=[4,2]0,1,2,3,4,5,6,7}",
        "{devices=[2,1,4]0,2,4,6,1,3,5,7 last_tile_dim_replicate}",
        "{devices=[1,4,2]0,1,2,3,4,5,6,7 last_tile_dim_replicate}",
        "{devices=[8,1]0,1,2,3,4,5,6,7}",
        "{replicated}",
    ]


def test_the_text_of_what_was_not_marked_itself() -> None:
    found = run(
        """
        import torch_xla
        import torch_xla.debug.metrics as met
        import torch_xla.distributed.spmd as xs
        import torch_xla.runtime as xr
        xr.use_spmd()
        text = torch_xla._XLAC._get_xla_sharding_spec
        mesh = xs.Mesh([3, 1, 2, 0, 4, 5, 6, 7], (4, 2), ("x", "y"))
        t = xs.mark_sharding(torch.ones(8, 8, device=device), mesh, ("x", "y"))
        pending = xs.mark_sharding(torch.ones(8, 8, device=device) * 2, mesh, ("x", "y")).clone()
        leaf = torch.ones(8, 8, device=device).requires_grad_()
        xs.mark_sharding_with_gradients(leaf, mesh, ("x", "y")).sum().backward()
        texts = [text(pending), text(leaf.grad), text(t * 2)]
        ltc.mark_step()
        ltc.wait_device_ops()
        assert met.metric_data("ExecuteReplicatedTime") == met.metric_data("ExecuteTime")
        again = [text(t.clone()), text(pending), text(leaf.grad), text(t[0]), text(torch.ones(8, 8, device=device))]
        print(json.dumps([t.sharding_spec, texts, again]))
        """,
        LTC_COMPAT="1",
    )
    marked, texts, again = found
    assert texts == [marked, marked, ""]
    assert again == [marked, marked, marked, "", ""]


def test_parts_of_batches_that_cannot_be_equal() -> None:
    found = run(
        """
        mesh = spmd.get_1d_mesh("data")
        spec = spmd.ShardingSpec(mesh, ("data", None), minibatch=True)
        even = next(iter(ltd.MpDeviceLoader([torch.ones(8, 2)], device, input_sharding=spec)))
        try:
            next(iter(ltd.MpDeviceLoader([torch.ones(7, 2)], device, input_sharding=spec)))
        except RuntimeError as error:
            print(json.dumps([list(even.shape), str(error)]))
        """,
    )
    shape, error = found
    assert shape == [8, 2]
    assert (
        "must be divisible by local runtime device count. Per host input data shape = (7, 2)"
        in error
    )
    assert "Next: drop the last batch of the loader" in error


UNEVEN_SCRIPT = """
import json
import os
import torch
import torch_xla
import torch_xla.core.xla_model as xm
import torch_xla.debug.metrics as met
import torch_xla.distributed.spmd as xs
import torch_xla.runtime as xr

xr.use_spmd()
del os.environ["XLA_USE_SPMD"]
assert not xr.is_spmd()
xr.use_spmd()
assert xr.is_spmd()
X = torch_xla._XLAC
mesh = xs.Mesh(range(8), (4, 2), ("x", "y"))
values = torch.arange(25.0).reshape(5, 5)
t = xs.mark_sharding(values.to("xla"), mesh, ("x", "y"))
shards = t.local_shards
assert [tuple(s.data.shape) for s in shards] == [(2, 3)] * 8 and [s.replica_id for s in shards] == [0] * 8
assert [s.shard_device for s in shards] == [f"XLA:{k}" for k in range(8)]
assert shards[5].data.tolist() == [[23, 24, 0], [0, 0, 0]] and shards[5].indices == [slice(4, 5, 1), slice(3, 5, 1)]
for shard in shards:
    assert torch.equal(shard.unpadded_data, values[shard.indices[0], shard.indices[1]])
    shard.data += 1
t.load_local_shards_(shards)
assert torch.equal(t.cpu(), values + 1)
copies = xs.mark_sharding(torch.ones(5).to("xla"), mesh, ("x",)).local_shards
assert [s.replica_id for s in copies] == [0, 1] * 4 and copies[7].unpadded_data.shape == (0,)

# texts and counters
met.clear_all()
for spec in (("x", None), ("x", None), (None, "y")):
    even = xs.mark_sharding(torch.ones(8, 2).to("xla"), mesh, spec)
assert met.counter_value("CreateOpSharding") == 2 and met.counter_value("VirtualDeviceUsage") == 3
assert met.counter_value("ReplicateShardedData") is None
even.cpu()
torch_xla.sync()
met.clear_counters()
_ = even + 1
torch_xla.sync(wait=True)
assert met.counter_value("ExecuteReplicated") == 1 and met.counter_value("ExecuteComputation") is None
even.cpu()
assert met.counter_value("ReplicateShardedData") == 1
text = X._get_xla_tensor_debug_info(even)
for part in ("Device: SPMD:0", "XLAShardedData", "OpSharding: {devices=[1,2,4]", "NumShards: 8", "xla::device_data"):
    assert part in text, (part, text)
text = X._get_xla_tensors_hlo([even])
assert "%p0.1 = f32[8,2]{1,0} parameter(0), sharding={devices=[1,2,4]0,2,4,6,1,3,5,7 last_tile_dim_replicate}" in text
print(json.dumps(True))
"""


def test_uneven_parts_texts_and_counters_of_old_scripts(tmp_path: Path) -> None:
    """Parts of one size with zeros at the end; what a tensor's description and the counters say with `use_spmd`."""
    assert run_old_script(UNEVEN_SCRIPT, tmp_path)


AUTO_SCRIPT = """
import json
import os
import pytest
import torch
import torch_xla
import torch_xla.debug.metrics as met
import torch_xla.distributed.spmd as xs
import torch_xla.runtime as xr

X = torch_xla._XLAC
assert not X._xla_get_auto_sharding()
x = torch.randn(16, 64)
model = torch.nn.Sequential(torch.nn.Linear(64, 128), torch.nn.Tanh(), torch.nn.Linear(128, 7))
expected = model(x)
expected.square().mean().backward()
gradient = model[0].weight.grad.clone()
model.zero_grad()
before = X._get_graph_hash([torch.ones(2).to("xla") + 0])

mesh = xs.get_1d_mesh()
model = xs.xla_distribute_module(model, mesh, xs.auto_policy)
assert X._xla_get_auto_sharding() and xr.is_spmd()
first, second = model[0].weight, model[2].weight
assert {tuple(shard.data.shape) for shard in xs.XLAShardedTensor(first).local_shards} == {(16, 64)}
assert "ShardingSpec: {devices=[8,1]" in X._get_xla_tensor_debug_info(first)
assert not X._get_xla_sharding_spec(second) and not X._get_xla_sharding_spec(model[0].bias)  # they are small
met.clear_counters()
found = model(x.to("xla"))
found.square().mean().backward()
torch_xla.sync()
assert met.counter_value("CompileWithAutoSharding") == 1, met.counter_names()
torch.testing.assert_close(found.cpu(), expected, rtol=1e-4, atol=1e-5)
torch.testing.assert_close(first.grad.cpu(), gradient, rtol=1e-4, atol=1e-5)

hashes = [before, X._get_graph_hash([torch.ones(2).to("xla") + 0])]
os.environ["XLA_AUTO_SPMD_MESH"] = "2,4"
hashes.append(X._get_graph_hash([torch.ones(2).to("xla") + 0]))
assert len(set(hashes)) == 3
# The longer axis divides the longer dimension, if it does so evenly.
for size, text in (((40, 30), "[4,2]"), ((30, 40), "[2,4]"), ((33, 40), "[1,4,2]"), ((35, 41), "")):
    t = torch.ones(size).to("xla")
    assert text in X._get_xla_sharding_spec(t), (size, X._get_xla_sharding_spec(t))
    assert t.sum().item() == size[0] * size[1]
os.environ["XLA_AUTO_SPMD_MESH"] = "2,3"
with pytest.raises(ValueError, match="has to name a mesh of all 8 devices\\n  got: 2,3\\n  Next: XLA_AUTO_SPMD_MESH=8"):
    torch.ones(64, 64).to("xla")
print(json.dumps(True))
"""


def test_what_nobody_marks_is_divided_by_itself(tmp_path: Path) -> None:
    assert run_old_script(AUTO_SCRIPT, tmp_path)


TEXTS_SCRIPT = """
import json
import os
import torch
import torch_xla
import torch_xla.distributed.spmd as xs
import torch_xla.runtime as xr

xr.use_spmd()
X = torch_xla._XLAC
a, b = torch.randn(4, 64).to("xla"), torch.randn(64, 4).to("xla")
xs.mark_sharding(a, xs.get_1d_mesh("data"), (None, "data"))
product = a @ b
assert "all-reduce" not in X._get_xla_tensors_hlo([product])
os.environ["XLA_DUMP_POST_OPTIMIZATIONS"] = "1"
text = X._get_xla_tensors_hlo([product, b * 2])
assert "all-reduce" in text and "num_partitions=8" in text, text
assert "num_partitions" not in X._get_xla_tensors_hlo([b * 2])

# What a program computes and does not divide has a sharding, too; what was uploaded has none.
c = b @ b.t()
assert not X._get_xla_sharding_spec(c)
torch_xla.sync(wait=True)
assert X._get_xla_sharding_spec(c) == "{replicated}" and not X._get_xla_sharding_spec(b)
assert "OpSharding: {replicated}" in X._get_xla_tensor_debug_info(c)
print(json.dumps(True))
"""


def test_optimized_programs_and_replicated_results_of_old_scripts(tmp_path: Path) -> None:
    assert run_old_script(TEXTS_SCRIPT, tmp_path)


def test_no_device_has_the_whole_of_a_tensor_that_is_sharded() -> None:
    """What is moved to the device waits on the host until it is sharded, or used; it is a copy from the first on."""
    found = run(
        """
        import jax
        from ltc_core import metrics

        def whole():
            return [list(a.shape) for a in jax.live_arrays() if a.size >= 4096 and len(a.sharding.device_set) == 1]

        mesh = spmd.Mesh(range(8), (8,), ("fsdp",))
        net = nn.Linear(64, 64)
        given = net.weight.detach()
        kept, bias = given.clone(), net.bias.detach().clone()
        net.to(device)
        after_move, uploads = whole(), metrics.metric_data("TransferToDeviceTime")
        given.zero_()  # the caller's memory: nobody reads it any more
        read = (net.weight.cpu() - kept).abs().max().item()
        spmd.mark_sharding(net.weight, mesh, ("fsdp", None))
        after_mark = whole()
        sizes = [list(p.sizes) for p in ltc.api.sharding.parts_of(net.weight)]
        net.load_state_dict({"weight": kept + 1, "bias": bias})  # lies as the weight that it replaces
        after_load = whole()
        x = torch.randn(8, 64)
        y = net(x.to(device)).sum()
        y.backward()
        plain = nn.functional.linear(x, kept + 1, bias).sum()
        unused = torch.ones(4096).to(device)
        twice = [(unused + k).sum().item() for k in range(2)]
        sent = metrics.metric_data("OutboundData")[1]
        print(json.dumps([
            after_move, uploads, read, after_mark, sizes, after_load, abs(y.item() - plain.item()), twice,
            list(net.weight.grad.shape), sent,
        ]))
        """
    )
    after_move, uploads, read, after_mark, sizes, after_load, error, twice, grad, sent = found
    assert after_move == after_mark == after_load == [] and uploads is None and read == 0
    assert sizes == [[8, 64]] * 8
    assert error < 1e-3 and grad == [64, 64] and twice == [4096, 8192]
    # The weight twice, the bias, x, and the ones once, though two programs took them.
    assert sent == 4 * (2 * 4096 + 64 + 8 * 64 + 4096)
