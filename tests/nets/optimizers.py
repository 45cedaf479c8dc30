"""Every optimizer of torch.optim with what people build around it, beside eager.

`python -m tests.nets.optimizers --tier compiled` takes an hour. Around the optimizer: an average of the weights
(`AveragedModel`), slow weights that are copied back (Lookahead), gradients that are kept and put back (surgery), a copy
of the optimizer's state, and gradients set to zero in place.
"""

import argparse
import copy
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel

import ltc_core as ltc
from tests.core import beside_eager
from tests.core.programs.test_optimizers import OPTIMIZERS, VARIANTS
from tests.nets.tiers import TIERS, tier

__all__ = ["AROUND", "difference"]

STEPS = 7


class _Averaged:
    """An exponential moving average of the weights, and one that is read before the next step."""

    def __init__(self, model: nn.Module, optimizer: Any) -> None:
        self.model = model
        self.average = AveragedModel(model, avg_fn=lambda a, p, n: a * 0.9 + p * 0.1)
        self.kept: list[Any] = []

    def before(self) -> None:
        self.kept = [p.detach().clone() for p in self.model.parameters()]

    def after(self) -> None:
        self.average.update_parameters(self.model)

    def found(self) -> list[Any]:
        return [*self.kept, *(p.detach() for p in self.average.parameters())]


class _Lookahead:
    """Slow weights: every second step they come half the way, and the weights begin there."""

    def __init__(self, model: nn.Module, optimizer: Any) -> None:
        self.fast = list(model.parameters())
        self.slow = [torch.empty_like(p) for p in self.fast]
        self.num_steps = 0
        with torch.no_grad():
            torch._foreach_copy_(self.slow, self.fast)

    def before(self) -> None:
        pass

    @torch.no_grad()
    def after(self) -> None:
        self.num_steps += 1
        if self.num_steps % 2 == 0:
            torch._foreach_lerp_(self.slow, self.fast, 0.5)
            torch._foreach_copy_(self.fast, self.slow)

    def found(self) -> list[Any]:
        return self.slow


class _Surgery:
    """Gradients are kept, changed for the step, and put back: as gradient surgery, SAM and GradNorm do."""

    def __init__(self, model: nn.Module, optimizer: Any) -> None:
        self.model = model
        self.kept: list[Any] = []

    def before(self) -> None:
        gradients = [p.grad for p in self.model.parameters()]
        self.kept = [g.clone() for g in gradients]
        norm = torch.stack([g.norm() for g in gradients]).norm()
        torch._foreach_mul_(gradients, 1 / (1 + norm))

    def after(self) -> None:
        for p, kept in zip(self.model.parameters(), self.kept, strict=True):
            p.grad.copy_(kept)

    def found(self) -> list[Any]:
        return self.kept


class _KeptState:
    """A copy of the optimizer's state after the third step; its gradients are set to zero in place."""

    def __init__(self, model: nn.Module, optimizer: Any) -> None:
        self.optimizer = optimizer
        self.states: list[Any] = []

    def before(self) -> None:
        pass

    def after(self) -> None:
        self.states.append(copy.deepcopy(self.optimizer.state_dict()))
        self.optimizer.zero_grad(set_to_none=False)

    def found(self) -> list[Any]:
        states = [s for state in self.states[2:5] for s in state["state"].values()]
        return [t for s in states for t in s.values() if isinstance(t, torch.Tensor)]


AROUND: dict[str, Callable[[nn.Module, Any], Any]] = {
    "averaged": _Averaged,
    "lookahead": _Lookahead,
    "surgery": _Surgery,
    "kept state": _KeptState,
}


def _train(name: str, variant: str, around: str, device: torch.device) -> list[torch.Tensor]:
    make, options = OPTIMIZERS[name]
    extra = {"foreach": {"foreach": True}, "single": {"foreach": False}, "fused": {"fused": True}}
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.LayerNorm(4), nn.Linear(4, 1)).to(device)
    optimizer = make(model.parameters(), **options, **extra.get(variant, {}))
    beside = AROUND[around](model, optimizer)
    losses = []
    for step in range(STEPS):
        x = (torch.arange(15.0).view(5, 3) / 10 - step / 5).to(device)
        loss = model(x).square().mean()
        optimizer.zero_grad()
        loss.backward()
        beside.before()
        optimizer.step()
        beside.after()
        if device.type != "cpu":
            ltc.mark_step()
        losses.append(loss.detach())
    return [t.cpu() for t in (*losses, *(p.detach() for p in model.parameters()), *beside.found())]


def difference(name: str, variant: str, around: str) -> str:
    """Train in the present tier and in eager; '' or what differs."""
    found = _train(name, variant, around, ltc.lazy_device())
    wanted = _train(name, variant, around, torch.device("cpu"))
    return beside_eager.difference(found, wanted, rtol=2e-4, atol=2e-5, equal_nan=False)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tier", choices=TIERS, default="lowered")
    parser.add_argument("--around", choices=tuple(AROUND), nargs="*", default=tuple(AROUND))
    args = parser.parse_args()
    differ = 0
    for around in args.around:
        for name, variant in VARIANTS:
            began = time.monotonic()
            with tier(args.tier):
                found = difference(name, variant, around)
            differ += bool(found)
            took = time.monotonic() - began
            print(f"{around}, {name}, {variant}: {found or 'equal'} ({took:.1f} s)", flush=True)
    print(f"{len(args.around) * len(VARIANTS)} programs, {args.tier}: {differ} differ")
    return 1 if differ else 0


if __name__ == "__main__":
    sys.exit(main())
