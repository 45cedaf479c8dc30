"""A script of two processes: DIRECTORY. Each case trains a model whose parameters are divided, and eager beside it.

Rank 0 prints, for each case, whether losses and parameters are eager's, and what the case is about.
"""

import copy
import functools
import os
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp.wrap import size_based_auto_wrap_policy
from torch.utils.checkpoint import checkpoint

import ltc_dist as ltd
from ltc_core import metrics
from ltc_core.errors import LtcError
from ltc_dist import FullyShardedDataParallel as Sharded
from ltc_dist.fully_sharded.consolidate import (
    consolidate_sharded_model_checkpoints,
    consolidate_sharded_state_dicts,
)

directory = sys.argv[1]
rank, count = ltd.get_ordinal(), ltd.world_size()
device = ltd.lazy_device()


class Block(nn.Module):
    def __init__(self, width: int, checkpoints: bool | None = None) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.attention = nn.MultiheadAttention(width, 2, batch_first=True)
        self.layers = nn.Sequential(nn.Linear(width, 24), nn.GELU(), nn.Linear(24, width))
        self.checkpoints = checkpoints

    def run(self, x: torch.Tensor) -> torch.Tensor:
        h = self.norm(x)
        x = x + self.attention(h, h, h, need_weights=False)[0]
        return x + self.layers(x)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.checkpoints is None:
            return self.run(x)
        return checkpoint(self.run, x, use_reentrant=self.checkpoints)  # type: ignore[no-any-return]


class Net(nn.Module):
    """Two blocks, an LSTM, a tied weight, a buffer, and a frozen layer."""

    def __init__(self, checkpoints: bool | None = None) -> None:
        super().__init__()
        self.first = nn.Linear(6, 12)
        self.blocks = nn.ModuleList(Block(12, checkpoints) for _ in range(2))
        self.memory = nn.LSTM(12, 12, batch_first=True)
        self.frozen = nn.Linear(12, 12).requires_grad_(False)
        self.out = nn.Linear(12, 6, bias=False)
        self.out.weight = nn.Parameter(self.first.weight.detach().t().clone())
        self.tied = nn.Linear(12, 6, bias=False)
        self.tied.weight = self.out.weight
        self.register_buffer("scale", torch.tensor([0.5]))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        x = self.frozen(self.memory(x)[0])
        return self.out(x) + self.scale * self.tied(x.tanh())


def net(checkpoints: bool | None = None) -> Net:
    torch.manual_seed(0)
    return Net(checkpoints)


def batch(step: int) -> torch.Tensor:
    return torch.randn(8, 3, 6, generator=torch.Generator().manual_seed(step))


def mine(x: torch.Tensor) -> torch.Tensor:
    return x.chunk(count)[rank].to(device)


def eager(model: nn.Module, clips: float = 0.0, pieces: int = 1) -> list[float]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, eps=1e-3)
    losses = []
    for step in range(4):
        for piece in range(pieces):
            loss = model(batch(4 * piece + step)).square().mean()
            loss.backward()
        losses.append(loss.item())
        if clips:
            nn.utils.clip_grad_norm_(model.parameters(), clips)
        optimizer.step()
        optimizer.zero_grad()
    return losses


def train(
    model: Any, clips: float = 0.0, pieces: int = 1, is_synced: bool = True, by_ltd: bool = False
) -> list[float]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, eps=1e-3)
    losses = []
    for step in range(4):
        for piece in range(pieces):
            is_last = is_synced or piece == pieces - 1
            context = torch.enable_grad() if is_last else model.no_sync()
            with context:
                loss = model(mine(batch(4 * piece + step))).float().square().mean()
                loss.backward()
        losses.append(ltd.all_reduce("sum", loss.detach(), 1 / count).item())
        if clips and by_ltd:
            ltd.clip_grad_norm_(model.parameters(), clips)
        elif clips:
            model.clip_grad_norm_(clips)
        optimizer.step()
        optimizer.zero_grad()
    return losses


def whole(model: Any) -> dict[str, Any]:
    """The state dict of all processes' shards."""
    state = {name: value.cpu() for name, value in model.state_dict().items()}
    states = ltd.mesh_reduce("states", state, list)
    return consolidate_sharded_state_dicts(states, model.get_shard_metadata())


def units(model: Net, wrap: Callable[..., Any]) -> Any:
    for k, block in enumerate(model.blocks):
        model.blocks[k] = wrap(block)
    model.memory = wrap(model.memory)
    return wrap(model)


