"""The models that `benchmarks.breadth` trains: one of each kind that people write, none tuned for.

Each is a module whose `forward` takes a batch and returns the loss, or, where a step is more than that,
has a step of its own (two optimizers, a closure). Weights and batches come from fixed seeds on the CPU.
The code is ordinary PyTorch, with the shortcuts that scripts take: it draws random numbers in a step,
indexes with masks and loops over time. Comes from breadth_images.py and breadth_sequences.py. Next:
breadth_child.py, which trains one of them.
"""

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Generator, Tensor, nn
from torch.distributions import Categorical

from benchmarks.breadth_images import (
    GAN,
    VAE,
    Classifier,
    Diffusion,
    Swin,
    UNet,
    ViT,
    audio_net,
    convnext,
    mobile,
    net_3d,
)
from benchmarks.breadth_sequences import (
    LSTM,
    T5,
    Encoder,
    GRUSeq2Seq,
    Llama,
    SelectiveScan,
    lora,
)
from benchmarks.models import NUM_CLASSES, WORKLOADS, Workload

_MODEL_SEED, _DATA_SEED = 0, 1

Batch = tuple[Tensor, ...]
Draw = Callable[[Generator], Batch]
Compile = Callable[[Callable[..., Any]], Callable[..., Any]]
Step = Callable[..., Tensor]
Start = Callable[[Any, Compile], Step]


# ---- a step --------------------------------------------------------------------------------------


def _adamw(parameters: Iterable[Tensor]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-3)


def _train_with(make_optimizer: Callable[[Iterable[Tensor]], torch.optim.Optimizer]) -> Start:
    """Return what makes the usual step: loss, backward, optimizer."""

    def start(module: nn.Module, compile: Compile) -> Step:
        optimizer = make_optimizer([p for p in module.parameters() if p.requires_grad])
        loss_of, optimizer_step = compile(module.forward), compile(optimizer.step)

        def step(*batch: Tensor) -> Tensor:
            optimizer.zero_grad()
            loss: Tensor = loss_of(*batch)
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer_step()
            return loss.detach()

        return step

    return start


_train = _train_with(_adamw)


def _train_gan(gan: GAN, compile: Compile) -> Step:
    """One step of the discriminator, then one of the generator."""
    optimizers = [
        torch.optim.Adam(part.parameters(), lr=2e-4, betas=(0.5, 0.999))
        for part in (gan.discriminator, gan.generator)
    ]
    steps = [compile(optimizer.step) for optimizer in optimizers]
    losses = [compile(gan.discriminator_loss), compile(gan.generator_loss)]

    def step(images: Tensor) -> Tensor:
        total = torch.zeros((), device=images.device)
        for optimizer, optimizer_step, loss_of in zip(optimizers, steps, losses, strict=True):
            optimizer.zero_grad()
            noise = torch.randn(len(images), GAN.NOISE, 1, 1, device=images.device)
            loss = loss_of(images, noise)
            loss.backward()
            optimizer_step()
            total = total + loss.detach()
        return total

    return step


def _train_lbfgs(module: nn.Module, compile: Compile) -> Step:
    """A step of LBFGS: it evaluates the loss several times and decides on the numbers it gets."""
    optimizer = torch.optim.LBFGS(module.parameters(), lr=0.5, max_iter=4)
    loss_of, optimizer_step = compile(module.forward), compile(optimizer.step)

    def step(*batch: Tensor) -> Tensor:
        def closure() -> Tensor:
            optimizer.zero_grad()
            loss: Tensor = loss_of(*batch)
            loss.backward()  # type: ignore[no-untyped-call]
            return loss

        loss: Tensor = optimizer_step(closure)
        return loss.detach()

    return step


# ---- tables, graphs, retrieval, control ----------------------------------------------------------


def _wide_mlp() -> nn.Module:
    return Classifier(
        nn.Linear(512, 1536), nn.ReLU(), nn.Dropout(0.1), nn.Linear(1536, 1536), nn.ReLU(),
        nn.Linear(1536, NUM_CLASSES),
    )  # fmt: skip


class _MoE(nn.Module):
    """The best of four experts for each row, which a mask picks: shapes depend on the numbers."""

    def __init__(self, width: int, num_experts: int) -> None:
        super().__init__()
        self.router = nn.Linear(width, num_experts)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))
            for _ in range(num_experts)
        )
        self.head = nn.Linear(width, NUM_CLASSES)

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        weights, chosen = self.router(x).softmax(-1).max(-1)
        out = torch.zeros_like(x)
        for index, expert in enumerate(self.experts):
            mask = chosen == index
            out[mask] = expert(x[mask]) * weights[mask].unsqueeze(-1)
        return F.cross_entropy(self.head(x + out), labels)


