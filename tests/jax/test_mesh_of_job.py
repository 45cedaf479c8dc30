"""A mesh of the devices of all processes: losses are those of eager on the whole batch, and who differs is named."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

pytest.importorskip("jax")
pytestmark = [pytest.mark.dist, pytest.mark.timeout(200)]

ROOT = Path(__file__).parents[2]

# Rows of the batches and columns of the weights are divided; the processes read whole batches, or each its part.
TRAIN = """
import sys
import torch
from torch import nn
import ltc_dist as ltd
from ltc_dist import spmd

spmd.use_spmd()
is_part, rank, size = sys.argv[1] == "part", ltd.get_ordinal(), ltd.world_size()
device = ltd.lazy_device()
count = spmd.num_devices()
mesh = spmd.Mesh(range(count), (count // 2, 2), ("data", "model"))

def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Dropout(0.0), nn.Linear(16, 4))

def losses_of(model, batches):
    optimizer = torch.optim.AdamW(model.parameters(), 0.01)
    losses = []
    for x, y in batches:
        assert x.shape == (16, 8) and y.shape == (16, 4)
        loss = (model(x) - y).square().mean()
        optimizer.zero_grad()
        loss.backward()
        ltd.optimizer_step(optimizer)
        losses.append(loss.detach())
    return [loss.item() for loss in losses]

draws = torch.Generator().manual_seed(1)
batches = [(torch.randn(16, 8, generator=draws), torch.randn(16, 4, generator=draws)) for _ in range(4)]
own = batches
if is_part:
    rows = slice(rank * 16 // size, (rank + 1) * 16 // size)
    own = [(x[rows], y[rows]) for x, y in batches]
spec = spmd.ShardingSpec(mesh, ("data", None), minibatch=is_part)
model = net().to(device)
spmd.mark_sharding(model[0].weight, mesh, ("model", None))
spmd.mark_sharding(model[3].weight, mesh, (None, "model"))
found = losses_of(model, ltd.MpDeviceLoader(own, device, input_sharding=spec))
plain = net()
torch.testing.assert_close(found, losses_of(plain, batches), rtol=1e-4, atol=1e-5)
parts = [tuple(part.data.shape) for part in spmd.local_shards(model[0].weight)]
assert parts == [(8, 8)] * (count // size), parts

# All processes bring a divided tensor to the CPU, and move it.
torch.testing.assert_close([p.cpu() for p in model.parameters()], list(plain.parameters()), rtol=1e-3, atol=1e-4)
ltd.save(model.state_dict(), sys.argv[2])
spmd.clear_sharding(model[0].weight)
spmd.mark_sharding(model[0].weight, mesh, ("data", None))
assert (model(batches[0][0].to(device)) - plain(batches[0][0]).to(device)).abs().max().item() < 1e-3
again = net().to(device)
again.load_state_dict(torch.load(sys.argv[2]))
torch.testing.assert_close([p.cpu() for p in again.parameters()], [p.cpu() for p in model.parameters()])
for background in (True, False):
    with ltd.Checkpointer(f"{sys.argv[2]}.{background}", background=background, model=model) as checkpointer:
        checkpointer.save(4)
    other = net().to(device)
    spmd.mark_sharding(other[3].weight, mesh, (None, ("data", "model")))
    with ltd.Checkpointer(f"{sys.argv[2]}.{background}", model=other) as checkpointer:
        assert checkpointer.restore().step == 4
    torch.testing.assert_close([p.cpu() for p in other.parameters()], [p.cpu() for p in model.parameters()])
    assert spmd.local_shards(other[3].weight)[0].data.shape == (4, 2)
print(f"rank {rank} is done")
"""

# Rank 1 does something else than rank 0.
DIFFERS = """
import sys
import torch
from torch import nn
import ltc_dist as ltd
from ltc_dist import spmd

how, rank = sys.argv[1], ltd.get_ordinal()
device = ltd.lazy_device()
count = spmd.num_devices()
mesh = spmd.Mesh(range(count), (count,), ("data",))
torch.manual_seed(rank if how == "seeds" else 0)
model = nn.Linear(8, 8).to(device)
optimizer = torch.optim.SGD(model.parameters(), 0.1)
for k in range(20):
    if how == "ends" and rank == 1 and k == 2:
        break
    torch.manual_seed(k + 10 * rank if how == "batches" else k)
    x = torch.randn(8, 8).to(device)
    spmd.mark_sharding(x, mesh, ("data", None))
    if how == "steps" and rank == 1 and k == 2:
        x = x * 2
    if how == "order" and (k == 1 or k == 2 - rank):  # both programs are known at the end
        x = x * 2
    if how == "reads" and rank == 0 and k == 3:
        x.cpu()
    loss = model(x).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    loss.item()
    if how == "reads" and k == 0:
        x.cpu()
"""

# A step with an index that the table does not have: in all processes, in the part of one of them, or computed.
INDICES = """
import sys
import torch
from torch import nn
import torch.nn.functional as F
import ltc_dist as ltd
from ltc_core import metrics
from ltc_dist import spmd

how, rank = sys.argv[1], ltd.get_ordinal()
device = ltd.lazy_device()
count = spmd.num_devices()
mesh = spmd.Mesh(range(count), (count,), ("data",))
torch.manual_seed(0)
model = nn.Sequential(nn.Embedding(10, 8), nn.Linear(8, 5)).to(device)
optimizer = torch.optim.SGD(model.parameters(), 0.1)
x, y = torch.arange(8), torch.arange(8) % 5
bad = x.clone()
bad[1] = 10

def step(x):
    x, labels = x.to(device), y.to(device)
    if how == "divided":
        spmd.mark_sharding(x, mesh, ("data",))
    spmd.mark_sharding(labels, mesh, ("data",))
    loss = F.cross_entropy(model(x * 2 - x if how == "computed" else x), labels)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return loss.item()

before = step(x)
step(x)
kept = [p.cpu() for p in model.parameters()]
try:
    step(bad)
except IndexError as error:
    print(f"rank {rank}:", str(error).splitlines()[0])
if how == "whole":
    assert all(torch.equal(p.cpu(), old) for p, old in zip(model.parameters(), kept))
    assert step(x) < before
hits, misses = (metrics.counter_value(f"PersistentCache{which}") or 0 for which in ("Hit", "Miss"))
print(f"rank {rank}: {hits} programs found, {misses} compiled")
"""

# A job trains, saves its state, and tells the losses of the steps after that; another one restores it.
SAVES = """
import os
import sys
import torch
from torch import nn
import ltc_dist as ltd
from ltc_dist import spmd

directory, does = sys.argv[1:]
device = ltd.lazy_device()
count = spmd.num_devices()
shape = (count // 2, 2) if does == "save" else (2, count // 2)
mesh = spmd.Mesh(range(count), shape, ("data", "model"))
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 8)).to(device)
spmd.mark_sharding(model[0].weight, mesh, ("model", None))
spmd.mark_sharding(model[2].weight, mesh, ("data", "model") if does == "save" else (None, "data"))
optimizer = torch.optim.AdamW(model.parameters(), 0.01)

def loss_of(k):
    torch.manual_seed(k)
    x = torch.randn(8, 16).to(device)
    spmd.mark_sharding(x, mesh, ("data", None))
    loss = model(x).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return loss.item()

with ltd.Checkpointer(directory, model=model, optimizer=optimizer, background="thread" in does) as checkpointer:
    if does.startswith("save"):
        for k in range(3):
            loss_of(k)
        checkpointer.save(3, table=model[0].weight.detach())
    else:
        found = checkpointer.restore()
        assert found.step == 3 and torch.equal(found.values["table"], model[0].weight.cpu())
        assert torch.equal(ltd.latest_checkpoint(directory).state()["model"]["0.weight"], found.values["table"])
    losses = [loss_of(k) for k in range(3, 6)]
    sizes = {str(list(part.data.shape)) for part in spmd.local_shards(model[2].weight)}
print("losses", *losses, "parts", *sizes)
"""


def launch(
    script: str,
    path: Path,
    *args: str,
    processes: int = 2,
    cache: Path | None = None,
) -> subprocess.CompletedProcess[str]:
    file = path / "train.py"
    file.write_text(script)
    given = {
        "LTC_EXECUTOR": "jax",
        "LTC_SPMD": "1",
        "LTC_NUM_DEVICES": str(8 // processes),
        "LTC_COLLECTIVE_TIMEOUT_S": "30",
        "PYTHONPATH": str(ROOT),
        **({"LTC_COMPILED_CACHE_DIR": str(cache)} if cache is not None else {}),
    }
    return subprocess.run(
        [sys.executable, "-m", "ltc_launch", "--nprocs", str(processes), str(file), *args],
        env={**os.environ, **given},
        capture_output=True,
        text=True,
        timeout=150,
    )


@pytest.mark.parametrize(("processes", "batches"), [(2, "whole"), (2, "part"), (4, "part")])
def test_losses_are_those_of_eager(processes: int, batches: str, tmp_path: Path) -> None:
    done = launch(TRAIN, tmp_path, batches, str(tmp_path / "model.pt"), processes=processes)
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.count("is done") == processes
    assert "Gloo" not in done.stdout and "each by itself" not in done.stderr
    assert "recoverable" not in done.stderr


@pytest.mark.parametrize(
    ("how", "words"),
    [
        ("seeds", ("on undivided data of checksum", "train.py:27")),
        ("batches", ("dividing float32[8, 8] of checksum", "train.py:20")),
        ("steps", ("rank 0: a program of 17 ops", "rank 1: a program of 18 ops")),
        ("order", ("do not do the same on the mesh of all devices", "a program of 17 ops")),
        ("reads", ("rank 0: moving float32[8, 8]", "rank 1: a program of 17 ops")),
        ("ends", ("rank 1 has ended while rank 0 waits for it",)),
    ],
)
def test_who_differs_is_named(how: str, words: tuple[str, ...], tmp_path: Path) -> None:
    done = launch(DIFFERS, tmp_path, how)
    assert done.returncode == 1, (done.returncode, done.stderr[-3000:])
    assert all(word in done.stderr for word in words), done.stderr[-3000:]
    assert "Aborted" not in done.stderr


@pytest.mark.parametrize(
    ("how", "words"),
    [
        ("whole", "has an index that is not from 0 to 9 (its first op was recorded at "),
        ("computed", "index out of range in aten.embedding.default"),
    ],
)
def test_an_index_out_of_range_is_an_error_in_each_process(
    how: str, words: str, tmp_path: Path
) -> None:
    done = launch(INDICES, tmp_path, how)
    found = [line for line in done.stdout.splitlines() if words in line]
    assert {line.split("rank ")[1][0] for line in found} == {"0", "1"}, done.stdout + done.stderr


def test_of_divided_indices_the_process_that_has_the_part_raises(tmp_path: Path) -> None:
    done = launch(INDICES, tmp_path, "divided")
    assert "rank 0: a compiled program failed" in done.stdout, done.stdout + done.stderr
    assert "rank 0 has ended while rank 1 waits for it" in done.stderr


def test_a_later_job_of_the_same_form_finds_the_programs(tmp_path: Path) -> None:
    def run(processes: int) -> list[str]:
        done = launch(INDICES, tmp_path, "whole", processes=processes, cache=tmp_path / "cache")
        assert done.returncode == 0, done.stderr[-3000:]
        return [line for line in done.stdout.splitlines() if "programs found" in line]

    assert not any(" 0 compiled" in line for line in run(2))
    again = run(2)
    assert len(again) == 2 and all(" 0 compiled" in line for line in again)
    assert not any(" 0 compiled" in line for line in run(4))  # the processes have other devices


def values_in(part: Path) -> int:
    """Numbers of float32 in the files of a part of a checkpoint."""
    tensors = [t for file in part.glob("*.safetensors") for t in load_file(file).values()]
    return sum(tensor.numel() for tensor in tensors if tensor.dtype is torch.float32)


@pytest.mark.parametrize("does", ["save", "save in a thread"])
def test_each_process_saves_its_parts_and_any_mesh_restores_them(does: str, tmp_path: Path) -> None:
    def told(done: subprocess.CompletedProcess[str]) -> list[float]:
        assert done.returncode == 0, done.stderr[-3000:]
        lines = [line.split("losses ")[1] for line in done.stdout.splitlines() if "losses" in line]
        assert len(set(lines)) == 1
        return [float(word) for word in lines[0].split(" parts")[0].split()]

    directory = tmp_path / "saved"
    losses = told(launch(SAVES, tmp_path, str(directory), does))
    step = directory / "step_000000003"
    weights, biases, counts = 16 * 32 + 32 * 8, 32 + 8, 4  # each has two tensors of state
    assert values_in(step / "shared") <= 3 * biases + counts
    in_parts = [values_in(step / f"rank_{rank:05d}") for rank in range(2)]
    assert min(in_parts) >= weights
    assert sum(in_parts) + values_in(step / "shared") == 3 * (weights + biases) + counts
    for processes in (2, 4, 1):
        done = launch(SAVES, tmp_path, str(directory), "restore", processes=processes)
        assert told(done) == pytest.approx(losses, rel=1e-5)


def test_it_needs_jax_and_comes_first(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text("from ltc_dist import spmd\nspmd.use_spmd()\n")
    command = [sys.executable, "-m", "ltc_launch", "--nprocs", "2", str(script)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    executor = {**environment, "LTC_EXECUTOR": "inductor"}
    done = subprocess.run(command, env=executor, capture_output=True, text=True, timeout=100)
    assert done.returncode == 1 and "the devices of 2 processes cannot be one mesh" in done.stderr
    script.write_text(
        "import torch, ltc_dist as ltd\nfrom ltc_dist import spmd\n"
        "torch.ones(1, device=ltd.lazy_device())\nspmd.use_spmd()\n"
    )
    jax = {**environment, "LTC_EXECUTOR": "jax"}
    done = subprocess.run(command, env=jax, capture_output=True, text=True, timeout=100)
    assert done.returncode == 1 and "use_spmd comes too late" in done.stderr
