"""What all scripts here train, and what they print: nothing of it is old."""

import json

import torch
from torch import nn


def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))


def batches(rank=0, size=1):
    """This process's part of four batches of 16."""
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(64, 8, generator=generator)
    y = (x @ torch.randn(8, 4, generator=generator)).argmax(1)
    return [(x[k + rank : k + 16 : size], y[k + rank : k + 16 : size]) for k in range(0, 64, 16)]


class Samples(torch.utils.data.Dataset):
    def __init__(self):
        self.rows = [(x[k], y[k]) for x, y in batches() for k in range(16)]

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, k):
        return self.rows[k]


def tell(**facts):
    print(json.dumps(facts), flush=True)
