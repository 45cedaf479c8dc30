"""The models that `benchmarks.peers` trains: each with its optimizer, its loss and its batches.

A `Workload` is made from fixed seeds on the CPU, so that every peer starts from the same numbers
and their losses can be compared. Therefore nothing here draws random numbers in a step: the CNN is
that of the guides without its dropout. Only PyTorch is imported; the peers run this file under
whatever PyTorch they need. Next: peer_kinds.py.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Generator, Tensor, nn

_MODEL_SEED, _DATA_SEED = 0, 1
NUM_CLASSES = 10


# ---- convolutions --------------------------------------------------------------------------------


def _cnn() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 32, 3), nn.ReLU(), nn.Conv2d(32, 64, 3), nn.ReLU(), nn.MaxPool2d(2),
        nn.Flatten(), nn.Linear(9216, 128), nn.ReLU(), nn.Linear(128, NUM_CLASSES),
        nn.LogSoftmax(1),
    )  # fmt: skip


def _conv(channels_in: int, channels_out: int, kernel: int, stride: int) -> nn.Module:
    conv = nn.Conv2d(channels_in, channels_out, kernel, stride, kernel // 2, bias=False)
    return nn.Sequential(conv, nn.BatchNorm2d(channels_out))


class _Residual(nn.Module):
    """relu(branch(x) + x), where x is projected if its shape changes."""

    def __init__(self, branch: nn.Module, channels_in: int, channels_out: int, stride: int) -> None:
        super().__init__()
        self.branch = branch
        same = stride == 1 and channels_in == channels_out
        self.shortcut = nn.Identity() if same else _conv(channels_in, channels_out, 1, stride)

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.branch(x) + self.shortcut(x))


def _basic(channels_in: int, width: int, stride: int) -> nn.Module:
    branch = nn.Sequential(
        _conv(channels_in, width, 3, stride), nn.ReLU(), _conv(width, width, 3, 1)
    )
    return _Residual(branch, channels_in, width, stride)


def _bottleneck(channels_in: int, width: int, stride: int) -> nn.Module:
    branch = nn.Sequential(
        _conv(channels_in, width, 1, 1), nn.ReLU(),
        _conv(width, width, 3, stride), nn.ReLU(), _conv(width, 4 * width, 1, 1),
    )  # fmt: skip
    return _Residual(branch, channels_in, 4 * width, stride)


def _resnet(
    stem: list[nn.Module],
    width: int,
    depths: tuple[int, ...],
    block: Callable[[int, int, int], nn.Module],
    expansion: int,
) -> nn.Module:
    layers, channels = stem, width
    for stage, depth in enumerate(depths):
        for k in range(depth):
            stride = 2 if stage and not k else 1
            layers.append(block(channels, width << stage, stride))
            channels = expansion * (width << stage)
    head = [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, NUM_CLASSES)]
    return nn.Sequential(*layers, *head)


def _resnet18() -> nn.Module:
    return _resnet([_conv(3, 16, 3, 1), nn.ReLU()], 16, (2, 2, 2, 2), _basic, 1)


def _resnet50() -> nn.Module:
    stem = [_conv(3, 64, 7, 2), nn.ReLU(), nn.MaxPool2d(3, 2, 1)]
    return _resnet(stem, 64, (3, 4, 6, 3), _bottleneck, 4)


# ---- transformers and linear layers --------------------------------------------------------------


def _mlp(width: int, depth: int) -> nn.Module:
    layers = [
        nn.Sequential(nn.Linear(width, width), nn.LayerNorm(width), nn.GELU()) for _ in range(depth)
    ]
    return nn.Sequential(*layers, nn.Linear(width, NUM_CLASSES))


class _Block(nn.Module):
    """Pre-norm causal attention and a feed-forward layer."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm_1, self.norm_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.feed = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, x_BTD: Tensor) -> Tensor:
        b, t, d = x_BTD.shape
        parts = self.qkv(self.norm_1(x_BTD)).chunk(3, -1)
        q, k, v = (part.view(b, t, self.heads, d // self.heads).transpose(1, 2) for part in parts)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x_BTD = x_BTD + self.out(mixed.transpose(1, 2).reshape(b, t, d))
        out_BTD: Tensor = x_BTD + self.feed(self.norm_2(x_BTD))
        return out_BTD


class _GPT(nn.Module):
    """A decoder: tokens [B, T] to logits [B, T, vocabulary]."""

    def __init__(self, vocabulary: int, width: int, depth: int, length: int, heads: int) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width)
        self.positions = nn.Embedding(length, width)
        self.blocks = nn.Sequential(*(_Block(width, heads) for _ in range(depth)))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)

    def forward(self, tokens_BT: Tensor) -> Tensor:
        positions = torch.arange(tokens_BT.shape[1], device=tokens_BT.device)
        x_BTD = self.tokens(tokens_BT) + self.positions(positions)
        logits_BTV: Tensor = self.head(self.norm(self.blocks(x_BTD)))
        return logits_BTV


