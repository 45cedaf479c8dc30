"""torch.distributed.checkpoint and torch_xla's names for it, on meshes: any mesh loads what another one has saved."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("jax", reason="make test-jax has an environment with it")

ROOT = Path(__file__).parents[2]
PRELUDE = """
import copy, os
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dist_cp
import torch_xla
import torch_xla.core.xla_model as xm
import torch_xla.distributed.spmd as xs
import torch_xla.distributed.xla_backend
import torch_xla.runtime as xr
from torch import nn
from torch_xla.experimental.distributed_checkpoint import (
    CheckpointManager, SPMDLoadPlanner, SPMDSavePlanner, prime_optimizer,
)
from torch_xla.experimental.distributed_checkpoint._helpers import _sharded_cpu_state_dict
xr.use_spmd()
device = torch_xla.device()

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(16, 8), nn.Linear(8, 3)
    def forward(self, x):
        return self.fc2(torch.relu(self.fc1(x)))

def made(shape, spec, seed):
    torch.manual_seed(seed)
    model = Net().to(device)
    mesh = xs.Mesh(range(4), shape, ("x", "y"))
    xs.mark_sharding(model.fc1.weight, mesh, spec)
    xs.mark_sharding(model.fc2.weight, mesh, (None, None))
    return model, torch.optim.AdamW(model.parameters(), lr=0.01)

def step(model, optimizer, seed):
    torch.manual_seed(seed)
    optimizer.zero_grad()
    loss = model(torch.randn(8, 16).to(device)).square().mean()
    loss.backward()
    optimizer.step()
    torch_xla.sync()
    return loss.item()

def parts(t):
    return sorted((s.shard_device, tuple(s.data.shape)) for s in t.local_shards)
