"""A module for a launcher such as xla_spawn.py: `_mp_fn`, one rendezvous tag from two lines, ParallelLoader."""

import numpy as np
import torch
import torch_xla.core.xla_model as xm
import torch_xla.distributed.parallel_loader as pl
from samples import batches, net, tell


def load_examples():
    if not xm.is_master_ordinal():
        xm.rendezvous("load_and_cache_examples")
    found = batches(xm.get_ordinal(), xm.xrt_world_size())
    if xm.is_master_ordinal():
        xm.rendezvous("load_and_cache_examples")
    return found


def main():
    device = xm.xla_device()
    examples = load_examples()
    model = net().to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for _ in range(2):
        iterator = pl.ParallelLoader(examples, [device]).per_device_loader(device)
        for x, y in iterator:
            loss = torch.nn.functional.cross_entropy(model(x), y)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1e9)
            xm.optimizer_step(optimizer)
            model.zero_grad()
            losses.append(loss.item())
    all_losses = xm.mesh_reduce("losses", np.array([losses]), np.concatenate)
    if xm.is_master_ordinal():
        tell(losses=all_losses.mean(0).tolist(), world_size=xm.xrt_world_size())


def _mp_fn(index):
    main()
