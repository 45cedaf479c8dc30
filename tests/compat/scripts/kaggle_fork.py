"""A notebook's cells: the wrapped model in the parent, fork, the model used in the parent afterwards."""

import gc
import os

import torch
import torch_xla
import torch_xla.core.xla_model as xm
import torch_xla.distributed.parallel_loader as pl
import torch_xla.distributed.xla_multiprocessing as xmp
from samples import batches, net, tell

os.environ["XLA_TENSOR_ALLOCATOR_MAXSIZE"] = "100000000"
WRAPPED = xmp.MpModelWrapper(net())
FLAGS = {"lr": 0.1 * xm.xrt_world_size()}  # the parent is alone


def _run(rank, flags):
    device = xm.xla_device()
    model = WRAPPED.to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=flags["lr"])
    losses = []
    for _ in range(2):
        para_loader = pl.ParallelLoader(batches(rank, xm.xrt_world_size()), [device])
        for x, y in para_loader.per_device_loader(device):
            optimizer.zero_grad()
            loss = torch.nn.functional.cross_entropy(model(x), y)
            loss.backward()
            xm.optimizer_step(optimizer)
            losses.append(loss.detach())
        del para_loader
        gc.collect()
    reduced = xm.mesh_reduce("loss", torch.stack(losses), lambda all: sum(all) / len(all))
    if xm.is_master_ordinal():
        tell(losses=reduced.tolist(), gitrev=torch_xla.version.__xla_gitrev__)


xmp.spawn(_run, args=(FLAGS,), nprocs=int(os.environ["NPROCS"]), start_method="fork")
assert WRAPPED.to(xm.xla_device())(torch.ones(1, 8, device=xm.xla_device())).shape == (1, 4)
