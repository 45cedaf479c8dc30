"""The models the parity tests train: a CNN, an MLP, a GPT, an LSTM + GRU and a ResNet, all small.

`Run` trains one of them with one optimizer and a learning rate schedule, on any device, on batches
that depend on the step alone. What comes out: the losses and the trained model.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import TensorDataset

CLASSES = 10
VOCABULARY = 40
Batch = tuple[Tensor, Tensor]


class CNN(nn.Module):
    """The MNIST network of the torch._lazy tutorial, with fewer channels."""

    def __init__(self, channels: int = 8, hidden: int = 32) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(1, channels, 3)
        self.conv2 = nn.Conv2d(channels, 2 * channels, 3)
        self.dropout1 = nn.Dropout(0.25)
        self.dropout2 = nn.Dropout(0.5)
        self.fc1 = nn.Linear(2 * channels * 12 * 12, hidden)
        self.fc2 = nn.Linear(hidden, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.conv1(x))
        x = F.relu(self.conv2(x))
        x = self.dropout1(F.max_pool2d(x, 2))
        x = self.dropout2(F.relu(self.fc1(torch.flatten(x, 1))))
        return F.log_softmax(self.fc2(x), dim=1)


class MLP(nn.Sequential):
    def __init__(self, width: int = 32, depth: int = 4) -> None:
        hidden = (
            nn.Sequential(nn.Linear(width, width), nn.LayerNorm(width), nn.GELU())
            for _ in range(depth)
        )
        super().__init__(*hidden, nn.Linear(width, CLASSES), nn.LogSoftmax(dim=1))


class Block(nn.Module):
    """One transformer block, normalised first."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1 = nn.LayerNorm(width)
        self.norm2 = nn.LayerNorm(width)
        # No bias: a key's has no effect, and Adam would move it by the rounding of its gradient.
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.out = nn.Linear(width, width)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width), nn.Dropout(0.1)
        )

    def forward(self, x_BTD: Tensor) -> Tensor:
        B, T, D = x_BTD.shape
        qkv = self.qkv(self.norm1(x_BTD)).split(D, dim=2)
        q, k, v = (t.view(B, T, self.heads, D // self.heads).transpose(1, 2) for t in qkv)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x_BTD = x_BTD + self.out(y.transpose(1, 2).contiguous().view(B, T, D))
        return x_BTD + self.mlp(self.norm2(x_BTD))


class GPT(nn.Module):
    """A decoder whose output layer is its embedding (tied weights)."""

    def __init__(self, width: int = 32, layers: int = 2, heads: int = 4, length: int = 16) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, width)
        self.positions = nn.Embedding(length, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, VOCABULARY, bias=False)
        nn.init.normal_(self.tokens.weight, std=0.1)
        self.head.weight = self.tokens.weight

    def forward(self, x_BT: Tensor) -> Tensor:
        positions = torch.arange(x_BT.shape[1], device=x_BT.device)
        x_BTD = self.tokens(x_BT) + self.positions(positions)
        for block in self.blocks:
            x_BTD = block(x_BTD)
        return F.log_softmax(self.head(self.norm(x_BTD)), dim=-1)


class Recurrent(nn.Module):
    """Two layers of LSTM, then a GRU."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, width)
        self.lstm = nn.LSTM(width, width, num_layers=2, batch_first=True)
        self.gru = nn.GRU(width, width, batch_first=True)
        self.out = nn.Linear(width, VOCABULARY)

    def forward(self, x_BT: Tensor) -> Tensor:
        x_BTD, _ = self.lstm(self.embedding(x_BT))
        x_BTD, _ = self.gru(x_BTD)
        return F.log_softmax(self.out(x_BTD), dim=-1)


class Residual(nn.Module):
    def __init__(self, in_channels: int, out_channels: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(in_channels, out_channels, 3, stride, padding=1, bias=False)
        self.norm1 = nn.BatchNorm2d(out_channels)
        self.conv2 = nn.Conv2d(out_channels, out_channels, 3, padding=1, bias=False)
        self.norm2 = nn.BatchNorm2d(out_channels)
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or in_channels != out_channels:
            self.shortcut = nn.Sequential(
                nn.Conv2d(in_channels, out_channels, 1, stride, bias=False),
                nn.BatchNorm2d(out_channels),
            )

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.norm1(self.conv1(x)), inplace=True)
        y = self.norm2(self.conv2(y))
        y += self.shortcut(x)
        return F.relu(y, inplace=True)


class ResNet(nn.Module):
    def __init__(self, channels: int = 8) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, channels, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(channels)
        self.blocks = nn.Sequential(
            Residual(channels, channels, 1),
            Residual(channels, 2 * channels, 2),
            Residual(2 * channels, 4 * channels, 2),
        )
        self.out = nn.Linear(4 * channels, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = self.blocks(F.relu(self.norm(self.conv(x))))
        x = F.adaptive_avg_pool2d(x, 1).flatten(1)
        return F.log_softmax(self.out(x), dim=1)


def _images(channels: int, side: int, count: int) -> Callable[[torch.Generator], Batch]:
    def make(g: torch.Generator) -> Batch:
        images = torch.randn(count, channels, side, side, generator=g)
        return images, torch.randint(0, CLASSES, (count,), generator=g)

    return make


def _vectors(g: torch.Generator) -> Batch:
    return torch.randn(8, 32, generator=g), torch.randint(0, CLASSES, (8,), generator=g)


def _text(g: torch.Generator) -> Batch:
    tokens = torch.randint(0, VOCABULARY, (4, 13), generator=g)
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


def digits(count: int) -> TensorDataset:
    """Images of which a class is told by the quarter that is bright."""
    g = torch.Generator().manual_seed(0)
    labels = torch.randint(0, 4, (count,), generator=g)
    images = torch.randn(count, 1, 28, 28, generator=g) * 0.1
    for image, label in zip(images, labels.tolist(), strict=True):
        row, column = divmod(label, 2)
        image[0, row * 14 : row * 14 + 14, column * 14 : column * 14 + 14] += 1
    return TensorDataset(images, labels)


# name -> (model, what makes a batch)
MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[torch.Generator], Batch]]] = {
    "cnn": (CNN, _images(1, 28, 4)),
    "mlp": (MLP, _vectors),
    "gpt": (GPT, _text),
    "lstm": (Recurrent, _text),
    "resnet": (ResNet, _images(3, 16, 4)),
}
OPTIMIZERS: dict[str, Callable[[Iterable[Tensor]], torch.optim.Optimizer]] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.02, momentum=0.9),
    "adam": lambda p: torch.optim.Adam(p, lr=1e-3),
    "adamw": lambda p: torch.optim.AdamW(p, lr=1e-3),
    "adadelta": lambda p: torch.optim.Adadelta(p, lr=1.0),
}


def batch(model: str, step: int) -> Batch:
    """Give one of four batches: few enough for a model to learn them in a few steps."""
    return MODELS[model][1](torch.Generator().manual_seed(step % 4))


@dataclass
class Run:
    """One training run. `after_step` is called at the end of each step."""

    model: str
    optimizer: str
    device: str | torch.device = "cpu"
    after_step: Callable[[], object] = lambda: None
    losses: list[Tensor] = field(default_factory=list)

    def train(self, num_steps: int) -> "Run":
        torch.manual_seed(0)
        self.net = MODELS[self.model][0]().to(self.device)
        optimizer = OPTIMIZERS[self.optimizer](self.net.parameters())
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, step_size=5, gamma=0.7)
        torch.manual_seed(1)  # what dropout draws does not depend on how the weights were drawn
        for step in range(num_steps):
            x, y = (t.to(self.device) for t in batch(self.model, step))
            optimizer.zero_grad()
            loss = F.nll_loss(self.net(x).flatten(0, -2), y.flatten())
            loss.backward()
            optimizer.step()
            schedule.step()
            self.losses.append(loss.detach())
            self.after_step()
        return self
