"""Train a CNN to read handwritten digits in several processes, each on its part of every batch.

    python examples/mnist_processes.py                        two processes (--nprocs), made by spawn
    ltc-launch --nprocs 2 examples/mnist_processes.py         the same, made by the launcher
    ltc-launch --nprocs 2 examples/mnist_processes.py --checkpoints runs/digits     go on from the newest there
    torchrun --nproc-per-node 2 examples/mnist_processes.py

Beside a loop for one process there are the sampler, the loader, optimizer_step, the checkpoints and the reduced
accuracy.
"""

import argparse
import gzip
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import ltc_dist as ltd
import ltc_dist.multiprocessing as xmp

DATA = Path(__file__).parent / "data"


def digits(name: str) -> TensorDataset:
    """Images [N, 1, 8, 8] of mean 0 and deviation 1, and their labels."""
    images = gzip.decompress((DATA / f"{name}-images-idx3-ubyte.gz").read_bytes())
    labels = gzip.decompress((DATA / f"{name}-labels-idx1-ubyte.gz").read_bytes())
    height, width = (int.from_bytes(images[k : k + 4]) for k in (8, 12))
    x = torch.frombuffer(bytearray(images), dtype=torch.uint8, offset=16).view(-1, 1, height, width)
    y = torch.frombuffer(bytearray(labels), dtype=torch.uint8, offset=8)
    x = x.float()
    return TensorDataset((x - x.mean()) / x.std(), y.long())


def make_model() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 32, 3, padding=1), nn.ReLU(), nn.Conv2d(32, 64, 3, padding=1), nn.ReLU(),
        nn.MaxPool2d(2), nn.Flatten(), nn.LazyLinear(128), nn.ReLU(), nn.Linear(128, 10),
    )  # fmt: skip


def train(rank: int, args: argparse.Namespace) -> None:
    device = ltd.lazy_device()
    data, test = digits("train"), digits("t10k")
    sampler = DistributedSampler(data, ltd.world_size(), ltd.get_ordinal(), drop_last=True)
    batch_size = args.batch_size // ltd.world_size()
    loader = ltd.MpDeviceLoader(
        DataLoader(data, batch_size, sampler=sampler, drop_last=True), device
    )

    torch.manual_seed(args.seed)  # the same parameters in all processes
    model = make_model()
    model(data[:1][0])  # LazyLinear learns its size
    model.to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)
    step = first_epoch = 0
    saver = None
    if args.checkpoints:
        saver = ltd.Checkpointer(
            args.checkpoints, every=20, model=model, optimizer=optimizer, loader=loader
        )
        found = saver.restore()
        if found is not None:
            step, first_epoch = found.step, found.values["epoch"]
            ltd.master_print(f"going on after step {step}")
    for epoch in range(first_epoch, args.epochs):
        sampler.set_epoch(epoch)
        loss = torch.zeros(())
        for images, labels in loader:
            optimizer.zero_grad()
            loss = F.cross_entropy(model(images), labels)
            loss.backward()
            ltd.optimizer_step(optimizer)
            step += 1
            if saver is not None:
                saver.step(step, epoch=epoch)  # SIGTERM ends the job here, in all processes
        mean = ltd.mesh_reduce("loss", loss.detach(), lambda all: sum(map(float, all)) / len(all))
        ltd.master_print(f"epoch {epoch + 1}: loss {mean:.4f}")

    mine = range(ltd.get_ordinal(), len(test), ltd.world_size())
    images, labels = test[mine]
    with torch.no_grad():
        correct = int((model(images.to(device)).argmax(1).cpu() == labels).sum())
    percent = 100 * ltd.mesh_reduce("correct", correct, sum) / len(test)
    ltd.master_print(f"{ltd.world_size()} processes, test accuracy: {percent:.2f} %")
    ltd.save(model.state_dict(), args.save)
    if percent < args.accuracy_over:
        raise SystemExit(f"that is below {args.accuracy_over} %")


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Train a CNN in several processes.")
    parser.add_argument("--nprocs", type=int, default=2, help="processes that spawn makes")
    parser.add_argument("--epochs", type=int, default=8)
    parser.add_argument("--batch-size", type=int, default=64, help="of all processes together")
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument(
        "--checkpoints", type=Path, help="save every 20 steps here, and go on from there"
    )
    parser.add_argument(
        "--accuracy-over", type=float, default=0.0, help="fail if it is not reached"
    )
    parser.add_argument("--save", type=Path, default=Path("mnist_processes.pt"))
    return parser.parse_args()


if __name__ == "__main__":
    args = parse_args()
    xmp.spawn(train, args=(args,), nprocs=None if ltd.world_size() > 1 else args.nprocs)
