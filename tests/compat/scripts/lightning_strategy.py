"""A strategy, a launcher and an environment in the style of Lightning's for XLA."""

import copy
import io
import os
import time

import torch
import torch.multiprocessing as mp
import torch_xla.core.functions as xf
import torch_xla.core.xla_model as xm
import torch_xla.distributed.parallel_loader as pl
import torch_xla.distributed.xla_multiprocessing as xmp
from samples import Samples, net, tell
from torch.utils.data import DataLoader, DistributedSampler
from torch_xla.experimental import pjrt


class Launcher:
    """Forks; rank 0 puts what the function returns into a queue."""

    def __init__(self, strategy, num_processes):
        self.strategy, self.num_processes = strategy, num_processes

    def launch(self, function, *args):
        queue = mp.get_context("fork").SimpleQueue()
        context = xmp.spawn(
            self._wrapping_function,
            args=(function, args, queue),
            nprocs=self.num_processes,
            start_method="fork",
            join=False,
        )
        while not context.join():
            pass
        assert len(context.processes) == self.num_processes
        return queue.get()

    def _wrapping_function(self, process_idx, function, args, queue):
        if len(xm.get_xla_supported_devices()) > 1:
            function, args = copy.deepcopy((function, args))
        self.strategy.setup_environment(process_idx)
        results = function(*args)
        if self.strategy.local_rank == 0:
            queue.put(results)
        xm.rendezvous("end-process")
        if self.strategy.local_rank == 0:
            time.sleep(0.1)


class Strategy:
    """What the trainer asks for: where models, loaders and values go."""

    def setup_environment(self, process_idx):
        assert process_idx == xm.get_ordinal() == pjrt.global_ordinal()
        assert pjrt.using_pjrt() and pjrt.world_size() == xm.xrt_world_size()
        self.root_device = xm.xla_device()
        self.local_rank, self.world_size = xm.get_local_ordinal(), xm.xrt_world_size()

    def setup(self, model):
        torch.manual_seed(self.local_rank)  # ranks begin apart: rank 0's is everybody's
        model.to(self.root_device)
        if self.local_rank:
            torch.nn.init.zeros_(model[0].weight)
        pjrt.broadcast_master_param(model)

    def process_dataloader(self, loader):
        if isinstance(loader, pl.MpDeviceLoader):
            return loader
        wrapped = pl.MpDeviceLoader(loader, self.root_device)
        wrapped.dataset = wrapped._loader.dataset  # later versions of Lightning set them
        wrapped.batch_sampler = getattr(wrapped._loader, "batch_sampler", None)
        return wrapped

    def optimizer_step(self, optimizer, closure):
        def reduced():
            result = closure()
            xm.reduce_gradients(optimizer)
            return result

        result = optimizer.step(closure=reduced)
        xm.mark_step()
        return result

    def barrier(self, name=None):
        xm.rendezvous("" if name is None else name)

    def broadcast(self, obj, src=0):
        """Anything that pickles, through a tensor of floats."""
        is_tensor = isinstance(obj, torch.Tensor)
        if is_tensor:
            original = obj.device
            obj = (obj.unsqueeze(0) if obj.dim() == 0 else obj).to(self.root_device)
        else:
            buffer = io.BytesIO()
            torch.save(obj, buffer)
            bytes_ = bytearray(buffer.getbuffer())
            obj = torch.tensor(bytes_, device=self.root_device, dtype=torch.float)
        obj = [obj]
        xm.collective_broadcast(obj, root_ordinal=src)
        obj = obj[0]
        if is_tensor:
            return obj.to(original)
        return torch.load(io.BytesIO(obj.cpu().byte().numpy()))

    def reduce(self, output, reduce_op="mean"):
        if not isinstance(output, torch.Tensor):
            output = torch.tensor(output, device=self.root_device)
        output = xm.mesh_reduce("reduce", output, sum)
        return output / self.world_size if reduce_op == "mean" else output

    def all_gather(self, tensor, sync_grads=False):
        tensor = tensor.unsqueeze(0) if tensor.dim() == 0 else tensor
        original = tensor.device
        tensor = tensor.to(self.root_device)
        tensor = xf.all_gather(tensor) if sync_grads else xm.all_gather(tensor)
        return tensor.to(original)


def fit(strategy, model):
    rank, size = strategy.local_rank, strategy.world_size
    strategy.setup(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    sampler = DistributedSampler(Samples(), num_replicas=size, rank=rank, shuffle=False)
    loader = DataLoader(Samples(), sampler=sampler, batch_size=16 // size)
    loader = strategy.process_dataloader(strategy.process_dataloader(loader))
    assert len(loader.dataset) == 64 and loader.batch_sampler.batch_size == 16 // size
    losses = []
    for _ in range(2):
        for x, y in loader:

            def closure(x=x, y=y):
                optimizer.zero_grad()
                loss = torch.nn.functional.cross_entropy(model(x), y)
                loss.backward()
                return loss.detach()

            losses.append(strategy.optimizer_step(optimizer, closure))
    strategy.barrier()
    ranks = pjrt.rendezvous("ranks", bytes([rank]), None)
    assert ranks == pjrt.rendezvous("ranks", bytes([rank]), ordinals=range(size))
    assert b"".join(ranks) == bytes(range(size))
    mean = strategy.reduce(torch.stack(losses))
    path = strategy.broadcast(f"version_{rank}")
    assert path == "version_0"
    assert strategy.broadcast(torch.tensor(float(rank)), src=size - 1).tolist() == [size - 1]
    assert strategy.all_gather(torch.tensor(rank)).tolist() == list(range(size))
    assert strategy.reduce(1.0 + rank, "sum") == size * (size + 1) / 2
    w = torch.ones(2, device=strategy.root_device, requires_grad=True)
    rows = strategy.all_gather(w * (rank + 1), sync_grads=True)
    (rows * torch.arange(2 * size, device=rows.device)).sum().backward()
    assert w.grad.tolist() == [(rank + 1) * 2 * rank, (rank + 1) * (2 * rank + 1)]
    if rank == 0:  # the checkpoint, by the global master alone
        xm.save({"state_dict": model.state_dict(), "epoch": 1}, f"{path}.ckpt")
    strategy.barrier("saved")
    state = torch.load(f"{path}.ckpt")["state_dict"]
    assert all(torch.equal(v.cpu(), state[k]) for k, v in model.state_dict().items())
    return mean.tolist()


if __name__ == "__main__":
    strategy = Strategy()
    launcher = Launcher(strategy, int(os.environ["NPROCS"]))
    losses = launcher.launch(fit, strategy, net())
    tell(losses=losses)
