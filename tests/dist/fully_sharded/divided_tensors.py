"""A script of DTensor, as it is written for GPUs: two processes, each with the device of its rank.

Draws random numbers, and trains a block of attention and an MLP with its heads, rows and columns divided. Each rank
prints that it is done.
"""

import os
import sys

import torch
from torch import distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import (
    DTensor,
    Replicate,
    Shard,
    distribute_tensor,
)
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

import ltc_dist  # noqa: F401 - registers the device

kind = sys.argv[1]
dist.init_process_group()
mesh = init_device_mesh(kind, (2,))
rank = dist.get_rank()
device = torch.device(kind)
if kind != "cpu" and torch.accelerator.device_count() > 1:
    assert torch.accelerator.current_device_index() == int(os.environ["LOCAL_RANK"])


def parts(t: DTensor) -> list[torch.Tensor]:
    own = t.to_local().cpu()
    found = [torch.empty_like(own) for _ in range(2)]
    dist.all_gather(found, own)
    return found


def draws() -> list[torch.Tensor]:
    """A divided and a whole tensor, and what comes after them."""
    torch.manual_seed(3)
    divided = distribute_tensor(torch.zeros(8, 4, device=device), mesh, [Shard(0)])
    whole = distribute_tensor(torch.zeros(8, 4, device=device), mesh, [Replicate()])
    nn.init.normal_(divided)
    nn.init.uniform_(whole)
    dropped = nn.functional.dropout(divided, 0.5)
    after = torch.rand(4, device=device)
    first, second = parts(divided)
    assert not torch.equal(first, second) and abs(float(torch.cat([first, second]).std()) - 1) < 0.5
    assert torch.equal(*parts(whole))
    return [*parts(divided), *parts(whole), *parts(dropped), after.cpu()]


if kind != "cpu":  # there PyTorch draws without an agreement
    for a, b in zip(draws(), draws(), strict=True):
        assert torch.equal(a, b)


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.query, self.key, self.value = (nn.Linear(width, width) for _ in range(3))
        self.out = nn.Linear(width, width)
        self.size = width // heads

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.norm(x)
        q, k, v = (
            layer(h).view(*h.shape[:2], -1, self.size).transpose(1, 2)
            for layer in (self.query, self.key, self.value)
        )
        mixed = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        found: torch.Tensor = self.out(mixed.transpose(1, 2).flatten(2))
        return found


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.block = Block(16, 4)
        self.up, self.down = nn.Linear(16, 32), nn.Linear(32, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.block(x)
        found: torch.Tensor = self.down(nn.functional.gelu(self.up(x)))
        return found


def train(is_divided: bool) -> list[float]:
    torch.manual_seed(0)
    model = Model()
    where = device if is_divided else torch.device("cpu")
    model.to(where)
    if is_divided:
        plan = {
            "block.query": ColwiseParallel(use_local_output=False),
            "block.key": ColwiseParallel(use_local_output=False),
            "block.value": ColwiseParallel(use_local_output=False),
            "block.out": RowwiseParallel(),
            "up": ColwiseParallel(),
            "down": RowwiseParallel(),
        }
        parallelize_module(model, mesh, plan)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, foreach=False)
    losses = []
    for step in range(3):
        seed = torch.Generator().manual_seed(step)
        x = torch.randn(2, 6, 16, generator=seed).to(where)
        loss = model(x).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


torch.testing.assert_close(train(True), train(False), rtol=1e-4, atol=1e-5)


def sequence() -> torch.Tensor:
    """Rows divided between layers: what a collective of the first layer has yet to bring goes into a product."""
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 6)).to(device)
    plan = {
        "0": ColwiseParallel(input_layouts=Shard(0)),
        "2": RowwiseParallel(output_layouts=Shard(0)),
    }
    parallelize_module(model, mesh, plan)
    rows = torch.linspace(-1, 1, 48).view(8, 6)
    return model(rows[4 * rank : 4 * rank + 4].to(device))


torch.manual_seed(1)
alone = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 6))
expected = alone(torch.linspace(-1, 1, 48).view(8, 6))[4 * rank : 4 * rank + 4]
torch.testing.assert_close(sequence().cpu(), expected, rtol=1e-4, atol=1e-5)
print(f"rank {rank} is done")
