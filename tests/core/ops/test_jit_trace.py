"""`torch.jit.trace` writes down all that a model computes on the device: its results follow from the input."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from tests.core.beside_eager import beside_eager

MODELS: dict[str, Callable[[], nn.Module]] = {
    "conv": lambda: nn.Conv2d(3, 4, 3, padding=1),
    "conv_and_more": lambda: nn.Sequential(
        nn.Conv2d(3, 4, 3, bias=False), nn.BatchNorm2d(4), nn.ReLU()
    ),
    "same_padding": lambda: nn.Conv2d(3, 6, 3, padding="same", groups=3),
    "transposed": lambda: nn.Sequential(nn.ConvTranspose2d(3, 4, 2, 2), nn.MaxPool2d(2)),
    "linear": lambda: nn.Sequential(nn.Linear(8, 4), nn.GELU(), nn.Linear(4, 2)),
}


@pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning")
@pytest.mark.parametrize("needs_grad", [False, True])
@pytest.mark.parametrize("name", MODELS)
def test_a_traced_model_computes_from_its_input(name: str, needs_grad: bool) -> None:
    def program(device: torch.device) -> Any:
        torch.manual_seed(0)
        model = MODELS[name]().to(device).eval()
        first, second = (torch.randn(2, 3, 8, 8).to(device) for _ in range(2))
        with torch.set_grad_enabled(needs_grad):
            traced: Any = torch.jit.trace(model, first)  # type: ignore[no-untyped-call]
            out = traced(second)
            difference = (out - model(second)).abs().max()
        if not needs_grad:
            return out, difference
        out.square().mean().backward()
        return out, difference, [p.grad for p in model.parameters()]

    beside_eager(program, rtol=1e-5, atol=1e-6)