class _DLRM(nn.Module):
    """Recommendation: bags of ids and dense numbers, all pairs of their products."""

    def __init__(self, rows: int, num_tables: int, width: int) -> None:
        super().__init__()
        self.tables = nn.ModuleList(
            nn.EmbeddingBag(rows, width, mode="sum") for _ in range(num_tables)
        )
        self.bottom = nn.Sequential(nn.Linear(13, 64), nn.ReLU(), nn.Linear(64, width), nn.ReLU())
        pairs = (num_tables + 1) * num_tables // 2
        self.top = nn.Sequential(nn.Linear(width + pairs, 64), nn.ReLU(), nn.Linear(64, 1))

    def forward(self, dense: Tensor, ids_BNL: Tensor, clicks: Tensor) -> Tensor:
        bottom = self.bottom(dense)
        bags = [table(ids_BNL[:, n]) for n, table in enumerate(self.tables)]
        vectors = torch.stack([bottom, *bags], 1)
        products = torch.bmm(vectors, vectors.transpose(1, 2))
        rows, columns = torch.tril_indices(vectors.shape[1], vectors.shape[1], -1).to(dense.device)
        features = torch.cat([bottom, products[:, rows, columns]], 1)
        return F.binary_cross_entropy_with_logits(self.top(features).squeeze(1), clicks)


class _GNN(nn.Module):
    """Messages along edges, summed at their targets with index_add, divided by the degree."""

    def __init__(self, width: int, depth: int) -> None:
        super().__init__()
        self.messages = nn.ModuleList(nn.Linear(2 * width, width) for _ in range(depth))
        self.updates = nn.ModuleList(nn.Linear(2 * width, width) for _ in range(depth))
        self.head = nn.Linear(width, NUM_CLASSES)

    def forward(self, nodes: Tensor, edges: Tensor, labels: Tensor) -> Tensor:
        source, target = edges
        ones = torch.ones(edges.shape[1], device=nodes.device)
        degree = torch.zeros(len(nodes), device=nodes.device).index_add(0, target, ones)
        for message, update in zip(self.messages, self.updates, strict=True):
            sent = F.relu(message(torch.cat([nodes[source], nodes[target]], 1)))
            received = torch.zeros_like(nodes).index_add(0, target, sent)
            received = received / degree.clamp(min=1).unsqueeze(1)
            nodes = F.relu(update(torch.cat([nodes, received], 1)))
        return F.cross_entropy(self.head(nodes), labels)


