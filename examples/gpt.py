"""Train a small GPT to write like this repository's license, letter by letter.

    python examples/gpt.py
    ltc-launch --nprocs 2 examples/gpt.py --checkpoints runs/gpt

Beside a plain loop there are the device, the loader, optimizer_step, the clipping and the checkpoints.
"""

import argparse
import math
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, Dataset, DistributedSampler

import ltc_dist as ltd

TEXT = Path(__file__).parents[1] / "LICENSE"


class Letters(Dataset[tuple[torch.Tensor, torch.Tensor]]):
    """Pieces of a text: letters [T], and the letters that follow each."""

    def __init__(self, text: str, length: int) -> None:
        self.alphabet = sorted(set(text))
        self.length = length
        self.codes = torch.tensor([self.alphabet.index(letter) for letter in text])

    def __len__(self) -> int:
        return len(self.codes) - self.length

    def __getitem__(self, start: int) -> tuple[torch.Tensor, torch.Tensor]:
        piece = self.codes[start : start + self.length + 1]
        return piece[:-1], piece[1:]


class Block(nn.Module):
    """Causal self-attention and a feed-forward layer, each added to its input. [B, T, C] to [B, T, C]."""

    def __init__(self, width: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.norm_1, self.norm_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        B, T, C = x.shape
        heads = self.qkv(self.norm_1(x)).view(B, T, 3, self.num_heads, -1).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(*heads.unbind(0), is_causal=True)
        x = x + self.out(y.transpose(1, 2).reshape(B, T, C))
        return x + self.mlp(self.norm_2(x))


class GPT(nn.Module):
    """Letters [B, T] to scores of the next letter [B, T, V]."""

    def __init__(self, vocab: int, length: int, width: int, num_layers: int) -> None:
        super().__init__()
        self.letter, self.place = nn.Embedding(vocab, width), nn.Embedding(length, width)
        self.blocks = nn.Sequential(*(Block(width, 4) for _ in range(num_layers)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, vocab)

    def forward(self, codes: torch.Tensor) -> torch.Tensor:
        places = torch.arange(codes.shape[1], device=codes.device)
        return self.head(self.norm(self.blocks(self.letter(codes) + self.place(places))))


def train(args: argparse.Namespace) -> None:
    device = ltd.lazy_device()
    data = Letters(TEXT.read_text("utf-8"), args.length)
    sampler = DistributedSampler(data, ltd.world_size(), ltd.get_ordinal(), drop_last=True)
    batch_size = args.batch_size // ltd.world_size()
    cpu_loader = DataLoader(data, batch_size, sampler=sampler, drop_last=True)
    loader = ltd.MpDeviceLoader(cpu_loader, device)

    torch.manual_seed(1)  # the same parameters in all processes
    model = GPT(len(data.alphabet), args.length, args.width, args.layers).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer,
        lambda k: min(1, (k + 1) / 20) * (0.55 + 0.45 * math.cos(math.pi * min(1, k / args.steps))),
    )
    step = epoch = 0
    saver = None
    if args.checkpoints:
        held = {"model": model, "optimizer": optimizer, "schedule": schedule, "loader": loader}
        saver = ltd.Checkpointer(args.checkpoints, every=100, **held)
        found = saver.restore()
        if found is not None:
            step, epoch = found.step, found.values["epoch"]
            ltd.master_print(f"going on after step {step}")
    rate = ltd.RateTracker()
    while step < args.steps:
        sampler.set_epoch(epoch)
        for codes, following in loader:
            optimizer.zero_grad()
            loss = F.cross_entropy(model(codes).flatten(0, 1), following.flatten())
            loss.backward()
            ltd.reduce_gradients(optimizer)
            ltd.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            schedule.step()
            step += 1
            rate.add(args.batch_size * args.length)
            if step % args.log_interval == 0:
                mean = ltd.mesh_reduce("loss", loss.item(), sum) / ltd.world_size()
                ltd.master_print(f"step {step}: loss {mean:.4f}, {rate.rate():.0f} letters/s")
            if saver is not None:
                saver.step(step, epoch=epoch)
            if step == args.steps:
                break
        epoch += 1
    ltd.master_print(write(model.cpu(), data, "You may ", args.letters))


@torch.no_grad()
def write(model: GPT, data: Letters, text: str, count: int) -> str:
    """Go on with a text, a letter at a time, on the CPU."""
    for _ in range(count):
        codes = torch.tensor([[data.alphabet.index(letter) for letter in text[-data.length :]]])
        scores = model(codes)[0, -1] / 0.7
        text += data.alphabet[int(torch.multinomial(scores.softmax(0), 1))]
    return text


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Train a small GPT on the text of the license.")
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--batch-size", type=int, default=32, help="of all processes together")
    parser.add_argument("--length", type=int, default=64, help="letters of a piece")
    parser.add_argument("--width", type=int, default=96)
    parser.add_argument("--layers", type=int, default=3)
    parser.add_argument("--lr", type=float, default=2e-3)
    parser.add_argument("--log-interval", type=int, default=50)
    parser.add_argument("--letters", type=int, default=200, help="to write at the end")
    parser.add_argument(
        "--checkpoints", type=Path, help="save every 100 steps here, and go on from there"
    )
    return parser.parse_args()


if __name__ == "__main__":
    train(parse_args())
