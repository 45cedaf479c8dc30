"""A device environment and an updater in the style of timm's bits: old signatures, gradients reduced by hand and once
more by optimizer_step; and again with a GradScaler.
"""

import os
from contextlib import suppress

import torch
import torch_xla.amp as xa
import torch_xla.core.xla_model as xm
import torch_xla.distributed.parallel_loader as pl
import torch_xla.distributed.xla_multiprocessing as xmp
from samples import batches, net, tell


class DeviceEnvXla:
    def __init__(self, xla_device_type=None, device_idx=None, local_rank=0, amp=False):
        assert len(xm.get_xla_supported_devices(devkind=xla_device_type)) >= 1
        self.device = xm.xla_device(n=device_idx, devkind=xla_device_type)
        self.local_rank = xm.get_local_ordinal(local_rank)
        self.world_size = xm.xrt_world_size()
        self.global_rank = xm.get_ordinal() if self.world_size > 1 else 0
        self.autocast = xa.autocast if amp else suppress

    def to_device(self, *modules):
        return [m.to(device=self.device, memory_format=None) for m in modules]


class UpdaterXla:
    def __init__(self, optimizer, clip_value, scaler_kwargs=None):
        self.optimizer, self.clip_value = optimizer, clip_value
        self.parameters = [p for group in optimizer.param_groups for p in group["params"]]
        self.scaler = None if scaler_kwargs is None else xa.GradScaler(**scaler_kwargs)

    def clipper(self):
        torch.nn.utils.clip_grad_norm_(self.parameters, self.clip_value)

    def apply(self, loss, accumulate=False):
        if self.scaler is None:
            loss.backward(create_graph=False)
            gradients = xm._fetch_gradients(self.optimizer)
            xm.all_reduce("sum", gradients, scale=1.0 / xm.xrt_world_size())
            self.clipper()
            if not accumulate:
                xm.optimizer_step(self.optimizer)
                self.optimizer.zero_grad()
        else:
            self.scaler.scale(loss).backward(create_graph=False)
            xm.reduce_gradients(self.optimizer)
            self.scaler.unscale_(self.optimizer)
            self.clipper()
            if not accumulate:
                self.scaler.step(self.optimizer)
                self.optimizer.zero_grad()
            self.scaler.update()

    def after_step(self, after_step_fn, *args):
        xm.add_step_closure(after_step_fn, *args)


def main(index):
    env = DeviceEnvXla()
    assert env.local_rank == env.global_rank == index
    plain, scaled = (train(env, scales) for scales in (False, True))
    torch.testing.assert_close(plain, scaled)
    if env.global_rank == 0:
        tell(losses=scaled.tolist())


def train(env, scales):
    (model,) = env.to_device(net())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    kwargs = {"init_scale": 2.0**8, "growth_interval": 4} if scales else None
    updater = UpdaterXla(optimizer, 1e9, kwargs)
    losses = []

    def after_train_step(step, loss):
        losses.append(loss.item())
        assert len(losses) == step

    loader = pl.MpDeviceLoader(batches(env.global_rank, env.world_size), env.device)
    for epoch in range(2):
        for k, (x, y) in enumerate(loader, 1):
            with env.autocast():
                loss = torch.nn.functional.cross_entropy(model(x), y)
            updater.apply(loss)
            updater.after_step(after_train_step, (4 * epoch + k, loss))
    xm.mark_step()
    if scales:
        assert updater.scaler.get_scale() == 2.0**10  # grown twice
    with xa.autocast(env.device), torch.no_grad():
        assert model(x).dtype == torch.bfloat16
    return xm.mesh_reduce("losses", torch.tensor(losses), lambda found: sum(found) / len(found))


if __name__ == "__main__":
    xmp.spawn(main, nprocs=int(os.environ["NPROCS"]))
