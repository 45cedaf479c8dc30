"""Processes, in the style of torch_xla 1.13: xmp.spawn, get_ordinal, step closures, mesh_reduce, xm.save."""

import os
import sys

import torch
import torch_xla.core.xla_model as xm
import torch_xla.distributed.parallel_loader as pl
import torch_xla.distributed.xla_multiprocessing as xmp
import torch_xla.utils.serialization as xser
from samples import batches, net, tell


def _train_update(losses, loss):
    losses.append(loss.item())


def _mp_fn(index, flags):
    device = xm.xla_device()
    assert index == xm.get_ordinal() and str(device) == "xla:0"
    model = net().to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loss_fn = torch.nn.CrossEntropyLoss()
    loader = pl.MpDeviceLoader(batches(xm.get_ordinal(), xm.xrt_world_size()), device)
    losses = []
    for _ in range(flags["epochs"]):
        for x, y in loader:
            optimizer.zero_grad()
            loss = loss_fn(model(x), y)
            loss.backward()
            xm.optimizer_step(optimizer)
            xm.add_step_closure(_train_update, args=(losses, loss))
    xm.mark_step()
    mean = [xm.mesh_reduce("loss", v, lambda all: sum(all) / len(all)) for v in losses]
    xm.save(model.state_dict(), "model.pt")
    xser.save(model.state_dict(), "model.xser", master_only=True)
    xm.rendezvous("saved")
    state, streamed = torch.load("model.pt"), xser.load("model.xser")
    assert all(torch.equal(streamed[k], v) and v.device.type == "cpu" for k, v in state.items())
    if xm.is_master_ordinal():
        tell(
            losses=mean,
            world_size=xm.xrt_world_size(),
            pids=xm.mesh_reduce("pid", os.getpid(), set) and 0,
        )
    else:
        xm.mesh_reduce("pid", os.getpid(), set)
    xm.master_print("done", fd=sys.stderr)


if __name__ == "__main__":
    xmp.spawn(_mp_fn, args=({"epochs": 2},), nprocs=int(os.environ["NPROCS"]))
