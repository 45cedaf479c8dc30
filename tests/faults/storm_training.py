"""A training run that a storm can disturb: its result has no rounding in it, so it is the same however it was run.

    storm_training.py DIRECTORY --steps 100

Parameters, data and learning rate are multiples of 1/64 and small, so float32 holds every intermediate value exactly:
compiled code and single ops give the same bits. Dropout draws from a stream of each rank's own. At the end rank 0
prints a digest of the parameters and of the optimizer's state.
"""

import argparse
import hashlib
import os
import time
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, Dataset, DistributedSampler

import ltc_dist as ltd

ITEMS = 256


class Whole(Dataset[tuple[torch.Tensor, torch.Tensor]]):
    """Small whole numbers, and a linear function of them."""

    def __len__(self) -> int:
        return ITEMS

    def __getitem__(self, item: int) -> tuple[torch.Tensor, torch.Tensor]:
        x = torch.tensor([(item * k) % 7 - 3 for k in (1, 2, 3, 5)], dtype=torch.float32)
        return x, torch.stack([x[0] - x[1], x[2] + 1, x[3]])


class SignDescent(torch.optim.Optimizer):
    """Steps of 1/64 against the gradient's sign, and as much again with the sign of all steps so far."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 2.0**-6})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                if not self.state[p]:
                    self.state[p]["total"] = torch.zeros_like(p)
                total = self.state[p]["total"].add_(p.grad.sign())
                p.add_(p.grad.sign() + total.sign(), alpha=-group["lr"])


def digest(model: nn.Module, optimizer: SignDescent) -> str:
    found = hashlib.sha256()
    states = [state["total"] for state in optimizer.state.values()]
    for value in [*model.state_dict().values(), *states]:
        found.update(value.detach().cpu().numpy().tobytes())
    return found.hexdigest()[:16]


def train(args: argparse.Namespace) -> None:
    rank, size = ltd.get_ordinal(), ltd.world_size()
    device = ltd.lazy_device()
    torch.manual_seed(rank)
    model = nn.Linear(4, 3).to(device)
    with torch.no_grad():
        for p in model.parameters():
            p.zero_()
    optimizer = SignDescent(model.parameters())
    data = Whole()
    sampler = DistributedSampler(data, size, rank, seed=3, drop_last=True)
    cpu_loader = DataLoader(data, 4, sampler=sampler, num_workers=args.num_workers)
    loader = ltd.MpDeviceLoader(cpu_loader, device)
    saver = ltd.Checkpointer(
        args.directory, every=args.every, model=model, optimizer=optimizer, loader=loader
    )
    found = saver.restore()
    step, epoch = (found.step, found.values["epoch"]) if found is not None else (0, 0)
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    ltd.master_print(f"attempt {attempt} begins at step {step}", flush=True)
    while step < args.steps:
        sampler.set_epoch(epoch)
        for x, y in loader:
            optimizer.zero_grad()
            loss = (model(F.dropout(x)) - y).square().sum()
            loss.backward()
            ltd.optimizer_step(optimizer)
            step += 1
            time.sleep(args.pause_s)
            saver.step(step, epoch=epoch)
            if step == args.steps:
                break
        epoch += 1
    saver.close()
    ltd.master_print(f"final {digest(model, optimizer)}", flush=True)


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("directory")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--every", type=int, default=5)
    parser.add_argument("--num-workers", type=int, default=1)
    parser.add_argument("--pause-s", type=float, default=0.02)
    return parser.parse_args()


if __name__ == "__main__":
    train(parse_args())
