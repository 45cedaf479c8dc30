"""Checkpoints by parts, in one process with eight devices and in two with four: who writes what, and what is read."""

from __future__ import annotations

import io
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("jax")
pytestmark = [pytest.mark.dist, pytest.mark.timeout(200)]

ROOT = Path(__file__).parents[2]
NUM_DEVICES = 8
NUM_BYTES = 4 * 64 * 32  # of the tensor `rows`

PRELUDE = """
import sys, os, weakref
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
import ltc_dist as ltd
from ltc_core.errors import CheckpointFormatError
from ltc_dist import spmd
from ltc_dist.spmd.planners import SPMDLoadPlanner, SPMDSavePlanner

path, rank, size = sys.argv[1], ltd.get_ordinal(), int(os.environ.get("WORLD_SIZE", "1"))
device = ltd.lazy_device()

def mesh(*shape):
    return spmd.Mesh(range(8), shape, ("x", "y", "z")[: len(shape)])

def divided(values, grid, *spec):
    return spmd.mark_sharding(values.clone().to(device), grid, spec)

def parts(t):
    return [(part.device, tuple(part.data.shape)) for part in spmd.local_shards(t)]

torch.manual_seed(0)
ROWS, TILES, COPIES = torch.randn(64, 32), torch.randn(8, 16), torch.randn(16, 4).bfloat16()
WHOLE, NUMBER = torch.arange(6.0), torch.tensor(3)

def state():
    return {
        "rows": divided(ROWS, mesh(8), "x", None),
        "tiles": divided(TILES, mesh(2, 4), "x", "y"),
        "copies": divided(COPIES, mesh(2, 4), "y", None),    # each part is on two devices
        "nested": {"whole": WHOLE.to(device), "lists": [divided(TILES * 2, mesh(4, 2), ("x", "y"), None)]},
        "number": NUMBER.clone().to(device),
        "epoch": 7,
    }

def other(grid, *spec):
    # the same tensors, otherwise divided
    return {
        "rows": divided(torch.zeros(64, 32), grid, *spec),
        "tiles": torch.zeros(8, 16).to(device),
        "copies": divided(torch.zeros(16, 4).bfloat16(), grid, *spec),
        "nested": {"whole": divided(torch.zeros(6), grid, None), "lists": [divided(torch.zeros(8, 16), grid, *spec)]},
        "number": torch.tensor(0).to(device),
        "epoch": 0,
    }

def check(found):
    flat = [found["rows"], found["tiles"], found["copies"], *found["nested"].values(), found["number"]]
    flat = [t for entry in flat for t in (entry if isinstance(entry, list) else [entry])]
    expected = [ROWS, TILES, COPIES, WHOLE, TILES * 2, NUMBER]
    for t, value in zip(flat, expected, strict=True):
        assert torch.equal(t.cpu(), value), (t, value)
    assert found["epoch"] == 7
"""

SAVE = """
class Counted(SPMDSavePlanner):
    most = alive = 0
    names = []
    def resolve_data(self, item):
        found = super().resolve_data(item)
        if isinstance(found, torch.Tensor):
            self.names.append((item.index.fqn, tuple(found.shape)))
            Counted.alive += 1
            Counted.most = max(Counted.most, Counted.alive)
            weakref.finalize(found, self.gone)
        return found
    @staticmethod
    def gone():
        Counted.alive -= 1

if size > 1:
    try:
        dcp.save(state(), checkpoint_id=path + "/no", planner=SPMDSavePlanner())
    except dcp.CheckpointException as error:
        assert "needs a process group of all of them" in str(error)
    else:
        raise AssertionError("written without a group")
    dist.init_process_group("gloo")
kept = state()
writer = dcp.FileSystemWriter(path, single_file_per_rank=False)
dcp.save(kept, storage_writer=writer, planner=Counted())
assert Counted.most <= 2, Counted.most   # the one that is written, and the one before it
print("wrote", rank, sorted(Counted.names), flush=True)
again = other(mesh(4, 2), "y", "x")
before = parts(again["rows"]), parts(again["copies"]), parts(again["nested"]["whole"])
dcp.load(again, checkpoint_id=path, planner=SPMDLoadPlanner())
assert (parts(again["rows"]), parts(again["copies"]), parts(again["nested"]["whole"])) == before
check(again)
torch.testing.assert_close((again["rows"] * 2 + again["tiles"].sum()).cpu(), ROWS * 2 + TILES.sum())
if size > 1:
    dist.barrier()
    dist.destroy_process_group()
"""