# ---- workloads -----------------------------------------------------------------------------------

Batch = tuple[Tensor, Tensor]
Loss = Callable[[Tensor, Tensor], Tensor]
MakeOptimizer = Callable[[Iterable[Tensor]], torch.optim.Optimizer]


def _sgd(lr: float) -> MakeOptimizer:
    return lambda parameters: torch.optim.SGD(parameters, lr=lr, momentum=0.9)


def _adamw(parameters: Iterable[Tensor]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-3)


def _token_loss(logits_BTV: Tensor, targets_BT: Tensor) -> Tensor:
    return F.cross_entropy(logits_BTV.flatten(0, 1), targets_BT.flatten())


def _labelled(*shape: int) -> Callable[[Generator], Batch]:
    """Draw inputs of `shape`, and a class for each."""

    def draw(generator: Generator) -> Batch:
        labels = torch.randint(NUM_CLASSES, shape[:1], generator=generator)
        return torch.randn(shape, generator=generator), labels

    return draw


def _text(batch_size: int, length: int, vocabulary: int) -> Callable[[Generator], Batch]:
    """Draw tokens, and what follows each."""

    def draw(generator: Generator) -> Batch:
        tokens = torch.randint(vocabulary, (batch_size, length + 1), generator=generator)
        return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()

    return draw


@dataclass(frozen=True)
class Workload:
    """What is trained. `title` is what the tables call it, `draw` makes a batch."""

    title: str
    make_model: Callable[[], nn.Module]
    make_optimizer: MakeOptimizer
    loss: Loss
    draw: Callable[[Generator], Batch]

    def model(self) -> nn.Module:
        """Make the model, the same each time."""
        torch.manual_seed(_MODEL_SEED)
        return self.make_model()

    def batches(self, count: int) -> list[Batch]:
        """Make a pool of batches, the same each time."""
        generator = torch.Generator().manual_seed(_DATA_SEED)
        return [self.draw(generator) for _ in range(count)]


WORKLOADS = {
    "mnist": Workload(
        "MNIST CNN, batch 64, SGD", _cnn, _sgd(0.01), F.nll_loss, _labelled(64, 1, 28, 28)
    ),
    "mlp": Workload(
        "MLP 8 x 256, batch 64, AdamW",
        lambda: _mlp(256, 8), _adamw, F.cross_entropy, _labelled(64, 256),
    ),
    "gpt": Workload(
        "GPT 4 x 128, 8 x 64 tokens, AdamW",
        lambda: _GPT(65, 128, 4, 64, 4), _adamw, _token_loss, _text(8, 64, 65),
    ),
    "resnet": Workload(
        "ResNet-18, width 16, 32 x 3 x 32 x 32, SGD",
        _resnet18, _sgd(0.01), F.cross_entropy, _labelled(32, 3, 32, 32),
    ),
    "resnet50": Workload(
        "ResNet-50, 8 x 3 x 112 x 112, SGD",  # 0.01 diverges: no two peers stay near each other
        _resnet50, _sgd(0.001), F.cross_entropy, _labelled(8, 3, 112, 112),
    ),
    "gpt30m": Workload(
        "GPT 8 x 512, 30 M parameters, 2 x 128 tokens, AdamW",
        lambda: _GPT(4096, 512, 8, 128, 8), _adamw, _token_loss, _text(2, 128, 4096),
    ),
    "tiny": Workload(
        "MLP 1 x 8, to try the harness",
        lambda: _mlp(8, 1), _adamw, F.cross_entropy, _labelled(4, 8),
    ),
}  # fmt: skip
