"""A trainer in the style of fairseq: a step boundary after each micro-batch, gradients reduced by hand in groups,
statistics by mesh_reduce, compiles counted.
"""

import os

import numpy as np
import torch
import torch_xla.core.xla_model as xm
import torch_xla.debug.metrics as met
import torch_xla.distributed.parallel_loader as pl
import torch_xla.distributed.xla_multiprocessing as xmp
from samples import batches, net, tell


def get_rank(group):
    return xm.get_ordinal() if group[1] is None else my_group(group).index(xm.get_ordinal())


def my_group(group):
    return next(ranks for ranks in group[1] if xm.get_ordinal() in ranks)


def all_reduce(tensor, group, op="sum"):
    return xm.all_reduce(op, [tensor], groups=group[1])[0]


def broadcast(tensor, src, group):
    if get_rank(group) != src:
        tensor.zero_()
    all_reduce(tensor, group)


def all_gather(tensor, group):
    result = xm.all_gather(tensor, groups=group[1])
    return list(result.view(-1, *tensor.size()).unbind(0))


def data_loader(itr):
    xm.rendezvous("tpu_data_loader")
    xm.mark_step()
    device = xm.xla_device()
    return pl.ParallelLoader(itr, [device]).per_device_loader(device)


class Trainer:
    def __init__(self, model):
        self.device = xm.xla_device()
        self.group = ("tpu", None)
        self.model = model.to(self.device)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        self._num_compiles = 0
        self.compiled = []

    def load_checkpoint(self, path):
        exists = os.path.exists(path)
        xm.rendezvous("load_checkpoint")
        return exists

    def train_step(self, samples):
        self.model.train()
        self.optimizer.zero_grad()
        outputs, sample_size = [], 0
        for x, y in samples:
            loss = torch.nn.functional.cross_entropy(self.model(x), y, reduction="sum")
            loss.backward()
            outputs.append({"loss": loss.detach(), "sample_size": len(y)})
            sample_size += len(y)
            xm.mark_step()  # each micro-batch is a graph
        total = torch.tensor(float(sample_size), device=self.device)
        all_reduce(total, self.group)
        gradients = [p.grad for p in self.model.parameters() if p.grad is not None]
        xm.all_reduce("sum", gradients, groups=self.group[1])
        for gradient in gradients:
            gradient.div_(total)
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1e9)
        self.optimizer.step()
        xm.mark_step()
        outputs = self.to_cpu({"norm": norm, "outputs": outputs})["outputs"]
        self.check_compilation()
        pairs = [(o["loss"].item(), o["sample_size"]) for o in outputs]
        pairs = xm.mesh_reduce("outputs", np.array(pairs), np.concatenate)
        return pairs[:, 0].sum() / pairs[:, 1].sum()

    def to_cpu(self, value):
        xm.mark_step()
        if isinstance(value, dict):
            return {k: self.to_cpu(v) for k, v in value.items()}
        if isinstance(value, list):
            return [self.to_cpu(v) for v in value]
        return value.to("cpu") if isinstance(value, torch.Tensor) else value

    def check_compilation(self):
        compiled = met.metric_data("CompileTime")[0]
        self.compiled.append(compiled - self._num_compiles)
        self._num_compiles = compiled

    def check_groups(self):
        rank, size = xm.get_ordinal(), xm.xrt_world_size()
        pairs = ("tpu", [[r] for r in range(size)])
        assert get_rank(self.group) == rank and get_rank(pairs) == 0
        value = torch.full((2,), rank + 1.0, device=self.device)
        assert all_reduce(value.clone(), pairs).tolist() == value.tolist()
        assert [v.tolist() for v in all_gather(value, self.group)] == [
            [r + 1.0] * 2 for r in range(size)
        ]
        broadcast(value, 0, self.group)
        assert value.tolist() == [1.0, 1.0]
        numbers = torch.arange(size, device=self.device) + 10 * rank
        swapped = xm.all_to_all(
            numbers, split_dimension=0, concat_dimension=0, split_count=size, groups=self.group[1]
        )
        assert swapped.tolist() == [10 * r + rank for r in range(size)]


def main(cfg):
    trainer = Trainer(net())
    assert not trainer.load_checkpoint(cfg["path"])
    trainer.check_groups()
    losses = []
    for _ in range(2):
        micro = [
            (x[k::2], y[k::2])
            for x, y in batches(xm.get_ordinal(), xm.xrt_world_size())
            for k in (0, 1)
        ]
        iterator = iter(data_loader(micro))
        losses += [trainer.train_step(pair) for pair in zip(iterator, iterator, strict=True)]
    xm.save(trainer.model.state_dict(), cfg["path"])
    assert trainer.load_checkpoint(cfg["path"])
    assert xm.get_memory_info(trainer.device)["kb_total"] > 0
    assert not any(trainer.compiled[-2:]), trainer.compiled
    if xm.is_master_ordinal(local=False):
        tell(losses=losses)
    xm.master_print("done")


def distributed_main(i, main, cfg, kwargs):
    assert i == xm.get_local_ordinal() == xm.get_ordinal()
    xm.rendezvous("distributed_init")
    main(cfg, **kwargs)


if __name__ == "__main__":
    cfg = {"path": "checkpoint_last.pt"}
    args = (main, cfg, {})
    xmp.spawn(fn=distributed_main, args=args, nprocs=min(int(os.environ["NPROCS"]), 8))
