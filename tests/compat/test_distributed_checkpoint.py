"""`torch_xla.experimental.distributed_checkpoint` on any executor: planners, the manager, and a primed optimizer."""

import os
import sys
from pathlib import Path

import pytest

from tests.compat.running import run
from tests.launching import Job

PRELUDE = """
import os, pickle, signal, sys, threading
import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dist_cp
import torch_xla
import torch_xla.core.xla_model as xm
import torch_xla.distributed.xla_backend
import torch_xla.distributed.xla_multiprocessing as xmp
from torch import nn
from torch_xla.experimental.distributed_checkpoint import (
    CheckpointManager, SPMDLoadPlanner, SPMDSavePlanner, prime_optimizer,
)

def made(seed, kind=torch.optim.AdamW, **options):
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2)).to(torch_xla.device())
    return model, kind(model.parameters(), lr=0.01, **options)

def step(model, optimizer, seed):
    torch.manual_seed(seed)
    optimizer.zero_grad()
    loss = model(torch.randn(8, 4).to(torch_xla.device())).square().mean()
    loss.backward()
    optimizer.step()
    torch_xla.sync()
    return loss.item()

def state_of(model, optimizer):
    return {"model": model.state_dict(), "optim": optimizer.state_dict()}

def equal(a, b):
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(equal(a[k], b[k]) for k in a)
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(equal, a, b))
    return torch.equal(a.cpu(), b.cpu()) and a.device == b.device if isinstance(a, torch.Tensor) else a == b
"""

ALONE = """
import atexit
dist.init_process_group("gloo", init_method="xla://", rank=0, world_size=1)
atexit.register(dist.destroy_process_group)
"""


def test_a_run_goes_on_with_each_optimizer(tmp_path: Path) -> None:
    code = f"""{PRELUDE}{ALONE}for k, (kind, options) in enumerate([
    (torch.optim.SGD, {{}}), (torch.optim.SGD, {{"momentum": 0.9, "weight_decay": 0.1}}), (torch.optim.AdamW, {{}}),
    (torch.optim.Adagrad, {{}}), (torch.optim.RMSprop, {{"momentum": 0.5}}),
]):
    model, optimizer = made(0, kind, **options)
    step(model, optimizer, 1)
    manager = CheckpointManager(f"run{{k}}", 1, chkpt_on_preemption=False)
    saved = state_of(model, optimizer)
    assert manager.save(0, saved, force=True)

    again, optim = made(2, kind, **options)
    before = [p.detach().cpu() for p in again.parameters()]
    again[0].bias.grad = torch.ones(8, device="xla")
    assert prime_optimizer(optim) is optim
    assert all(torch.equal(p.cpu(), q) for p, q in zip(again.parameters(), before, strict=True))
    assert again[0].bias.grad.tolist() == [1] * 8 and again[0].weight.grad is None
    found = state_of(again, optim)
    manager.restore(0, found)
    assert equal(found, saved)
    again.load_state_dict(found["model"])
    optim.load_state_dict(found["optim"])
    assert equal(state_of(again, optim), saved)
    assert step(again, optim, 3) == step(model, optimizer, 3)
    assert equal(state_of(again, optim), state_of(model, optimizer))
"""
    run(tmp_path, code)


def test_planners_and_plain_checkpoints_read_each_other(tmp_path: Path) -> None:
    code = f"""{PRELUDE}{ALONE}model, optimizer = made(0)
step(model, optimizer, 1)
saved = {{**state_of(model, optimizer), "epoch": 3}}
for path, planner in (("a", SPMDSavePlanner()), ("b", None)):
    dist_cp.save(state_dict=saved, storage_writer=dist_cp.FileSystemWriter(path), planner=planner)
    for planner in (SPMDLoadPlanner(), None):
        again, optim = made(2)
        prime_optimizer(optim)
        found = {{**state_of(again, optim), "epoch": 0}}
        dist_cp.load(state_dict=found, storage_reader=dist_cp.FileSystemReader(path), planner=planner)
        assert equal(found, saved)
        assert all(torch.equal(p, q) for p, q in zip(again.parameters(), model.parameters(), strict=True))
"""
    run(tmp_path, code)