def case(name: str, atol: float = 1e-5, checkpoints: bool | None = None, **how: Any) -> Any:
    options = {
        k: how.pop(k)
        for k in list(how)
        if k not in ("clips", "pieces", "is_synced", "wraps", "by_ltd")
    }
    wraps = how.pop("wraps", units)
    plain = net()
    wanted = eager(plain, how.get("clips", 0.0), how.get("pieces", 1))
    model = wraps(net(checkpoints), functools.partial(Sharded, **options))
    losses = train(model, **how)
    found, expected = whole(model), plain.state_dict()
    are_equal = torch.allclose(torch.tensor(losses), torch.tensor(wanted), atol=atol, rtol=atol)
    are_equal = are_equal and found.keys() == expected.keys()
    for key in expected:
        close = torch.allclose(found[key], expected[key], atol=10 * atol, rtol=10 * atol)
        are_equal = are_equal and close
        if not close and rank == 0:
            print(key, (found[key] - expected[key]).abs().max().item(), file=sys.stderr)
    report(name, are_equal)
    return model


def report(name: str, *facts: Any) -> None:
    ltd.mark_step()
    if rank == 0:
        print(name, *facts, flush=True)


def fails(call: Callable[[], Any]) -> str:
    try:
        call()
    except (LtcError, RuntimeError, ValueError, NotImplementedError) as error:
        return str(error).splitlines()[0]
    return "nothing"


model = case("units")
share = sum(p.numel() for p in model.parameters()) / (sum(p.numel() for p in net().parameters()))
names = [n for n, _ in model.get_original_names_and_sharded_parameters()]
report("names", set(names) == {n for n, _ in net().named_parameters()}, round(share, 1) >= 0.5)
train(model)
before = metrics.counter_value("UncachedCompile")
train(model)
report("programs", metrics.counter_value("UncachedCompile") - before)
report("outside", fails(lambda: model.first.weight + 1))
twin = copy.deepcopy(model)
train(twin)
report(
    "copy",
    any(
        not torch.equal(a, b)
        for a, b in zip(whole(twin).values(), whole(model).values(), strict=True)
    ),
)
report(
    "xm.optimizer_step",
    fails(lambda: ltd.optimizer_step(torch.optim.SGD(model.parameters(), lr=0.1))),
)

case("one unit", wraps=lambda model, wrap: wrap(model))
case("flat", flatten_parameters=True)
case("rows", shard_param_on_dim_0=True)
case("small shards", _shard_size_multiple=1)
case("kept", reshard_after_forward=False)
case("freed in the root, too", disable_reshard_on_root=False)
case("reentrant checkpoints", checkpoints=True)
case("checkpoints", checkpoints=False)
case("clipped", clips=0.05)
case("clipped by ltd", clips=0.05, by_ltd=True)
case("accumulated", pieces=2)
case("accumulated apart", pieces=2, is_synced=False)
case("narrow", atol=3e-2, compute_dtype=torch.bfloat16, fp32_reduce_scatter=True)
case("policy", auto_wrap_policy=functools.partial(size_based_auto_wrap_policy, min_num_params=300),
     wraps=lambda model, wrap: wrap(model))  # fmt: skip
case("step ends", sync_on_finalization=True)

with torch.device("meta"):
    made = Sharded(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2)), _shard_size_multiple=1)
report(
    "meta", {p.device.type for p in made.parameters()}, sum(p.numel() for p in made.parameters())
)


def peak(wraps: bool, **options: Any) -> int:
    """Bytes of a step of eight layers, beyond what is there before it."""
    layers = [nn.Linear(256, 256) for _ in range(8)]
    wrapped = [Sharded(layer, **options) for layer in layers] if wraps else layers
    deep: Any = nn.Sequential(*wrapped)
    deep = Sharded(deep) if wraps else deep.to(device)
    optimizer = torch.optim.SGD(deep.parameters(), lr=0.1)
    for _ in range(2):
        optimizer.zero_grad()
        ltd.mark_step(wait=True)
        torch.ltc.reset_peak_memory_stats(device)  # type: ignore[attr-defined]
        before = ltd.get_memory_info(device)["bytes_used"]
        deep(torch.ones(2, 256).to(device)).sum().backward()
        optimizer.step()
        ltd.mark_step(wait=True)
        found = ltd.get_memory_info(device)["peak_bytes_used"] - before
    return found  # type: ignore[no-any-return]


layer_bytes = 256 * 256 * 4
freed, kept, undivided = peak(True), peak(True, reshard_after_forward=False), peak(False)
if rank == 0:
    print(freed / layer_bytes, kept / layer_bytes, undivided / layer_bytes, file=sys.stderr)
report("memory", freed < kept - 4 * layer_bytes, freed < undivided)

plain, model = net(), units(net(), Sharded)
loss = model(mine(batch(0))).square().mean()
with torch.no_grad():
    next(model.blocks[0].parameters()).add_(1)
report("changed", fails(loss.backward)[:60])

path = os.path.join(directory, "model")
ltd.save({"model": model.state_dict(), "shard_metadata": model.get_shard_metadata()}, f"{path}-{rank}.pth",
         master_only=False)  # fmt: skip
ltd.rendezvous("saved")
loaded, _ = consolidate_sharded_model_checkpoints(f"{path}-", save_model=False)
expected = whole(model)
report(
    "files",
    all(torch.equal(loaded[k], expected[k]) for k in expected),
    loaded.keys() == expected.keys(),
)
