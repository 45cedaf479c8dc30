"""A loop as accelerate's guide has it: accumulation, clipping, metrics over all samples, a state that is resumed."""

import sys

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

directory, cpu = sys.argv[1], "--cpu" in sys.argv
set_seed(0)
accelerator = Accelerator(cpu=cpu, gradient_accumulation_steps=2)
x = torch.randn(50, 8)
y = x[:, :3].argmax(1)
model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 3))
optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, 20)
loader = DataLoader(TensorDataset(x, y), batch_size=8, shuffle=True)
model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)


def epoch() -> list[float]:
    losses = []
    for data, target in loader:
        with accelerator.accumulate(model):
            loss = nn.functional.cross_entropy(model(data), target)
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        losses.append(accelerator.gather(loss.detach().reshape(1)).mean().item())
    return losses


first = epoch()
accelerator.save_state(directory)
second = epoch()
accelerator.load_state(directory)
again = epoch()
seen = 0
with torch.no_grad():
    for data, target in loader:
        found = accelerator.gather_for_metrics((model(data).argmax(1), target))
        seen += len(found[0])
accelerator.wait_for_everyone()
accelerator.save_model(model, f"{directory}/model")
rounded = [[round(loss, 4) for loss in losses] for losses in (first, second, again)]
accelerator.print("result", accelerator.device.type, accelerator.num_processes, seen, *rounded)
if "--cpu" in sys.argv and torch.distributed.is_initialized():
    torch.distributed.destroy_process_group()  # else a thread of gloo may abort the process at exit
