"""Processes, in the style of torch_xla 2.9: torch_xla.launch, runtime ordinals, torch_xla.sync."""

import torch
import torch_xla
import torch_xla.core.xla_model as xm
import torch_xla.distributed.parallel_loader as pl
from samples import batches, net, tell
from torch_xla import runtime as xr


def _mp_fn(index):
    device = torch_xla.device()
    model = net().to("xla")
    xm.broadcast_master_param(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = pl.MpDeviceLoader(batches(xr.global_ordinal(), xr.world_size()), device)
    losses = []
    for _ in range(2):
        for x, y in loader:
            with torch_xla.step():
                optimizer.zero_grad()
                loss = torch.nn.functional.cross_entropy(model(x), y)
                loss.backward()
                xm.optimizer_step(optimizer)
            losses.append(loss.detach())
    torch_xla.sync(wait=True)
    mean = xm.all_reduce(xm.REDUCE_SUM, torch.stack(losses), scale=1.0 / xr.world_size())
    if xm.is_master_ordinal(local=False):
        tell(losses=mean.tolist(), world_size=xr.world_size())
    else:
        mean.tolist()


if __name__ == "__main__":
    torch_xla.launch(_mp_fn)
