"""What joined processes run in the tests: `python -m tests.jax.joined CASE COUNT PATH`."""

import gc
import os
import sys
import time
from pathlib import Path
from typing import Any

import jax
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import ltc_core as ltc
import ltc_dist as ltd
from ltc_core import metrics
from ltc_core.errors import CollectiveError
from ltc_core.executors.jax.collectives import Joint
from ltc_core.settings import settings
from ltc_dist.job.ranks import ranks

BATCHES = torch.randn(5, 8, 6, generator=torch.Generator().manual_seed(1))
COUNTERS = ("JointRun", "ProgramsDiffer", "PersistentCacheHit", "PersistentCacheMiss")


def counts() -> dict[str, int]:
    return {name: metrics.counter_value(name) or 0 for name in COUNTERS}


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3), nn.LayerNorm(3))


def step(net: nn.Module, optimizer: Any, batch: torch.Tensor) -> torch.Tensor:
    optimizer.zero_grad()
    loss = net(batch).sin().square().mean()
    loss.backward()
    return loss


def own(batch: torch.Tensor) -> torch.Tensor:
    size = len(batch) // ltd.world_size()
    return batch[ltd.get_ordinal() * size :][:size]


def train(path: str) -> Any:
    device = ltd.lazy_device()
    there = net().to(device)
    optimizer = torch.optim.AdamW(there.parameters(), lr=0.05)
    losses = []
    for k, batch in enumerate(BATCHES):
        optimizer.param_groups[0]["lr"] = 0.05 / (k + 1)
        losses.append(step(there, optimizer, own(batch).to(device)))
        ltd.optimizer_step(optimizer, barrier=True)
    ltd.broadcast_master_param(there)
    return [t.detach().cpu() for t in (*there.parameters(), *losses)]


def elsewhere(path: str) -> Any:
    """Rank 1 has no program on disk."""
    if ltd.get_ordinal() != 1:
        return train(path)
    with settings.override(compiled_cache_dir=f"{path}-cache"):
        return train(path)


def ops(path: str) -> Any:
    """Every collective with every kind of reduction, in one program for each dtype."""
    device, count = ltd.lazy_device(), ltd.world_size()
    found = {}
    for dtype in (
        torch.float32,
        torch.float64,
        torch.float16,
        torch.bfloat16,
        torch.int64,
        torch.uint8,
    ):
        base = torch.arange(24).reshape(4, 3, 2) % 5 + 1 + 2 * ltd.get_ordinal()
        x = base.to(dtype).to(device)
        kinds = ["sum", "mul", "min", "max"] + ["and", "or"] * (not dtype.is_floating_point)
        results = [ltd.all_reduce(kind, x) for kind in kinds]
        results += [ltd.all_reduce("sum", x, scale=1 / count), ltd.all_reduce("sum", x[0, 0, 0])]
        results += [ltd.all_gather(x, dim) for dim in (0, 2)]
        results += [ltd.reduce_scatter(kind, x, 0.5, 0, count) for kind in kinds[:3]]
        results.append(ltd.all_to_all(x, 0, 1, count))
        results.append(ltd.collective_permute(x, [(k, (k + 1) % count) for k in range(count)]))
        results.append(ltd.collective_permute(x, [(0, 1)]))
        for root in range(2):
            shown = [x + 1, x[0, 0, 0] * 2]
            ltd.collective_broadcast(shown, root)
            results += shown
        pair = [x * 2, x[1] + 1]
        ltd.all_reduce("sum", pair, scale=0.25)
        results += pair
        found[str(dtype)] = [t.cpu() for t in ltc.to_cpu(results)]
    flags = ltd.all_gather(torch.tensor([True, ltd.get_ordinal() > 0], device=device))
    found["bool"] = [flags.cpu()]
    return found