"""


def run(directory: Path, code: str, **environ: str) -> str:
    """What a script of torch_xla prints, with four devices of a CPU."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith("LTC_") or "CACHE" in k}
    given = {"LTC_EXECUTOR": "jax", "LTC_RANDOM": "host", "LTC_NUM_DEVICES": "4"}
    script = directory / "script.py"
    script.write_text(PRELUDE + code)
    done = subprocess.run(
        [sys.executable, "-m", "ltc_dist.compat", os.fspath(script)],
        cwd=directory,
        capture_output=True,
        text=True,
        timeout=140,
        env={**kept, **given, "PYTHONPATH": str(ROOT), **environ},
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def test_planners(tmp_path: Path) -> None:
    """Sharded to another mesh, to no mesh and back; each tensor lies as the target does."""
    code = """
plain = Net().to(device)
saved, optimizer = made((4, 1), ("x", None), 0)
step(saved, optimizer, 1)

def state(model):
    return {"model": model.state_dict(), "epoch": 0}

kept = {**state(saved), "epoch": 7}
dist_cp.save(state_dict=kept, storage_writer=dist_cp.FileSystemWriter("a"), planner=SPMDSavePlanner())
dist_cp.save(state_dict=kept, storage_writer=dist_cp.FileSystemWriter("b"))
copied = _sharded_cpu_state_dict(kept)
assert [shard.data.shape for shard in copied["model"]["fc1.weight"].shards] == [(2, 16)] * 4
dist_cp.save(state_dict=copied, storage_writer=dist_cp.FileSystemWriter("on_cpu"), planner=SPMDSavePlanner())
for path in ("a", "b", "on_cpu"):
    for target in (made((2, 2), ("y", "x"), 2)[0], made((4, 1), (None, "x"), 3)[0], plain):
        before = [parts(p) for p in target.parameters()]
        found = state(target)
        dist_cp.load(state_dict=found, storage_reader=dist_cp.FileSystemReader(path), planner=SPMDLoadPlanner())
        assert found["epoch"] == 7
        for p, q in zip(target.parameters(), saved.parameters(), strict=True):
            assert torch.equal(p.cpu(), q.cpu())
        assert [parts(p) for p in target.parameters()] == before
        with torch.no_grad():
            target.fc1.weight.zero_()
dist_cp.save(state_dict=plain.state_dict(), storage_writer=dist_cp.FileSystemWriter("c"))
found = saved.state_dict()
dist_cp.load(state_dict=found, storage_reader=dist_cp.FileSystemReader("c"), planner=SPMDLoadPlanner())
assert not saved.fc1.weight.cpu().any() and parts(saved.fc1.weight) == [(f"XLA:{k}", (2, 16)) for k in range(4)]
"""
    run(tmp_path, code)


def test_a_checkpoint_that_was_written_by_shards(tmp_path: Path) -> None:
    """As torch_xla writes them: pieces of one tensor, each with its offset."""
    code = """
import dataclasses
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

class ByShards(SPMDSavePlanner):
    def create_local_plan(self):
        plan = super().create_local_plan()
        items = [item for item in plan.items if item.index.fqn != "fc1.weight"]
        whole = self.state_dict["fc1.weight"]
        for k in range(4):
            chunk = ChunkStorageMetadata(torch.Size([2 * k, 0]), torch.Size([2, 16]))
            data = TensorWriteData(chunk, TensorProperties.create_from_tensor(whole), whole.size())
            index = MetadataIndex("fc1.weight", chunk.offsets, k)
            items.append(WriteItem(index, WriteItemType.SHARD, tensor_data=data))
        return dataclasses.replace(plan, items=items)
    def lookup_object(self, index):
        found = self.state_dict[index.fqn]
        return found[index.offset[0]:][:2] if index.fqn == "fc1.weight" else found

saved, _ = made((4, 1), ("x", None), 0)
dist_cp.save(state_dict=saved.state_dict(), storage_writer=dist_cp.FileSystemWriter("a"), planner=ByShards())
target, _ = made((2, 2), (("y"), "x"), 1)
before = parts(target.fc1.weight)
found = target.state_dict()
dist_cp.load(state_dict=found, storage_reader=dist_cp.FileSystemReader("a"), planner=SPMDLoadPlanner())
torch_xla.sync()
assert all(torch.equal(p.cpu(), q.cpu()) for p, q in zip(saved.parameters(), target.parameters(), strict=True))
assert parts(target.fc1.weight) == before
"""
    run(tmp_path, code)


def test_training_goes_on_from_a_checkpoint_on_another_mesh(tmp_path: Path) -> None:
    code = """
dist.init_process_group(backend="gloo", init_method="xla://", rank=0, world_size=1)
model, optimizer = made((4, 1), ("x", None), 0)
manager = CheckpointManager("run", save_interval=2, max_to_keep=2)
losses = []
for k in range(6):
    losses.append(step(model, optimizer, k))
    state = {"model": model.state_dict(), "optim": optimizer.state_dict()}
    assert manager.save_async(k, state) == (k % 2 == 0)
manager.join()
assert manager.all_steps() == [2, 4]

again, optim = made((2, 2), ("y", "x"), 9)
optim.param_groups[0]["lr"] = 5.0
values = [p.detach().cpu() for p in again.parameters()]
lies = parts(again.fc1.weight)
assert prime_optimizer(optim) is optim
assert all(torch.equal(p.cpu(), q) for p, q in zip(again.parameters(), values, strict=True))
assert all(p.grad is None for p in again.parameters())
assert parts(optim.state[again.fc1.weight]["exp_avg"]) == lies
manager = CheckpointManager("run", save_interval=2, max_to_keep=2)
state = {"model": again.state_dict(), "optim": optim.state_dict()}
manager.restore(max(manager.all_steps()), state)
again.load_state_dict(state["model"])
optim.load_state_dict(state["optim"])
assert optim.param_groups[0]["lr"] == 0.01 and optim.state[again.fc1.weight]["step"].item() == 5
assert abs(step(again, optim, 5) - losses[5]) < 1e-6
assert all(torch.allclose(p.cpu(), q.cpu(), atol=1e-6) for p, q in zip(again.parameters(), model.parameters()))
assert parts(again.fc1.weight) == lies == [(f"XLA:{k}", (4, 8)) for k in range(4)]
assert parts(optim.state[again.fc1.weight]["exp_avg"]) == lies
dist.destroy_process_group()
"""
    run(tmp_path, code)


def test_loops_and_attention_on_a_mesh(tmp_path: Path) -> None:
    code = """
from torch_xla.experimental.custom_kernel import flash_attention
from torch_xla.experimental.gradient_accumulation import gradient_accumulation
from torch_xla.experimental.scan_layers import scan_layers

torch.manual_seed(0)
layers = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(3))
plain = copy.deepcopy(layers)
layers = layers.to(device)
mesh = xs.Mesh(range(4), (2, 2), ("x", "y"))
for layer in layers:
    xs.mark_sharding(layer[0].weight, mesh, ("y", None))
x = torch.randn(2, 4, 8)
batch = x.to(device)
xs.mark_sharding(batch, mesh, (None, "x", None))
loss = gradient_accumulation(lambda part: scan_layers(layers, part).square().mean(), (batch,), layers)
torch_xla.sync()
expected = sum(nn.Sequential(*plain)(part).square().mean() for part in x) / 2
expected.backward()
assert torch.allclose(loss.cpu(), expected, atol=1e-6)
for p, q in zip(layers.parameters(), plain.parameters(), strict=True):
    assert torch.allclose(p.grad.cpu(), q.grad, atol=1e-6)
assert parts(layers[0][0].weight.grad) == parts(layers[0][0].weight)

xs.set_global_mesh(mesh)
q, k, v = torch.randn(3, 2, 2, 5, 4)
own = [t.to(device).requires_grad_() for t in (q, k, v)]
out = flash_attention(*own, causal=True, sm_scale=0.5, partition_spec=("x", "y", None, None))
out.square().sum().backward()
torch_xla.sync()
assert parts(out) == [(f"XLA:{k}", (1, 1, 5, 4)) for k in range(4)]
q.requires_grad_()
beside = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
beside.square().sum().backward()
assert torch.allclose(out.cpu(), beside, atol=1e-6) and torch.allclose(own[0].grad.cpu(), q.grad, atol=1e-5)
"""
    run(tmp_path, code)
