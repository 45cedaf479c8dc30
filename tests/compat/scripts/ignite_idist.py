"""A computation model in the style of ignite's: ranks and collectives through lists of one tensor, strings as numbers,
an optimizer and a loader that wrap.
"""

import os

import torch
import torch_xla
import torch_xla.core.xla_model as xm
import torch_xla.distributed.parallel_loader as pl
import torch_xla.distributed.xla_multiprocessing as xmp
from samples import batches, net, tell


class Model:
    names = {"SUM": "sum", "PRODUCT": "mul", "MIN": "min", "MAX": "max", "AND": "and", "OR": "or"}

    def __init__(self):
        xm.rendezvous("init")
        self.rank, self.size = xm.get_ordinal(), xm.xrt_world_size()
        local = torch.tensor([xm.get_local_ordinal() + 1.0], dtype=torch.float).to(self.device())
        xm.all_reduce("max", [local])
        self.nproc_per_node = int(local.item())

    def device(self):
        return torch.device(torch_xla._XLAC._xla_get_default_device())

    def all_reduce(self, value, op="SUM", group=None):
        is_number = not isinstance(value, torch.Tensor)
        tensor = (
            torch.tensor(value, device=self.device(), dtype=torch.float) if is_number else value
        )
        xm.all_reduce(self.names[op], [tensor], groups=group)
        return tensor.item() if is_number else tensor

    def all_gather(self, value):
        if isinstance(value, str):
            return self._all_gather_text(value)
        is_number = not isinstance(value, torch.Tensor)
        tensor = torch.tensor(value, device=self.device()) if is_number else value
        output = torch.zeros((self.size, *tensor.shape), dtype=tensor.dtype, device=tensor.device)
        output[self.rank % self.size] = tensor
        xm.all_reduce("sum", [output])
        output = output.reshape(-1, *output.shape[2:])
        return output.tolist() if is_number else output

    def _all_gather_text(self, text):
        width = int(self.all_reduce(len(text), "MAX"))
        row = torch.zeros(width + 1, device=self.device(), dtype=torch.long)
        row[: len(text)] = torch.tensor(bytearray(text, "utf-8")).to(self.device())
        row[-1] = len(text)
        rows = self.all_gather(row.unsqueeze(0)).cpu()
        rows = rows.reshape(self.size, width + 1)
        return [bytearray(r[: r[-1]].tolist()).decode("utf-8") for r in rows]

    def broadcast(self, tensor, src):
        if src != self.rank:
            tensor.fill_(0.0)
        xm.all_reduce("sum", [tensor])
        return tensor

    def barrier(self):
        xm.rendezvous(tag="barrier")

    @staticmethod
    def task(local_rank, fn, args, kwargs_dict):
        fn(local_rank, Model(), *args, **kwargs_dict)


class Optimizer(torch.optim.Optimizer):
    """Another optimizer, whose step is xm's."""

    def __init__(self, wrapped):
        super().__init__(wrapped.param_groups, wrapped.defaults)
        self.wrapped = wrapped

    def step(self, closure=None):
        xm.optimizer_step(self.wrapped, barrier=True)


class Loader:
    """A ParallelLoader for each epoch."""

    def __init__(self, loader, device):
        self._loader, self._device = loader, device

    def __iter__(self):
        return pl.ParallelLoader(self._loader, [self._device]).per_device_loader(self._device)

    def __len__(self):
        return len(self._loader)


def training(local_rank, idist, epochs, lr):
    size, rank = idist.size, idist.rank
    assert idist.nproc_per_node == size and str(idist.device()) == "xla:0"
    assert idist.all_gather(10 * rank) == [10 * r for r in range(size)]
    assert idist.all_gather(f"rank {'x' * rank}") == [f"rank {'x' * r}" for r in range(size)]
    rows = idist.all_gather(torch.full((2, 3), float(rank), device=idist.device()))
    assert rows.shape == (2 * size, 3) and rows[-1, 0].item() == size - 1
    assert idist.all_reduce(rank, "MAX") == size - 1 and idist.all_reduce(rank + 2.0, "MIN") == 2
    assert idist.all_reduce(2.0, "PRODUCT", group=[list(range(size))]) == 2**size
    flag = torch.tensor([rank > 0, True], device=idist.device()).long()
    assert idist.all_reduce(flag, "AND").tolist() == [0, 1]
    value = idist.broadcast(torch.full((2,), rank + 5.0, device=idist.device()), src=size - 1)
    assert value.tolist() == [size + 4.0] * 2
    idist.barrier()

    model = net().to(idist.device())
    optimizer = Optimizer(torch.optim.SGD(model.parameters(), lr=lr))
    loader = Loader(batches(rank, size), idist.device())
    losses = []
    for _ in range(epochs):
        assert len(loader) == 4
        for x, y in loader:
            optimizer.zero_grad()
            loss = torch.nn.functional.cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()
            losses.append(idist.all_reduce(loss.item()) / size)
    if rank == 0:
        tell(losses=losses)


if __name__ == "__main__":
    kwargs = {"start_method": "fork"}
    job = (training, (2,), {"lr": 0.1})
    xmp.spawn(Model.task, args=job, nprocs=int(os.environ["NPROCS"]), **kwargs)
