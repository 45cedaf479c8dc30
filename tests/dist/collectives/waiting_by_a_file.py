"""A script whose ranks wait for each other by a file, after a collective that one of them reads: PATH of the file."""

import sys
import time
from pathlib import Path

import torch
from torch import distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

import ltc_dist  # noqa: F401 - registers the device

path = Path(sys.argv[1])
dist.init_process_group()
rank = dist.get_rank()
mesh = init_device_mesh("ltc", (dist.get_world_size(),))
whole = DTensor.from_local(torch.full((2,), rank + 1.0).to("ltc"), mesh, [Shard(0)]).full_tensor()
if rank == 0:
    path.write_text(str(whole.tolist()))
else:
    while not path.exists():
        time.sleep(0.05)
print("rank", rank, path.read_text(), whole.tolist())
dist.barrier()
dist.destroy_process_group()
