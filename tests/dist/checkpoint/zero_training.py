"""A training run with a ZeroRedundancyOptimizer, by any number of processes that divides a batch of 12.

    zero_training.py DIRECTORY --steps 4 --precise
    zero_training.py DIRECTORY --steps 4 --divided rows

The latter divides the parameters, too, with a FullyShardedDataParallel.

It goes on from the newest checkpoint in DIRECTORY, and saves after its last step. Rank 0 prints the losses of the whole
batch. No number of processes but 1 divides the sizes of all parameters; one parameter is smaller than four processes
are many, and one has no gradient.
"""

import argparse
from typing import Any

import torch
from torch import nn

import ltc_dist as ltd

BATCH_SIZE = 12


def net() -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 1))
    model.register_parameter("unused", nn.Parameter(torch.ones(7)))
    return model


def batch(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    x = torch.arange(3.0 * BATCH_SIZE).view(BATCH_SIZE, 3) / 18 - step / 8
    return x, x.sum(1, keepdim=True).sin()


def groups(model: nn.Module) -> list[dict[str, Any]]:
    weights = [(n, p) for n, p in model.named_parameters() if p.dim() > 1]
    rest = [(n, p) for n, p in model.named_parameters() if p.dim() < 2]
    return [{"params": weights}, {"params": rest, "lr": 0.02, "weight_decay": 0.0}]


def divided(how: str) -> tuple[Any, torch.optim.Optimizer]:
    """A model whose first layer is a unit of its own, and its optimizer."""
    inner: Any = net()
    options: dict[str, Any] = {
        "rows": {"shard_param_on_dim_0": True},
        "each": {"compute_dtype": torch.float32},
    }[how]
    inner[0] = ltd.FullyShardedDataParallel(inner[0])
    model = ltd.FullyShardedDataParallel(inner, **options)
    shards = model.get_original_names_and_sharded_parameters()
    weights = [(n, p) for n, p in shards if n.endswith("weight")]
    rest = [(n, p) for n, p in shards if not n.endswith("weight")]
    rows = [{"params": weights}, {"params": rest, "lr": 0.02, "weight_decay": 0.0}]
    return model, torch.optim.AdamW(rows, lr=0.05, weight_decay=0.1)


def undivided(is_precise: bool) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = net().to(ltd.lazy_device())
    precise: dict[str, Any] = {"optimizer_dtype": torch.float64, "save_master_weights": True}
    optimizer = ltd.ZeroRedundancyOptimizer(
        groups(model),
        torch.optim.AdamW,
        lr=0.05,
        weight_decay=0.1,
        max_norm=0.5,
        **(precise if is_precise else {}),
    )
    return model, optimizer


def train(directory: str, steps: int, is_precise: bool, how: str | None) -> list[float]:
    """Train up to a step, and return the losses."""
    device, rank, size = ltd.lazy_device(), ltd.get_ordinal(), ltd.world_size()
    model, optimizer = divided(how) if how else undivided(is_precise)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.5)
    losses = []
    held: dict[str, Any] = {"model": model, "optimizer": optimizer, "schedule": schedule}
    with ltd.Checkpointer(directory, **held) as checkpointer:
        found = checkpointer.restore()
        step = found.step if found else 0
        while step < steps:
            x, y = (t[rank::size].to(device) for t in batch(step))
            optimizer.zero_grad()
            loss = nn.functional.mse_loss(model(x), y)
            loss.backward()
            if how:
                model.clip_grad_norm_(0.5)  # type: ignore[operator]
            optimizer.step()
            schedule.step()
            losses.append(loss.detach())
            step += 1
        checkpointer.save(step)
    mean = ltd.mesh_reduce("losses", torch.stack(losses), lambda all: sum(all) / len(all))
    return [float(v) for v in mean]


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("directory")
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--precise", action="store_true")
    parser.add_argument("--divided", choices=("each", "rows"))
    args = parser.parse_args()
    losses = train(args.directory, args.steps, args.precise, args.divided)
    ltd.master_print("losses", *map(repr, losses), flush=True)
