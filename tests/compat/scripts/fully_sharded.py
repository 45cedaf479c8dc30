"""Parameters divided over processes, in the style of torch_xla 2.x: WRAPPING.

Nested modules by hand or by a policy, activation checkpoints, a file for each process, and one model of them.
"""

import functools
import os
import sys

import torch
import torch_xla
import torch_xla.core.xla_model as xm
import torch_xla.distributed.parallel_loader as pl
from samples import batches, net, tell
from torch_xla import runtime as xr
from torch_xla.distributed.fsdp import (
    XlaFullyShardedDataParallel as FSDP,
)
from torch_xla.distributed.fsdp import (
    checkpoint_module,
    consolidate_sharded_model_checkpoints,
)
from torch_xla.distributed.fsdp.wrap import (
    size_based_auto_wrap_policy,
    transformer_auto_wrap_policy,
)


def wrapped(how):
    model = net()
    if how == "nested":
        inner = functools.partial(
            FSDP, compute_dtype=torch.float32, pin_layout_in_collective_ops=True
        )
        model[0] = inner(checkpoint_module(model[0]))
        model[2] = inner(checkpoint_module(model[2]))
        return FSDP(model, flatten_parameters=True)
    policy = {
        "size": functools.partial(size_based_auto_wrap_policy, min_num_params=60),
        "type": functools.partial(
            transformer_auto_wrap_policy, transformer_layer_cls={torch.nn.Linear}
        ),
    }[how]

    def wrap(module, *args, **kwargs):
        return FSDP(checkpoint_module(module), *args, **kwargs)

    return FSDP(
        model, auto_wrap_policy=policy, auto_wrapper_callable=wrap, shard_param_on_dim_0=True
    )


def _mp_fn(index, how):
    device = torch_xla.device()
    rank, size = xr.global_ordinal(), xr.world_size()
    model = wrapped(how)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for _ in range(2):
        for x, y in pl.MpDeviceLoader(batches(rank, size), device):
            optimizer.zero_grad()
            loss = torch.nn.functional.cross_entropy(model(x), y)
            loss.backward()
            xm.all_reduce(
                xm.REDUCE_SUM, xm._fetch_gradients(optimizer), scale=1.0 / size
            )  # as accelerate
            optimizer.step()  # not xm.optimizer_step: the gradients are reduced
            losses.append(loss.detach())
    mean = xm.all_reduce(xm.REDUCE_SUM, torch.stack(losses), scale=1.0 / size).tolist()

    state = {
        "model": model.state_dict(),
        "shard_metadata": model.get_shard_metadata(),
        "optimizer": optimizer.state_dict(),
    }
    xm.save(state, f"model_rank-{rank:08d}-of-{size:08d}.pth", master_only=False)
    if xm.is_master_ordinal(local=False):
        xm.rendezvous("saved")
        consolidate_sharded_model_checkpoints(ckpt_prefix="model", ckpt_suffix="_rank-*-of-*.pth")
        one = net()
        one.load_state_dict(torch.load("model_consolidated.pth")["model"])
        (x, y), *_ = batches()
        loss = torch.nn.functional.cross_entropy(one(x), y).item()
        tell(losses=mean, world_size=size, after=loss, names=sorted(os.listdir(".")))
    else:
        xm.rendezvous("saved")


if __name__ == "__main__":
    torch_xla.launch(_mp_fn, args=(sys.argv[1],))
