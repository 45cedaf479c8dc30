"""A training run that goes wrong as it is told to.

    training.py DIRECTORY --steps 12 --every 3 --fault kill9@1:5

A fault is KIND@RANK:STEP; it happens once, when that process has recorded that step. Of several, with commas between
them, the first happens in the first attempt of the job, the second in its second. At the end rank 0 prints a digest of
the parameters and their norm.
"""

import argparse
import ctypes
import faulthandler
import hashlib
import os
import signal
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, DistributedSampler

import ltc_dist as ltd
import ltc_dist.multiprocessing as xmp
from ltc_dist.checkpoint import commit


def lock_python() -> None:
    """Hold Python's lock, in a call that no signal interrupts: their handlers do not run."""
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM, signal.SIGINT])
    ctypes.PyDLL(None).sleep(1000)


def fail() -> None:
    raise LookupError("no such word")


def kill(number: int) -> Callable[[], None]:
    return lambda: os.kill(os.getpid(), number)


FAULTS: dict[str, Callable[[], Any]] = {
    "kill9": kill(signal.SIGKILL),
    "term": kill(signal.SIGTERM),
    "stop": kill(signal.SIGSTOP),
    "segv": faulthandler._sigsegv,
    "raise": fail,
    "exit7": lambda: sys.exit(7),
    "sleep": lambda: time.sleep(1000),
    "lock": lock_python,
    "none": lambda: None,
}


class Numbers(Dataset[tuple[torch.Tensor, torch.Tensor]]):
    """Number i and twice that; something happens from the item `bad` on."""

    def __init__(self, count: int, bad: str) -> None:
        self._count = count
        kind, _, item = bad.partition("@")
        self._kind, self._bad = kind, int(item or -1)

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, item: int) -> tuple[torch.Tensor, torch.Tensor]:
        if 0 <= self._bad <= item:
            FAULTS[self._kind]()
        x = torch.tensor([item / self._count, 1.0])
        return x, x * 2


def digest(model: nn.Module) -> str:
    found = hashlib.sha256()
    for value in model.state_dict().values():
        found.update(value.cpu().numpy().tobytes())
    return found.hexdigest()[:16]


def kill_at(site: str) -> None:
    """Be killed when the third checkpoint comes to a place in its commit."""
    real, count = getattr(commit, site), 0

    def killed(*args: Any) -> Any:
        nonlocal count
        count += 1
        if count == 3:
            os.kill(os.getpid(), signal.SIGKILL)
        return real(*args)

    setattr(commit, site, killed)


def train(rank: int, args: argparse.Namespace) -> None:
    size = ltd.world_size()
    faults = args.fault.split(",")
    attempt = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))
    kind, _, place = (faults[attempt] if attempt < len(faults) else "").partition("@")
    where, _, when = place.partition(":")
    mine = where == str(rank)
    if mine and kind == "commit":
        kill_at(when)

    device = ltd.lazy_device()
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(2, 8), nn.Tanh(), nn.Linear(8, 2)).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    data = Numbers(args.items, args.bad if rank == args.bad_rank else "")
    sampler = DistributedSampler(data, size, rank, seed=3, drop_last=True)
    workers = args.num_workers
    cpu_loader = DataLoader(data, args.batch_size // size, sampler=sampler, num_workers=workers)
    loader = cpu_loader if args.plain else ltd.MpDeviceLoader(cpu_loader, device)
    saver = None
    step = epoch = 0
    if args.directory:
        held = {
            "model": model,
            "optimizer": optimizer,
            **({} if args.plain else {"loader": loader}),
        }
        saver = ltd.Checkpointer(args.directory, every=args.every, **held)
        found = saver.restore()
        if found is not None:
            step, epoch = found.step, found.values["epoch"]
            ltd.master_print(f"resumed at {step}", flush=True)
    while step < args.steps:
        sampler.set_epoch(epoch)
        for x, y in loader:
            optimizer.zero_grad()
            loss = (model(x.to(device)) - y.to(device)).square().mean()
            loss.backward()
            ltd.optimizer_step(optimizer, barrier=args.plain)
            step += 1
            if mine and kind in FAULTS and when == str(step):
                print(f"fault at {step}", flush=True)
                FAULTS[kind]()
            if args.slow:
                time.sleep(args.slow)
                print(f"step {step}", flush=True)
            if saver is not None:
                more = {"ballast": torch.zeros(20000)} if args.fill else {}
                saver.step(step, epoch=epoch, **more)
            if step == args.steps or (mine and kind == "leave" and when == str(step)):
                break
        epoch += 1
        if mine and kind == "leave":
            return
    if saver is not None:
        saver.close()
    norm = sum(float(p.detach().square().sum()) for p in model.parameters())
    ltd.master_print(f"final {digest(model)} {norm:.9f}", flush=True)


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("directory", nargs="?", default="")
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--every", type=int, default=3)
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--fault", default="")
    parser.add_argument(
        "--bad",
        default="",
        help="KIND@ITEM: what happens when the dataset is asked for it, or for a later one",
    )
    parser.add_argument("--bad-rank", type=int, default=1)
    parser.add_argument("--items", type=int, default=48)
    parser.add_argument("--num-workers", type=int, default=0)
    parser.add_argument("--plain", action="store_true", help="no MpDeviceLoader")
    parser.add_argument("--slow", type=float, default=0.0)
    parser.add_argument("--fill", action="store_true", help="save 80 kB more")
    parser.add_argument("--spawn", type=int, default=0)
    return parser.parse_args()


if __name__ == "__main__":
    args = parse_args()
    if args.spawn:
        xmp.spawn(train, (args,), nprocs=args.spawn)
    else:
        train(ltd.get_ordinal(), args)
