"""A script that shards its parameters with `fully_shard`, as PyTorch's tutorial does: DEVICE OPTION CHECKPOINT.

It names no backend. Rank 0 prints losses and norms, sums over the parameters and the optimizer's state, and whether a
checkpoint was read as it was written.
"""

import sys
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import distributed as dist
from torch import nn
from torch.distributed.checkpoint import state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

import ltc_dist  # noqa: F401 - registers the device

fsdp: Any = fully_shard
kind, option, directory = sys.argv[1:]
device = torch.device(kind)
dist.init_process_group()
rank = dist.get_rank()


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.attention = nn.MultiheadAttention(width, 2, batch_first=True)
        self.layers = nn.Sequential(nn.Linear(width, 24), nn.GELU(), nn.Linear(24, width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.norm(x)
        x = x + self.attention(h, h, h, need_weights=False)[0]
        return x + self.layers(x)


torch.manual_seed(0)
model: Any = nn.Sequential(Block(12), Block(12), nn.Linear(12, 1)).to(device)
options: dict[str, Any] = {}
if kind == "cpu":
    options["mesh"] = init_device_mesh("cpu", (dist.get_world_size(),))
if option == "mixed":
    options["mp_policy"] = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
for layer in list(model)[:2]:
    fsdp(layer, **options)
fsdp(model, **options)
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
pieces = 2 if option == "accumulated" else 1
for step in range(4):
    total = torch.zeros(1)
    for piece in range(pieces):
        seed = torch.Generator().manual_seed(100 * piece + 2 * step + rank)
        x = torch.randn(4, 5, 12, generator=seed).to(device)
        model.set_requires_gradient_sync(piece == pieces - 1)
        loss = model(x).clone().float().square().mean()
        loss.backward()
        total += loss.item()
    norm: Any = nn.utils.clip_grad_norm_(model.parameters(), 0.5)
    optimizer.step()
    optimizer.zero_grad()
    dist.all_reduce(total)  # a tensor of the processor
    norm = norm.full_tensor().item()
    if rank == 0:
        print(f"step {total.item():.4f} {norm:.3f}")


def size(states: list[Any]) -> str:
    tensors = [
        t.double() for state in states for t in state.values() if isinstance(t, torch.Tensor)
    ]
    return f"{sum(t.abs().sum().item() for t in tensors):.2f}"


whole = state_dict.StateDictOptions(full_state_dict=True, cpu_offload=True)
parameters = state_dict.get_model_state_dict(model, options=whole)
state = state_dict.get_optimizer_state_dict(model, optimizer, options=whole)
dcp.save({"model": model.state_dict()}, checkpoint_id=directory)
with torch.no_grad():
    for parameter in model.parameters():
        parameter.zero_()
saved = {"model": model.state_dict()}
dcp.load(saved, checkpoint_id=directory)
model.load_state_dict(saved["model"])
read = state_dict.get_model_state_dict(model, options=whole)
if rank == 0:
    print(size([parameters]), size(list(state["state"].values())))
    print("read", all(torch.equal(read[name], parameters[name]) for name in parameters))
    kept = sum(p.to_local().numel() for p in model.parameters())
    print("share", round(kept / sum(p.numel() for p in model.parameters()), 1))
    print("device", next(iter(model.parameters())).device.type)
dist.destroy_process_group()
