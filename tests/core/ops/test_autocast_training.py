"""Training under `torch.autocast`: checkpointing, custom functions, GradScaler, losses.

Losses are those of float32 and of autocast on the CPU, within what bfloat16 rounds.
"""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import ltc_core as ltc
from tests.core.counting import Counting

DEVICE = ltc.lazy_device().type
LOWER = [torch.bfloat16, torch.float16]


def lazy(*size: int) -> Tensor:
    return torch.randn(*size).to(DEVICE)


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_activation_checkpointing(use_reentrant: bool) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8)).to(DEVICE)
    x = lazy(3, 8).requires_grad_()
    grads = []
    for checkpointed in (False, True):
        model.zero_grad()
        with torch.autocast(DEVICE):
            out = checkpoint(model, x, use_reentrant=use_reentrant) if checkpointed else model(x)
        assert out.dtype == torch.bfloat16
        out.float().square().sum().backward()
        grads.append([p.grad.cpu() for p in model.parameters() if p.grad is not None])
    torch.testing.assert_close(grads[1], grads[0])


# -- custom functions ------------------------------------------------------------------------------


def make_function(cast_inputs: torch.dtype | None) -> type[torch.autograd.Function]:
    class Product(torch.autograd.Function):
        seen: list[tuple[str, torch.dtype, bool]] = []

        @staticmethod
        @torch.amp.custom_fwd(device_type=DEVICE, cast_inputs=cast_inputs)
        def forward(ctx: Any, a: Tensor, b: Tensor) -> Tensor:
            ctx.save_for_backward(a, b)
            Product.seen.append(("forward", a.dtype, torch.is_autocast_enabled(DEVICE)))
            return a @ b

        @staticmethod
        @torch.amp.custom_bwd(device_type=DEVICE)
        def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
            a, b = ctx.saved_tensors
            Product.seen.append(("backward", a.dtype, torch.is_autocast_enabled(DEVICE)))
            return grad @ b.t(), a.t() @ grad

    return Product


@pytest.mark.parametrize("cast_inputs", [None, torch.float32, torch.bfloat16])
def test_custom_forward_and_backward(cast_inputs: torch.dtype | None) -> None:
    function: Any = make_function(cast_inputs)
    a, b = lazy(3, 4).requires_grad_(), lazy(4, 5).requires_grad_()
    with torch.autocast(DEVICE):
        out = function.apply(a, b.bfloat16())
    assert out.dtype == (cast_inputs or torch.bfloat16)
    out.sum().backward()
    casting = cast_inputs is None
    dtype = cast_inputs or torch.float32
    assert function.seen == [("forward", dtype, casting), ("backward", dtype, casting)]
    assert a.grad is not None and b.grad is not None
    wanted = torch.ones(3, 5) @ b.detach().cpu().t()
    torch.testing.assert_close(a.grad.cpu(), wanted, atol=0.05, rtol=0.05)


# -- training --------------------------------------------------------------------------------------


class Net(nn.Module):
    """A convolution, a norm, attention and a loss: every list has an op in it."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(1, 8, 3)
        self.norm = nn.BatchNorm2d(8)
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)
        self.layer_norm = nn.LayerNorm(8)
        self.head = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.norm(self.conv(x)))
        x = x.flatten(2).transpose(1, 2)
        x = self.layer_norm(x + self.attention(x, x, x, need_weights=False)[0])
        return self.head(x.mean(1))


def train(
    device: str, dtype: torch.dtype | None, scaler: torch.amp.GradScaler | None = None
) -> list[float]:
    torch.manual_seed(0)
    model = Net().to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    losses = []
    for step in range(12):
        x = torch.randn(8, 1, 6, 6, generator=torch.Generator().manual_seed(step))
        target = (x.mean((1, 2, 3)) > 0).long().to(device)
        optimizer.zero_grad()
        with torch.autocast(device, dtype=dtype, enabled=dtype is not None):
            loss = F.cross_entropy(model(x.to(device)), target)
        if scaler is None:
            loss.backward()
            optimizer.step()
        else:
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 100.0)
            scaler.step(optimizer)
            scaler.update()
        losses.append(loss.detach())
        if device == DEVICE:
            ltc.mark_step()
    return [float(loss) for loss in losses]


def test_training_follows_float32_and_cpu_autocast() -> None:
    plain = train("cpu", None)
    assert plain[-1] < plain[0]
    low = train(DEVICE, torch.bfloat16)
    assert low == pytest.approx(plain, abs=0.05)
    assert low == pytest.approx(train("cpu", torch.bfloat16), abs=0.05)
    assert low != plain


def test_training_makes_no_new_graph_after_the_second_step() -> None:
    with Counting() as seen:
        train(DEVICE, torch.bfloat16)
    assert seen.compiles <= 2


@pytest.mark.parametrize("dtype", LOWER, ids=str)
def test_grad_scaler_trains_as_float32_does(dtype: torch.dtype) -> None:
    scaler = torch.amp.GradScaler(DEVICE, init_scale=2.0**8, growth_interval=4)
    losses = train(DEVICE, dtype, scaler)
    assert losses == pytest.approx(train("cpu", None), abs=0.05)
    assert scaler.get_scale() == 2.0**11  # 12 steps without an overflow
    on_cpu = torch.amp.GradScaler("cpu", init_scale=2.0**8, growth_interval=4)
    train("cpu", None, on_cpu)
    assert scaler.state_dict() == on_cpu.state_dict()


def test_grad_scaler_skips_a_step_that_overflows() -> None:
    weight = torch.ones(3, device=DEVICE).requires_grad_()
    optimizer = torch.optim.AdamW([weight], lr=0.1)
    scaler = torch.amp.GradScaler(DEVICE, init_scale=4.0, growth_interval=100)
    for factor, scale in ((1.0, 4.0), (float("inf"), 2.0), (float("nan"), 1.0), (1.0, 1.0)):
        before = weight.detach().cpu()
        optimizer.zero_grad()
        scaler.scale((weight * factor).sum()).backward()
        scaler.step(optimizer)
        scaler.update()
        ltc.mark_step()
        assert scaler.get_scale() == scale
        assert torch.equal(weight.detach().cpu(), before) == (factor != 1.0)


def test_grad_scaler_state_can_be_saved() -> None:
    scaler = getattr(torch, DEVICE).amp.GradScaler(init_scale=16.0)
    other = torch.amp.GradScaler(DEVICE, init_scale=2.0)
    other.load_state_dict(scaler.state_dict())
    assert other.get_scale() == 16.0


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
def test_recurrent_layers(kind: type[nn.RNNBase]) -> None:
    torch.manual_seed(0)
    layer = kind(4, 6, batch_first=True)
    x = torch.randn(2, 5, 4)
    wanted, _ = layer(x)
    wanted.sum().backward()
    grad = layer.weight_hh_l0.grad
    layer = layer.to(DEVICE)
    layer.zero_grad()
    with torch.autocast(DEVICE):
        found, _ = layer(x.to(DEVICE))
    assert found.dtype == torch.bfloat16
    found.float().sum().backward()
    torch.testing.assert_close(found.float().cpu(), wanted, atol=0.02, rtol=0.05)
    assert grad is not None and layer.weight_hh_l0.grad is not None
    torch.testing.assert_close(layer.weight_hh_l0.grad.cpu(), grad.cpu(), atol=0.1, rtol=0.05)
