"""A loop of Fabric's guide: a schedule, clipping, accumulation, a state that is loaded, evaluation by all processes."""

import logging
import os
import sys
import warnings

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

if "--standalone" in sys.argv:
    from lightning_fabric import Fabric
else:
    from lightning.fabric import Fabric

warnings.filterwarnings("ignore")
logging.getLogger("lightning.fabric").setLevel(logging.ERROR)
directory = sys.argv[1]
choice = {"accelerator": "cpu"} if "--cpu" in sys.argv else {}
devices = int(os.environ.get("DEVICES", os.environ.get("LOCAL_WORLD_SIZE", "1")))


def data(count: int) -> DataLoader[tuple[torch.Tensor, ...]]:
    x = torch.randn(count, 8, generator=torch.Generator().manual_seed(1))
    return DataLoader(TensorDataset(x, x[:, :3].argmax(1)), batch_size=8, shuffle=count > 40)


def train_epoch() -> float:
    model.train()
    total = torch.zeros((), device=fabric.device)
    for number, (x, y) in enumerate(training):
        is_last = number % 2 == 1
        with fabric.no_backward_sync(model, enabled=not is_last):
            loss = nn.functional.cross_entropy(model(x), y)
            fabric.backward(loss / 2)
        total += loss.detach()
        if is_last:
            fabric.clip_gradients(model, optimizer, max_norm=0.5)
            optimizer.step()
            optimizer.zero_grad()
            scheduler.step()
    return round(fabric.all_reduce(total / len(training)).item(), 4)


@torch.no_grad()
def evaluate() -> list[float]:
    """The loss and the accuracy, with the means that BatchNorm has gathered."""
    model.eval()
    found = torch.zeros(2, device=fabric.device)
    for x, y in validation:
        logits = model(x)
        found[0] += nn.functional.cross_entropy(logits, y)
        found[1] += (logits.argmax(1) == y).float().mean()
    return [round(value, 4) for value in fabric.all_reduce(found / len(validation)).tolist()]


fabric = Fabric(devices=devices, **choice)  # type: ignore[arg-type]
fabric.launch()
fabric.seed_everything(fabric.global_rank)  # setup gives all processes the parameters of the first
model = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 3))
optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, 20)
model, optimizer = fabric.setup(model, optimizer)
fabric.seed_everything(0)
training, validation = fabric.setup_dataloaders(data(64), data(40))

first = train_epoch()
state = {"model": model, "optimizer": optimizer, "scheduler": scheduler, "epoch": 1}
fabric.save(f"{directory}/state.ckpt", state)
fabric.barrier()
ahead = [train_epoch(), *evaluate()]
state["epoch"] = 7
fabric.load(f"{directory}/state.ckpt", state)
again = [train_epoch(), *evaluate()]
name = fabric.broadcast(f"of {fabric.global_rank}")
gathered = fabric.all_gather(torch.tensor([fabric.global_rank], device=fabric.device))
rest = [state["epoch"], name, sum(gathered.flatten().tolist())]
fabric.print("result", fabric.device.type, fabric.world_size, first, ahead, again, *rest)
if "--cpu" in sys.argv and torch.distributed.is_initialized():
    torch.distributed.destroy_process_group()  # else a thread of gloo may abort the process at exit