def unlike(path: str) -> Any:
    """Each process computes something else beside the same collective, and one of them cuts in between."""
    device, rank = ltd.lazy_device(), ltd.get_ordinal()
    found = []
    for k in range(3):
        x = torch.arange(8.0).to(device)[rank * 2 : rank * 2 + 2] + k
        y = ltd.all_reduce("sum", x * (rank + 1))
        if rank == 0:
            found.append((y * 2).cpu())
        else:
            found.append(y.cpu() * 2)
    for k in range(2):
        y = ltd.all_reduce("sum", torch.ones(2, device=device))
        if k == 0 and rank == 0:
            y.cpu()
        z = ltd.all_gather(y + rank)
        found.append(z.cpu())
    return [*found, ltc.metrics.summary()]


def others(path: str) -> Any:
    """Two processes are at different collectives."""
    x = torch.ones(4, device=ltd.lazy_device())
    ltd.all_reduce("sum", x).cpu()
    y = ltd.all_gather(x) if ltd.get_ordinal() else ltd.all_reduce("max", x * 2)
    return y.cpu()


def late(path: str) -> Any:
    """Another number of steps: rank 0 ends while the other waits for it."""
    x = torch.ones(4, device=ltd.lazy_device())
    for _ in range(3 + ltd.get_ordinal()):
        x = ltd.all_reduce("sum", x)
        ltc.mark_step()
    return x.cpu()


def absent(path: str) -> Any:
    """One process waits for the other before it makes its device."""
    if ltd.get_ordinal() == 0:
        torch.ones(2, device=ltd.lazy_device()).cpu()
    ltd.rendezvous("made")
    y = ltd.all_reduce("sum", torch.ones(4, device=ltd.lazy_device())).cpu()
    return [y, ltc.metrics.summary()]


def groups(path: str) -> Any:
    """Groups of some processes, and all of them, in one graph."""
    x = torch.ones(4, device=ltd.lazy_device()) * (ltd.get_ordinal() + 1)
    half = ltd.all_reduce("sum", x, groups=[[0, 1], [2, 3]])
    return [half.cpu(), ltd.all_reduce("sum", half * 2).cpu()]


def workers(path: str) -> Any:
    """A loader forks its workers after the processes are joined."""
    device = ltd.lazy_device()
    total = torch.zeros((), device=device)
    for (x,) in DataLoader(TensorDataset(torch.arange(8.0)), batch_size=4, num_workers=2):
        total = ltd.all_reduce("sum", total + x.to(device).sum())
    return total.cpu()


def repeat(path: str) -> Any:
    """Results that nothing needs any more are freed."""
    x = torch.ones(100, device=ltd.lazy_device())
    kept = []
    for _ in range(30):
        x = ltd.all_reduce("sum", x * 0.5)
        ltc.mark_step(wait=True)
        gc.collect()
        kept.append(len(jax.live_arrays()))
    return kept


def outlive(path: str) -> Any:
    """Rank 0 ends early; JAX's coordinator was there."""
    x = ltd.all_reduce("sum", torch.ones(4, device=ltd.lazy_device()))
    ltc.mark_step(wait=True)
    if ltd.get_ordinal():
        while not Path(f"{path}.0").exists():
            time.sleep(0.1)
        time.sleep(3)
    return (x * 2).cpu()


def killed(path: str) -> Any:
    """A process ends after all have agreed to run a program."""
    x = ltd.all_reduce("sum", torch.ones(4, device=ltd.lazy_device()))
    ltc.mark_step(wait=True)
    agree = Joint.agree

    def end(joint: Joint) -> Any:
        found = agree(joint)
        if ltd.get_ordinal():
            os._exit(3)
        time.sleep(1)
        return found

    Joint.agree = end  # type: ignore[method-assign]
    y = ltd.all_reduce("sum", x.mul_(2))
    try:
        y.cpu()
    except CollectiveError as error:
        return [str(error)]


def run(rank: int, case: str, path: str) -> None:
    found = globals()[case](path)
    torch.save((found, counts()), f"{path}.{ranks().rank}")


if __name__ == "__main__":
    if len(sys.argv) == 4:
        ltd.spawn(run, args=(sys.argv[1], sys.argv[3]), nprocs=int(sys.argv[2]))
    else:  # by ltc-launch
        run(0, sys.argv[1], sys.argv[2])
