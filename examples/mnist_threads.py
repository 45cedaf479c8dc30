"""Train a CNN to read handwritten digits on several devices of one process, each in a thread of its own.

    LTC_NUM_DEVICES=2 python examples/mnist_threads.py

Beside a loop for one device there are DataParallel, the loop as a function, and optimizer_step.
"""

import argparse
import gzip
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import ltc_dist as ltd
import ltc_dist.data_parallel as dp

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
    torch.manual_seed(1)  # the same parameters on all devices
    return nn.Sequential(
        nn.Conv2d(1, 32, 3, padding=1), nn.ReLU(), nn.Conv2d(32, 64, 3, padding=1), nn.ReLU(),
        nn.MaxPool2d(2), nn.Flatten(), nn.Linear(1024, 128), nn.ReLU(), nn.Linear(128, 10),
    )  # fmt: skip


def train(model: nn.Module, loader: Any, device: torch.device, context: dp.Context) -> float:
    """One epoch on one device; gives the loss of the last batch."""
    optimizer = context.getattr_or(
        "optimizer", lambda: torch.optim.AdamW(model.parameters(), lr=1e-3)
    )
    loss = torch.zeros(())
    for images, labels in loader:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(images), labels)
        loss.backward()
        ltd.optimizer_step(optimizer)  # the mean of the gradients of all devices
    return loss.item()


def test(model: nn.Module, loader: Any, device: torch.device, context: dp.Context) -> int:
    with torch.no_grad():
        return sum(int((model(images).argmax(1) == labels).sum()) for images, labels in loader)


def main() -> None:
    parser = argparse.ArgumentParser(description="Train a CNN on several devices of one process.")
    parser.add_argument("--epochs", type=int, default=8)
    parser.add_argument("--batch-size", type=int, default=32, help="of each device")
    args = parser.parse_args()

    devices = ltd.get_lazy_supported_devices()
    model = dp.DataParallel(make_model, device_ids=devices, enumerate_batches=False)
    data = DataLoader(digits("train"), args.batch_size, shuffle=True, drop_last=True)
    for epoch in range(args.epochs):
        losses = model(train, data)
        print(f"epoch {epoch + 1}: loss {sum(losses) / len(losses):.4f}")
    size = len(digits("t10k")) // len(devices)  # one batch for each device
    correct = sum(model(test, DataLoader(digits("t10k"), size, drop_last=True)))
    percent = 100 * correct / (size * len(devices))
    print(f"{len(devices)} devices, test accuracy: {percent:.2f} %")


if __name__ == "__main__":
    main()
