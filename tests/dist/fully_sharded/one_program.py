"""A script that shards its parameters with `fully_shard`: DEVICE. Rank 0 prints the loss and programs of each step."""

import sys
from typing import Any

import torch
from torch import distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import ltc_core as ltc
import ltc_dist  # noqa: F401 - registers the device

fsdp: Any = fully_shard
kind = sys.argv[1]
dist.init_process_group()
rank, count = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
layers = [nn.Sequential(nn.Linear(12, 30), nn.GELU(), nn.Linear(30, 12)) for _ in range(3)]
model: Any = nn.Sequential(*layers).to(kind)
options: dict[str, Any] = {"mesh": init_device_mesh("cpu", (count,))} if kind == "cpu" else {}
for layer in model:
    fsdp(layer, **options)
fsdp(model, **options)
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
x = torch.randn(8, 12, generator=torch.Generator().manual_seed(rank)).to(kind)


def num_programs() -> int:
    return ltc.metrics.counter_value("ExecuteComputation") or 0


before = num_programs()
for _ in range(5):
    loss = model(x).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    value = loss.item()
    before, here = num_programs(), num_programs() - before
    if rank == 0:
        print(f"loss {value:.5f}")
        print("programs", here)
dist.barrier()
dist.destroy_process_group()