LOAD = """
class Counted(SPMDLoadPlanner):
    read = 0
    def commit_tensor(self, item, tensor):
        super().commit_tensor(item, tensor)
        if item.dest_index.fqn == "rows":
            Counted.read += tensor.nbytes

for grid, spec in ((mesh(8), ("x", None)), (mesh(2, 4), (None, "y")), (mesh(2, 2, 2), (("x", "z"), "y"))):
    found = other(grid, *spec)
    before, Counted.read = parts(found["rows"]), 0
    dcp.load(found, checkpoint_id=path, planner=Counted())
    check(found)
    assert parts(found["rows"]) == before
    assert Counted.read == (ROWS.nbytes // size if len(grid.mesh_shape) != 2 else ROWS.nbytes), Counted.read
found = other(mesh(8), "x", None)
dcp.load(found, checkpoint_id=path)     # PyTorch's own planner reads all of it in each process
check(found)
metadata = dcp.FileSystemReader(path).read_metadata()
metadata.state_dict_metadata["rows"].chunks.clear()
planner = SPMDLoadPlanner()
planner.set_up_planner({"rows": found["rows"]}, metadata, True)
try:
    planner.create_local_plan()
except CheckpointFormatError as error:
    assert "has not all of the tensor 'rows'" in str(error)
else:
    raise AssertionError("planned")
print("read", rank, flush=True)
"""

PLAIN = """
if size > 1:
    dist.init_process_group("gloo")
try:
    dcp.save(state(), checkpoint_id=path)
except dcp.CheckpointException as error:
    assert size > 1 and "planner=SPMDSavePlanner()" in str(error), error
    print("refused", rank, flush=True)
whole = {"a": WHOLE.to(device), "b": (WHOLE * 2).to(device), "c": 3}
dcp.save(whole, checkpoint_id=path + "2")
found = {"a": torch.zeros(6).to(device), "b": torch.zeros(6).to(device), "c": 0}
dcp.load(found, checkpoint_id=path + "2")
assert torch.equal(found["a"].cpu(), WHOLE) and torch.equal(found["b"].cpu(), WHOLE * 2) and found["c"] == 3
if size > 1:
    dist.destroy_process_group()
"""

MANAGER = """
from torch_xla.experimental.distributed_checkpoint import CheckpointManager, prime_optimizer
from ltc_dist.spmd import SpmdFullyShardedDataParallel
import torch_xla.distributed.xla_backend

dist.init_process_group("gloo", init_method="xla://")

def made(seed, shape):
    torch.manual_seed(seed)
    net = nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 8))
    grid = spmd.Mesh(range(8), shape, ("fsdp", "model"))
    net = SpmdFullyShardedDataParallel(net, mesh=grid)
    return net, torch.optim.AdamW(net.parameters(), 0.01), grid

def step(net, optimizer, grid, k):
    torch.manual_seed(k)
    x = spmd.mark_sharding(torch.randn(8, 16).to(device), grid, ("fsdp", None))
    optimizer.zero_grad()
    loss = net(x).square().mean()
    loss.backward()
    ltd.optimizer_step(optimizer)
    return loss.item()

net, optimizer, grid = made(0, (8, 1))
manager = CheckpointManager(path, save_interval=2, max_to_keep=2)
losses = []
for k in range(5):
    losses.append(step(net, optimizer, grid, k))
    saved = {"model": net.state_dict(), "optim": optimizer.state_dict()}
    if k == 0:
        manager.save(k, saved)
    else:
        manager.save_async(k, saved)
    if k == 2:
        values = [p.detach().cpu() for p in net.parameters()]
manager.join()
assert manager.all_steps() == [2, 4], manager.all_steps()
net, optimizer, grid = made(1, (4, 2))
prime_optimizer(optimizer)
held = next(iter(net.parameters()))
lies = parts(held), parts(optimizer.state[held]["exp_avg"])
assert lies[0] == lies[1] and lies[0][0][1] == (8, 16), lies
state = {"model": net.state_dict(), "optim": optimizer.state_dict()}
manager.restore(2, state)
net.load_state_dict(state["model"])
optimizer.load_state_dict(state["optim"])
assert all(torch.equal(p.cpu(), value) for p, value in zip(net.parameters(), values, strict=True))
assert (parts(held), parts(optimizer.state[held]["exp_avg"])) == lies
again = [step(net, optimizer, grid, k) for k in (3, 4)]
torch.testing.assert_close(again, losses[3:], rtol=1e-4, atol=1e-6)
print("trained", rank, flush=True)
dist.destroy_process_group()
"""


