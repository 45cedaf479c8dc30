"""Wrappers in the style of accelerate: an optimizer, a loader that is a kind of MpDeviceLoader, gather and broadcast by
mesh_reduce, and a notebook's launcher.
"""

import os

import torch
import torch_xla.core.xla_model as xm
import torch_xla.distributed.parallel_loader as xpl
import torch_xla.distributed.xla_multiprocessing as xmp
from samples import Samples, net, tell
from torch.utils.data import DataLoader, DistributedSampler


class AcceleratedOptimizer(torch.optim.Optimizer):
    """Moves the state by a call whose result it does not look at."""

    def __init__(self, optimizer, device, reduces_itself):
        self.optimizer, self.reduces_itself = optimizer, reduces_itself
        state = optimizer.state_dict()
        xm.send_cpu_data_to_device(state, device)
        optimizer.load_state_dict(state)

    @property
    def param_groups(self):
        return self.optimizer.param_groups

    def zero_grad(self, set_to_none=None):
        self.optimizer.zero_grad()

    def step(self, closure=None):
        if self.reduces_itself:  # later versions
            gradients = xm._fetch_gradients(self.optimizer)
            xm.all_reduce("sum", gradients, scale=1.0 / xm.xrt_world_size())
            self.optimizer.step(closure)
        else:
            args = {"closure": closure} if closure is not None else {}
            xm.optimizer_step(self.optimizer, optimizer_args=args)


class DataLoaderShard(DataLoader):
    rng_types = ("torch", "xla")
    total_batch_size = 16


class MpDeviceLoaderWrapper(xpl.MpDeviceLoader):
    def __init__(self, dataloader, device):
        super().__init__(dataloader, device)
        self._rng_types = self._loader.rng_types
        self._loader.rng_types = None
        self.device = device

    def __iter__(self):
        for kind in self._rng_types:
            synchronize_rng_state(kind)
        return super().__iter__()

    @property
    def total_batch_size(self):
        return self._loader.total_batch_size


def synchronize_rng_state(kind):
    """Rank 0's state for all."""
    state = torch.get_rng_state() if kind == "torch" else torch.tensor(xm.get_rng_state())
    state = xm.mesh_reduce("random_seed", state, lambda found: found[0])
    if kind == "torch":
        torch.set_rng_state(state)
    else:
        xm.set_rng_state(state.item())


def gather(tensor):
    tensor = tensor.clone()[None] if tensor.ndim == 0 else tensor
    result = xm.all_gather(tensor if tensor.is_contiguous() else tensor.contiguous())
    xm.mark_step()
    return result


def broadcast(tensor, src=0, name="broadcast tensor"):
    return xm.mesh_reduce(name, tensor, lambda found: found[src])


class PrepareForLaunch:
    def __init__(self, function):
        self.function = function

    def __call__(self, index, *args):
        self.function(*args)


def notebook_launcher(function, args, num_processes):
    xmp.spawn(PrepareForLaunch(function), args=args, nprocs=num_processes, start_method="fork")


def training_function(config):
    device, size, rank = xm.xla_device(), xm.xrt_world_size(), xm.get_ordinal()
    model = net().to(device)
    xm.set_rng_state(7 + rank)
    optimizer = torch.optim.SGD(model.parameters(), lr=config["lr"])
    optimizer = AcceleratedOptimizer(optimizer, device, config["reduces_itself"])
    sampler = DistributedSampler(Samples(), num_replicas=size, rank=rank, shuffle=False)
    loader = DataLoaderShard(Samples(), sampler=sampler, batch_size=16 // size)
    loader = MpDeviceLoaderWrapper(loader, device)
    assert loader.total_batch_size == 16 and loader.sampler is sampler and len(loader) == 4
    losses = []
    for _ in range(2):
        for x, y in loader:
            loss = torch.nn.functional.cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(gather(loss.detach()).mean())
    assert xm.get_rng_state() == 7 and isinstance(xm.get_rng_state(), int)
    assert broadcast(torch.tensor([rank + 1], device=device), size - 1).tolist() == [size]
    assert broadcast({"numbers": [rank]}) == {"numbers": [0]}
    xm.rendezvous("accelerate.utils.wait_for_everyone")
    xm.save(model.state_dict(), "pytorch_model.bin")
    return [loss.item() for loss in losses]


def both(config):
    by_xm, by_itself = (training_function({**config, "reduces_itself": k}) for k in (False, True))
    assert torch.allclose(torch.tensor(by_xm), torch.tensor(by_itself))
    xm.master_print("both are the same")
    if xm.is_master_ordinal():
        tell(losses=by_itself)


if __name__ == "__main__":
    notebook_launcher(both, ({"lr": 0.1},), int(os.environ["NPROCS"]))