class _TwoTower(nn.Module):
    """Contrastive: each row of one tower against all of the other, at a learned temperature."""

    def __init__(self, size: int, width: int) -> None:
        super().__init__()
        self.left, self.right = (
            nn.Sequential(nn.Linear(size, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
            for _ in range(2)
        )
        self.log_scale = nn.Parameter(torch.tensor(math.log(1 / 0.07)))

    def forward(self, left: Tensor, right: Tensor) -> Tensor:
        left, right = F.normalize(self.left(left), dim=-1), F.normalize(self.right(right), dim=-1)
        logits = self.log_scale.exp().clamp(max=100) * left @ right.t()
        matching = torch.arange(len(logits), device=logits.device)
        return (F.cross_entropy(logits, matching) + F.cross_entropy(logits.t(), matching)) / 2


class _ActorCritic(nn.Module):
    """Two layers and two heads: a step so small that what surrounds the kernels counts."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(4, 32), nn.Tanh())
        self.actor, self.critic = nn.Linear(32, 2), nn.Linear(32, 1)

    def forward(self, states: Tensor, actions: Tensor, returns: Tensor) -> Tensor:
        hidden = self.body(states)
        policy, values = Categorical(logits=self.actor(hidden)), self.critic(hidden).squeeze(1)
        advantages = returns - values
        actor: Tensor = -(policy.log_prob(actions) * advantages.detach()).mean()  # type: ignore[no-untyped-call]
        entropy: Tensor = policy.entropy().mean()  # type: ignore[no-untyped-call]
        loss: Tensor = actor + 0.5 * advantages.pow(2).mean() - 0.01 * entropy
        return loss


class _Regression(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 1))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return F.mse_loss(self.layers(x), y)


# ---- batches -------------------------------------------------------------------------------------


def _labelled(*shape: int) -> Draw:
    """Draw inputs of `shape`, and a class for each."""
    return lambda g: (torch.randn(shape, generator=g), _integers(g, NUM_CLASSES, shape[0]))


def _integers(generator: Generator, high: int, *shape: int) -> Tensor:
    return torch.randint(high, shape, generator=generator)


def _images(*shape: int) -> Draw:
    return lambda g: (torch.rand(shape, generator=g),)


def _masked_images(generator: Generator) -> Batch:
    return torch.randn(4, 3, 48, 48, generator=generator), _integers(generator, 2, 4, 48, 48)


def _text(batch_size: int, length: int, vocabulary: int) -> Draw:
    """Draw tokens, and what follows each."""

    def draw(generator: Generator) -> Batch:
        tokens = _integers(generator, vocabulary, batch_size, length + 1)
        return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()

    return draw


def _pairs_of_text(batch_size: int, length: int, vocabulary: int) -> Draw:
    """Draw a source, what the decoder is given, and what it should write."""
    text = _text(batch_size, length, vocabulary)
    return lambda g: (_integers(g, vocabulary, batch_size, length), *text(g))


def _clicks(generator: Generator) -> Batch:
    clicks = _integers(generator, 2, 128).float()
    return torch.randn(128, 13, generator=generator), _integers(generator, 2000, 128, 8, 4), clicks


def _graph(generator: Generator) -> Batch:
    nodes = torch.randn(512, 64, generator=generator)
    return nodes, _integers(generator, 512, 2, 4096), _integers(generator, NUM_CLASSES, 512)


def _labelled_text(generator: Generator) -> Batch:
    return _integers(generator, 256, 8, 48), _integers(generator, NUM_CLASSES, 8)


def _labelled_text_of_any_length(generator: Generator) -> Batch:
    length = int(_integers(generator, 65, 1)) + 16
    return _integers(generator, 256, 8, length), _integers(generator, NUM_CLASSES, 8)


def _matching(generator: Generator) -> Batch:
    left = torch.randn(128, 256, generator=generator)
    return left, left.flip(1) + torch.randn(128, 256, generator=generator)


def _episodes(generator: Generator) -> Batch:
    returns = torch.randn(8, generator=generator)
    return torch.randn(8, 4, generator=generator), _integers(generator, 2, 8), returns


def _curve(generator: Generator) -> Batch:
    x = torch.randn(64, 16, generator=generator)
    return x, x.sin().sum(1, keepdim=True)


# ---- the table -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Subject:
    """What is trained: a module, a batch for it, and what makes a step of the two.

    `make_step(module, compile)` returns the step; it applies `compile` to each loss and optimizer step.
    """

    make_module: Callable[[], nn.Module]
    draw: Draw
    make_step: Start = _train

    def module(self) -> nn.Module:
        """Make the module, the same each time."""
        torch.manual_seed(_MODEL_SEED)
        return self.make_module()

    def batches(self, count: int) -> list[Batch]:
        """Make a pool of batches, the same each time."""
        generator = torch.Generator().manual_seed(_DATA_SEED)
        return [self.draw(generator) for _ in range(count)]


class _WithLoss(nn.Module):
    def __init__(self, workload: Workload) -> None:
        super().__init__()
        self.layers, self.loss = workload.make_model(), workload.loss

    def forward(self, data: Tensor, target: Tensor) -> Tensor:
        return self.loss(self.layers(data), target)


def _of_workload(workload: Workload) -> Subject:
    return Subject(lambda: _WithLoss(workload), workload.draw, _train_with(workload.make_optimizer))


LARGE = (
    "mnist",
    "resnet50",
    "gpt30m",
)  # an eager step takes more than 100 ms: only when they are named

SUBJECTS: dict[str, Subject] = {
    **{name: _of_workload(workload) for name, workload in WORKLOADS.items() if name != "tiny"},
    "unet": Subject(lambda: UNet(16), _masked_images),
    "vit": Subject(lambda: ViT(64, 3, 16), _labelled(16, 3, 32, 32)),
    "lstm": Subject(lambda: LSTM(256, 96), _text(16, 32, 256)),
    "gru_attention": Subject(lambda: GRUSeq2Seq(256, 64), _pairs_of_text(16, 16, 256)),
    "wide_mlp": Subject(_wide_mlp, _labelled(64, 512)),
    "dcgan": Subject(lambda: GAN(16), _images(16, 1, 16, 16), _train_gan),
    "vae": Subject(lambda: VAE(784, 256, 16), _images(64, 784)),
    "moe": Subject(lambda: _MoE(128, 4), _labelled(256, 128)),
    "dlrm": Subject(lambda: _DLRM(2000, 8, 16), _clicks),
    "gnn": Subject(lambda: _GNN(64, 3), _graph),
    "audio": Subject(audio_net, _labelled(8, 1, 8000)),
    "conv3d": Subject(net_3d, _labelled(4, 1, 16, 24, 24)),
    "convnext": Subject(convnext, _labelled(8, 3, 32, 32)),
    "separable": Subject(mobile, _labelled(16, 3, 32, 32)),
    "swin": Subject(lambda: Swin(32), _labelled(8, 3, 32, 32)),
    "mamba": Subject(lambda: SelectiveScan(256, 64, 8), _text(8, 32, 256)),
    "t5": Subject(lambda: T5(256, 64, 4, 2), _pairs_of_text(8, 24, 256)),
    "llama": Subject(lambda: Llama(256, 96, 3, 6, 2), _text(8, 48, 256)),
    "diffusion": Subject(lambda: Diffusion(16), _images(8, 3, 16, 16)),
    "lora": Subject(lora, _labelled_text),
    "two_tower": Subject(lambda: _TwoTower(256, 64), _matching),
    "actor_critic": Subject(_ActorCritic, _episodes),
    "lbfgs": Subject(_Regression, _curve, _train_lbfgs),
    "lengths": Subject(lambda: Encoder(256, 96, 3), _labelled_text_of_any_length),
    "checkpoint": Subject(lambda: Encoder(256, 96, 3, checkpointed=True), _labelled_text),
}
