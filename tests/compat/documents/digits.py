"""What the documents' programs train: MNIST's shapes, made up. Nothing of it is old."""

import json

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

LR, MOMENTUM = 0.05, 0.9
ULP = 1 / 256  # bfloat16 has no number between 1 and 1 + 2 * ULP


class MNIST(nn.Module):
    """A small network for the images; its output is for NLLLoss."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(1, 4, 5, stride=2)
        self.fc = nn.Linear(4 * 12 * 12, 10)

    def forward(self, x):
        x = F.relu(self.conv(x)).flatten(1)
        return F.log_softmax(self.fc(x), dim=1)


def dataset(count):
    """Images 1 x 28 x 28 with a bright row for each digit."""
    generator = torch.Generator().manual_seed(0)
    labels = torch.arange(count) % 10
    images = torch.randn(count, 1, 28, 28, generator=generator) / 10
    images[torch.arange(count), 0, 2 * labels + 4] += 1
    return TensorDataset(images, labels)


def loader(count=32, batch_size=8):
    return DataLoader(dataset(count), batch_size=batch_size, generator=torch.Generator())


def plain_losses(num_epochs=1, batch_size=8):
    """Train as the documents do, without any device; give the losses."""
    torch.manual_seed(0)
    model = MNIST().train()
    optimizer = torch.optim.SGD(model.parameters(), lr=LR, momentum=MOMENTUM)
    losses = []
    for _ in range(num_epochs):
        for data, target in loader(batch_size=batch_size):
            optimizer.zero_grad()
            loss = F.nll_loss(model(data), target)
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
    return losses


def excesses(device):
    """Give what remains of 1 + ULP + 2**-40 minus 1 on a device, having checked which dtypes are reported."""
    found = {}
    for name, dtype in (("single", torch.float), ("double", torch.double)):
        x = torch.ones(1, dtype=dtype, device=device) + ULP + 2**-40
        assert x.dtype == dtype and x.cpu().dtype == dtype
        found[name] = (x - 1).item()
    return found


def is_as_printed(text, expected, device):
    """Tell whether a tensor printed as PyTorch prints it, and with its device."""
    return text == f"{str(expected)[:-1]}, device='{device}')"


def tell(**facts):
    print(json.dumps(facts), flush=True)