def launch(code: str, directory: Path, path: str, processes: int) -> str:
    file = directory / "script.py"
    file.write_text(PRELUDE + code)
    given = {
        "LTC_EXECUTOR": "jax",
        "LTC_SPMD": "1",
        "LTC_RANDOM": "host",
        "LTC_NUM_DEVICES": str(NUM_DEVICES // processes),
        "LTC_COLLECTIVE_TIMEOUT_S": "30",
        "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]),
    }
    command = [sys.executable, "-m", "ltc_launch", "--compat", "--nprocs", str(processes)]
    done = subprocess.run(
        [*command, str(file), str(directory / path)],
        env={**os.environ, **given},
        capture_output=True,
        text=True,
        timeout=150,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("processes", [1, 2])
def test_each_part_is_written_once(processes: int, tmp_path: Path) -> None:
    """Read again on another mesh, by another number of processes, and on the CPU."""
    import torch
    import torch.distributed.checkpoint as dcp

    out = launch(SAVE, tmp_path, "run", processes)
    assert out.count("wrote") == processes
    wrote = {int(line.split()[1]): line for line in out.splitlines() if line.startswith("wrote")}
    per = NUM_DEVICES // processes
    for rank, line in wrote.items():
        assert line.count("('rows', (8, 32))") == per
        assert line.count("('tiles', (4, 4))") == per
        assert line.count("('copies', (4, 4))") == 4 // processes
        assert line.count("('nested.whole', (6,))") == (rank == 0)
    metadata = dcp.FileSystemReader(tmp_path / "run").read_metadata()
    assert len(metadata.state_dict_metadata["rows"].chunks) == NUM_DEVICES  # type: ignore[union-attr]
    for rank in range(processes):
        own = [
            (tmp_path / "run" / found.relative_path).stat().st_size
            for index, found in metadata.storage_data.items()  # type: ignore[union-attr]
            if index.fqn == "rows" and found.relative_path.startswith(f"__{rank}_")
        ]
        beside = io.BytesIO()
        torch.save(torch.zeros(0, 32), beside)
        assert 0 <= sum(own) - NUM_BYTES // processes <= 2 * per * len(beside.getvalue())
    torch.manual_seed(0)
    rows, tiles = torch.randn(64, 32), torch.randn(8, 16)
    found = {"rows": torch.zeros(64, 32), "tiles": torch.zeros(8, 16), "epoch": 0}
    dcp.load(found, checkpoint_id=tmp_path / "run")
    assert torch.equal(found["rows"], rows) and torch.equal(found["tiles"], tiles)  # type: ignore[arg-type]
    assert found["epoch"] == 7
    assert launch(LOAD, tmp_path, "run", 3 - processes).count("read") == 3 - processes


@pytest.mark.parametrize("processes", [1, 2])
def test_pytorchs_own_planner_writes_whole_tensors(processes: int, tmp_path: Path) -> None:
    out = launch(PLAIN, tmp_path, "run", processes)
    assert out.count("refused") == (processes if processes > 1 else 0)


@pytest.mark.parametrize("processes", [1, 2])
def test_a_manager_of_divided_training(processes: int, tmp_path: Path) -> None:
    assert launch(MANAGER, tmp_path, "run", processes).count("trained") == processes
