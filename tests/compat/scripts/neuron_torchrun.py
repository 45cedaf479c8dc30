"""Pretraining in the style of AWS Neuron, for torchrun: backend 'xla', accumulated gradients, clipping between
reduce_gradients and the optimizer's own step, checkpoints read by one window of ranks after the other.
"""

import os

import torch
import torch.distributed as dist
import torch_xla.core.xla_model as xm
import torch_xla.distributed.parallel_loader as pl
import torch_xla.distributed.xla_backend  # noqa: F401
from samples import Samples, net, tell
from torch.utils.data import DataLoader, DistributedSampler

ACCUMULATED, MAX_NORM, WINDOW = 2, 0.2, 1


class Tied(torch.nn.Module):
    """The network, with two layers that share a weight until they are moved."""

    def __init__(self):
        super().__init__()
        self.body = net()
        self.first, self.second = (torch.nn.Linear(4, 4, bias=False) for _ in range(2))
        self.tie_weights()

    def tie_weights(self):
        self.second.weight = self.first.weight

    def forward(self, x):
        return self.second(self.first(self.body(x)))


def plain():
    """The same without devices and processes: gradients of whole batches."""
    torch.manual_seed(0)
    model = Tied()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    rows = DataLoader(Samples(), batch_size=16)
    found = []
    for x, y in rows:
        loss = torch.nn.functional.cross_entropy(model(x), y)
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
        optimizer.step()
        optimizer.zero_grad()
        found.append((loss.item(), norm.item()))
    return found


def load(path, model, local_rank, local_world_size):
    """One window of ranks after the other reads the file."""
    for start in range(0, local_world_size, WINDOW):
        if start <= local_rank < start + WINDOW:
            model.load_state_dict(torch.load(path, map_location="cpu")["model"])
        xm.rendezvous(f"load.{start}")


def main():
    dist.init_process_group("xla")
    device = xm.xla_device()
    world_size, is_root = xm.xrt_world_size(), xm.is_master_ordinal(local=False)
    assert (dist.get_world_size(), dist.get_rank()) == (world_size, xm.get_ordinal())
    torch.manual_seed(0)
    model = Tied()
    model.to(device)
    model.tie_weights()
    model.train()
    assert len(list(model.parameters())) == 5
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    optimizer.zero_grad()
    sampler = DistributedSampler(
        Samples(), num_replicas=world_size, rank=xm.get_ordinal(), shuffle=False, drop_last=True
    )
    size = 16 // world_size // ACCUMULATED
    loader = DataLoader(Samples(), sampler=sampler, batch_size=size, drop_last=True)
    running = torch.zeros((), device=device)
    logged = []

    def log(loss, norm):
        logged.append((loss.item(), norm.item()))

    xm.mark_step()
    xm.rendezvous("init-complete")
    for k, (x, y) in enumerate(pl.MpDeviceLoader(loader, device), 1):
        loss = torch.nn.functional.cross_entropy(model(x), y) / ACCUMULATED
        loss.backward()
        running += loss.detach()
        if k % ACCUMULATED:
            continue
        xm.mark_step()
        reduced = xm.all_reduce(xm.REDUCE_SUM, running / world_size)
        running.zero_()
        xm.reduce_gradients(optimizer)
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
        optimizer.step()
        optimizer.zero_grad()
        xm.add_step_closure(log, (reduced.detach(), norm.detach()))
    xm.mark_step()
    state = {"model": model.state_dict(), "step": len(logged)}
    xm.save(state, "checkpoint.pt")
    xm.rendezvous("saved")
    before = {name: value.cpu() for name, value in model.state_dict().items()}
    load("checkpoint.pt", model, int(os.environ["LOCAL_RANK"]), int(os.environ["LOCAL_WORLD_SIZE"]))
    assert all(torch.equal(v.cpu(), before[name]) for name, v in model.state_dict().items())
    # The group's own collectives take tensors of the device too.
    total = torch.ones(1, device=device)
    dist.all_reduce(total)
    assert total.item() == world_size
    dist.barrier()
    if is_root:
        tell(logged=logged, plain=plain(), world_size=world_size, backend=dist.get_backend())
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