def test_steps_that_are_kept(tmp_path: Path) -> None:
    code = f"""{PRELUDE}{ALONE}import torch_xla.experimental.distributed_checkpoint.manager as of_module
assert of_module.CheckpointManager is CheckpointManager

def manager_of(**options):
    return CheckpointManager("run", save_interval=10, chkpt_on_preemption=False, **options)
state = {{"a": torch.arange(4.0, device="xla"), "n": 1}}
manager = manager_of(max_to_keep=2)
assert manager.all_steps() == []
assert not any(manager.save(k, state) for k in range(1, 10)) and not os.listdir("run")
assert manager.save(10, state) and manager.save(20, state) and manager.all_steps() == [10, 20]
assert manager.save(30, state) and manager.all_steps() == [20, 30] and sorted(os.listdir("run")) == ["20", "30"]
assert manager.save(10, state) and manager.all_steps() == [10, 30]  # the oldest goes, not the lowest
assert manager.save(10, state) and manager.all_steps() == [10, 30]  # again
manager = manager_of(max_to_keep=2)
assert manager.save(5, state, force=True) and manager.all_steps() == [5, 10]
with open("run/10/.manager_metadata", "rb") as file:
    assert b"torch_xla.experimental.distributed_checkpoint.manager" in file.read()
with pytest.raises(AssertionError, match="Cannot restore from untracked step 30. Valid steps are"):
    manager.restore(30, state)
with pytest.raises(AssertionError, match="Preemption detection not enabled"):
    manager.reached_preemption(1)
for wrong, text in ((dict(save_interval=0), "save_interval must be positive"),
                    (dict(save_interval=1, max_pending_async=0), "max_pending_async must be positive"),
                    (dict(save_interval=1, max_to_keep=-1), "max_to_keep must be non-negative")):
    with pytest.raises(AssertionError, match=text):
        CheckpointManager("run", chkpt_on_preemption=False, **wrong)
# a URL, as of a bucket
assert CheckpointManager("memory://runs/a", 10, chkpt_on_preemption=False).save(10, state)
found = {{"a": torch.zeros(4, device="xla"), "n": 0}}
CheckpointManager("memory://runs/a", 10, chkpt_on_preemption=False).restore(10, found)
assert found["a"].tolist() == [0, 1, 2, 3] and found["n"] == 1
# one that was not finished is not there
os.remove("run/10/.manager_metadata")
with open("run/notes.txt", "w") as file:
    file.write("not a checkpoint")
assert manager_of().all_steps() == [5]
dist.destroy_process_group()
atexit.unregister(dist.destroy_process_group)
with pytest.raises(AssertionError, match="A process group is required"):
    manager_of()
"""
    run(tmp_path, code)


def test_asynchronous_checkpoints(tmp_path: Path) -> None:
    code = f"""{PRELUDE}{ALONE}manager = CheckpointManager("run", save_interval=10, chkpt_on_preemption=False)
gate, save = threading.Event(), manager._save
def held(*args):
    assert gate.wait(30)
    save(*args)
manager._save = held
model, optimizer = made(0)
step(model, optimizer, 0)
state = state_of(model, optimizer)
kept = [v.cpu() for v in state["model"].values()]
assert manager.save_async(10, state) and not manager.save_async(11, state) and manager.all_steps() == []
step(model, optimizer, 1)  # what is saved is the state of before
gate.set()
manager.join()
manager._save = save
assert manager.all_steps() == [10]
again, optim = made(1)
prime_optimizer(optim)
found = state_of(again, optim)
manager.restore(10, found)
assert all(torch.equal(a.cpu(), b) for a, b in zip(found["model"].values(), kept, strict=True))
assert found["optim"]["state"][0]["step"].item() == 1
assert all(manager.save_async(k, state) for k in range(20, 90, 10)) and manager.save(90, state)
assert manager.all_steps() == list(range(10, 100, 10))

def fail(*args):
    raise OSError("the disk is full")
manager._save = fail
assert manager.save_async(100, state)
with pytest.raises(RuntimeError, match="(?s)checkpoint of step 100 was not written.*OSError: the disk is full") as told:
    manager.join()
assert isinstance(told.value.__cause__, OSError)
assert manager.save_async(110, state)
"""
    run(tmp_path, code)


PREEMPTED = f"""{PRELUDE}
def train(rank):
    dist.init_process_group("BACKEND", init_method="xla://")
    model, optimizer = made(0)
    manager = CheckpointManager("run", save_interval=1000, max_to_keep=1)
    for k in range(1, 400):
        step(model, optimizer, k)
        took = manager.save_async(k, state_of(model, optimizer))
        if k == 5 and rank == WORLD - 1:
            os.kill(os.getpid(), signal.SIGTERM)
        assert took == manager.reached_preemption(k) == manager.reached_preemption(k)
        if took:
            manager.join()
            break
    again, optim = made(1)
    prime_optimizer(optim)
    found = state_of(again, optim)
    CheckpointManager("run", save_interval=1000).restore(k, found)
    assert equal(found, state_of(model, optimizer))
    steps = [None] * WORLD
    dist.all_gather_object(steps, (k, manager.all_steps()))
    assert steps == [(k, [k])] * WORLD and 5 < k < 300, steps
    dist.destroy_process_group()
    print("saved", flush=True)

if __name__ == "__main__":
    torch_xla.launch(train, debug_single_process=WORLD == 1)
"""


@pytest.mark.dist
@pytest.mark.parametrize(("world", "backend"), [(1, "gloo"), (2, "gloo"), (2, "xla")])
def test_a_job_that_is_preempted_saves_the_same_step(
    tmp_path: Path, world: int, backend: str
) -> None:
    script = tmp_path / "script.py"
    script.write_text(PREEMPTED.replace("WORLD", str(world)).replace("BACKEND", backend))
    command = [sys.executable, "-m", "ltc_dist.compat", os.fspath(script)]
    job = Job(command, tmp_path, LTC_COMPILE="off", CPU_NUM_DEVICES=str(world))
    code, out, err = job.end()
    assert code == 0, err
    assert out.count("saved") == world
