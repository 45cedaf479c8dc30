"""`scan` of a pure function on XLA through JAX: one loop of the program, with the values and gradients of eager."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from functorch.compile import min_cut_rematerialization_partition
from torch import nn

import ltc_core as ltc
from ltc_core import metrics
from ltc_core.api.loops import fori_loop, gradient_accumulation, scan, scan_layers, while_loop
from ltc_core.errors import OutsideWriteError
from ltc_core.graph.loop import BODIES
from ltc_core.runtime.devices import context
from ltc_core.runtime.worker import Job
from ltc_core.settings import settings
from tests.core.counting import Counting

Tensor = torch.Tensor
PARTITIONS = (None, min_cut_rematerialization_partition)


def scans() -> int:
    return metrics.counter_value("ltc::scan") or 0


def beside_eager(train: Callable[[Any], Any], loops: int, **tolerances: float) -> None:
    """The same numbers on the device, with so many loops recorded and nothing on the host."""
    expected = train("cpu")
    before, unrolled = scans(), metrics.counter_value("LoopUnrolled")
    with Counting() as counted:
        found = train(ltc.lazy_device())
    torch.testing.assert_close(found, expected, **tolerances)
    assert not counted.fallbacks
    assert scans() - before == loops
    assert metrics.counter_value("LoopUnrolled") == unrolled


@pytest.mark.parametrize("partition", PARTITIONS)
def test_weights_outside_and_structures(partition: Any) -> None:
    """The carry is a dict with a counter, a slice is a tuple, a leaf of `y` is None, and `fn` closes over a weight."""

    def train(device: Any) -> Any:
        torch.manual_seed(0)
        weight = (torch.randn(5, 5) / 3).to(device).requires_grad_()
        frozen = torch.randn(5).to(device)
        xs = torch.randn(6, 3, 5).to(device).requires_grad_()
        scale = torch.rand(6, 1, 1).to(device)
        optimizer = torch.optim.SGD([weight, xs], 0.01)

        def fn(carry: dict[str, Tensor], x: tuple[Tensor, Tensor]) -> Any:
            row, factor = x
            hidden = torch.tanh(row * factor + carry["h"] @ weight + frozen)
            return {"h": hidden, "n": carry["n"] + 1}, (hidden * 2, None, carry["n"])

        losses = []
        for _ in range(3):
            first = {
                "h": torch.zeros(3, 5, device=device),
                "n": torch.zeros((), dtype=torch.int64, device=device),
            }
            carry, (y, nothing, counted) = scan(fn, first, (xs, scale), partition, is_fn_pure=True)
            assert nothing is None
            loss = y.square().sum() + carry["h"].sin().sum() * carry["n"]
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.detach().cpu())
        return losses, counted.cpu(), weight.detach().cpu(), xs.detach().cpu()

    beside_eager(train, loops=6, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("partition", PARTITIONS)
def test_layers(partition: Any) -> None:
    """Blocks of a transformer, one parameter of each frozen: a loop of forward and one of backward."""

    def train(device: Any) -> Any:
        torch.manual_seed(0)
        layers = nn.ModuleList(
            nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True) for _ in range(3)
        ).to(device)
        for layer in layers:
            layer.norm1.bias.requires_grad_(False)  # type: ignore[union-attr, operator]
        x = torch.randn(2, 5, 8).to(device)
        optimizer = torch.optim.SGD(
            [p for p in layers.parameters() if p.requires_grad], 0.05, momentum=0.9
        )
        losses = []
        for _ in range(3):
            y = scan_layers(layers, x, partition, is_layer_pure=True)
            loss = y.square().mean() + y.sin().sum()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.detach().cpu())
        with torch.no_grad():
            losses.append(scan_layers(layers, x, is_layer_pure=True).cpu())
        return losses, [p.detach().cpu() for p in layers.parameters()]

    beside_eager(train, loops=7, rtol=1e-3, atol=1e-4)


def _dropout(carry: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
    return carry, torch.nn.functional.dropout(x, 0.0, training=False) * carry + torch.rand_like(
        x
    ) * 0


def _drops(carry: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
    return carry, torch.nn.functional.dropout(x * trained, 0.5)


def _looks(carry: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
    return (carry if x.sum().item() > 0 else -carry), x


def _writes(carry: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
    counted.add_(1)
    return carry + x.sum(), x


def _indexes(carry: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
    return carry, x[(x > 0).long()]


def _grows(carry: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
    return torch.cat([carry, x]), x


counted: Tensor
trained: Tensor


@pytest.mark.parametrize("fn", [_dropout, _drops, _looks, _writes, _indexes, _grows])
def test_what_cannot_be_a_loop_is_recorded_one_by_one(
    fn: Callable[..., Any], capsys: pytest.CaptureFixture[str]
) -> None:
    global counted, trained
    found = []
    for device in ("cpu", ltc.lazy_device()):
        counted = torch.zeros((), device=device)
        trained = torch.ones(3, device=device, requires_grad=True)
        torch.manual_seed(0)
        before = scans()
        xs = (torch.arange(12.0).reshape(4, 3) - 4).to(device)
        with settings.override(explain=True):
            carry, y = scan(fn, torch.ones(3, device=device), xs, is_fn_pure=True)
        found.append([carry.cpu(), y.cpu(), counted.cpu()])
        assert scans() == before
    torch.testing.assert_close(found[1], found[0])
    assert "not a loop of the program: " in capsys.readouterr().err
    assert metrics.counter_value("LoopUnrolled")


def test_a_weight_that_is_frozen_later() -> None:
    weight = torch.ones(2, device=ltc.lazy_device()).requires_grad_()

    def fn(carry: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        return carry * weight + x, carry

    xs = torch.ones(3, 2, device=weight.device)
    for is_trained in (True, False, True):
        weight.requires_grad_(is_trained)
        weight.grad = None
        carry, _ = scan(fn, torch.zeros(2, device=weight.device), xs, is_fn_pure=True)
        assert carry.requires_grad is is_trained and carry.tolist() == [3.0, 3.0]
        if is_trained:
            carry.sum().backward()
            assert weight.grad is not None and weight.grad.tolist() == [3.0, 3.0]


def test_a_pure_function_is_called_once() -> None:
    calls = []

    def fn(carry: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        calls.append(1)
        return carry + x, carry * x

    device = ltc.lazy_device()
    for length in (4, 4, 9):
        xs = torch.arange(float(2 * length), device=device).reshape(length, 2)
        carry, y = scan(fn, torch.ones(2, device=device), xs, is_fn_pure=True)
        assert carry.tolist() == (xs.cpu().sum(0) + 1).tolist() and y.shape == (length, 2)
        if length == 4:
            traced = len(calls)
    assert len(calls) == 2 * traced  # once more for another size, and not once a slice


def test_the_worker_traces_no_program_meanwhile() -> None:
    """Two threads that trace at a time would meet in a variable of `torch.fx`."""
    x = torch.ones(4, 3, device=ltc.lazy_device())
    were_idle = []

    def fn(carry: Tensor, row: Tensor) -> tuple[Tensor, Tensor]:
        were_idle.append(context(0).worker.is_idle)
        return carry + row, carry * row

    context(0).worker.submit(Job(lambda: time.sleep(0.3)))
    last, _ = scan(fn, torch.zeros(3, device=x.device), x, is_fn_pure=True)
    assert were_idle and all(were_idle)
    assert last.tolist() == [4.0] * 3


def whiles() -> int:
    return metrics.counter_value("ltc::while_loop") or 0


def test_a_loop_with_a_condition_is_not_waited_for() -> None:
    """Newton's method with a weight from outside; how often it goes round depends on the numbers."""

    def roots(device: Any) -> tuple[Tensor, Tensor]:
        goal = torch.tensor([2.0, 9.0, 50.0]).to(device)

        def goes_on(n: Tensor, x: Tensor, limit: Tensor) -> Tensor:
            return ((x * x - goal).abs().max() > 1e-4) & (n < limit)

        def body(n: Tensor, x: Tensor, limit: Tensor) -> tuple[Tensor, Tensor]:
            return n + 1, (x + goal / x) / 2

        n = torch.zeros((), dtype=torch.int64, device=device)
        limit = torch.tensor(100, device=device)
        n, x = while_loop(goes_on, body, (n, torch.ones(3, device=device)), (limit,))
        return n, x

    expected = roots("cpu")
    before = whiles()
    for _ in range(2):
        with Counting() as counted:
            found = roots(ltc.lazy_device())
        assert not counted.syncs
        torch.testing.assert_close([t.cpu() for t in found], list(expected))
    assert whiles() - before == 2


def test_a_loop_of_a_count_that_a_program_computes() -> None:
    """One program for all counts; with a gradient the loop is a scan."""
    device = ltc.lazy_device()
    weight = torch.tensor([1.5, -0.5])
    before, unrolled = whiles(), metrics.counter_value("LoopUnrolled")
    for upper in (5, 3, 0):
        found = {}
        for place in (torch.device("cpu"), device):
            w = weight.to(place)
            count = torch.tensor([2, upper]).to(place).sum() - 2
            found[place.type] = fori_loop(0, count, lambda v, w=w: v * w + 1, w + 0)
        assert [t.cpu().tolist() for t in found[device.type]] == [t.tolist() for t in found["cpu"]]
    assert whiles() - before == 3
    assert fori_loop(1, 4, lambda v: v * 2, torch.ones((), device=device))[1].item() == 8.0
    with pytest.raises(ValueError, match="upper must not be below lower"):
        fori_loop(4, 1, lambda v: v, torch.ones((), device=device))

    grads = []
    for place in ("cpu", device):
        w = weight.clone().to(place).detach().requires_grad_()
        left, v = fori_loop(0, 4, lambda v, w=w: (v * w).sin(), torch.ones(2, device=place))
        v.sum().backward()
        assert int(left) == 0 and w.grad is not None
        grads.append(w.grad.cpu())
    torch.testing.assert_close(grads[1], grads[0])
    assert metrics.counter_value("LoopUnrolled") == unrolled


def test_gradients_are_accumulated_in_a_loop() -> None:
    """Forward and backward of each slice are an iteration; the memory is that of one slice."""

    def train(device: Any) -> Any:
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3)).to(device)
        optimizer = torch.optim.SGD(net.parameters(), 0.1)
        x, y = torch.randn(4, 5, 6).to(device), torch.randint(3, (4, 5)).to(device)
        seen = torch.zeros((), device=device)

        def step(x: Tensor, y: Tensor, seen: Tensor) -> tuple[Tensor, Tensor]:
            one_hot = (y.unsqueeze(-1) == torch.arange(3, device=y.device)).float()
            return -(net(x).log_softmax(-1) * one_hot).sum(-1).mean(), seen + len(x)

        losses = []
        for _ in range(3):
            loss, seen = gradient_accumulation(step, (x, y), net, seen)
            gradient_accumulation(step, (x, y), net, seen)  # added to what is there
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.cpu())
        return losses, seen.cpu(), [p.detach().cpu() for p in net.parameters()]

    beside_eager(train, loops=6, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("kind", ["unused", "another", "dropout"])
def test_an_accumulation_that_cannot_be_a_loop(kind: str) -> None:
    """A parameter that is not used keeps no gradient, and one of another module gets its own."""
    found = []
    for device in ("cpu", ltc.lazy_device()):
        torch.manual_seed(0)
        net, other = nn.Linear(3, 3).to(device), nn.Linear(3, 3).to(device)
        model = nn.ModuleList([net, other]) if kind == "unused" else net

        def step(x: Tensor, net: nn.Module = net, other: nn.Module = other) -> Tensor:
            y = other(net(x)) if kind == "another" else net(x)
            return (nn.functional.dropout(y, 0.5) if kind == "dropout" else y).square().mean()

        before = scans()
        x = torch.arange(12.0).reshape(2, 2, 3).to(device)
        torch.manual_seed(1)
        loss = gradient_accumulation(step, (x,), model)
        grads = [p.grad if p.grad is None else p.grad.cpu() for p in (net.weight, other.weight)]
        found.append((loss.cpu(), grads))
        assert scans() == before
    torch.testing.assert_close(found[1], found[0])
    assert (found[1][1][1] is None) == (kind != "another")


def test_the_default_partition_recomputes_nothing() -> None:
    """Backward gets what forward has computed, and the slices themselves where it needs them."""

    def fn(carry: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        return carry, torch.sin(torch.sin(x))

    xs = torch.rand(7, 2, device=ltc.lazy_device()).requires_grad_()
    kept: list[Tensor] = []
    before = set(BODIES)

    def pack(t: Tensor) -> Tensor:
        kept.append(t)
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        _, y = scan(fn, xs.new_zeros(2), xs, is_fn_pure=True)
    y.sum().backward()
    assert xs.grad is not None
    torch.testing.assert_close(xs.grad, xs.sin().cos() * xs.cos())
    sines = [BODIES[name].code.count("aten.sin.") for name in set(BODIES) - before]
    assert sorted(sines) == [0, 2]
    assert [t for t in kept if t is xs]


def test_a_function_that_is_traced_at_each_call() -> None:
    """It need not be pure: another weight each time. Why it is no loop is remembered; writes outside are an error."""
    device, factor, calls = ltc.lazy_device(), [2.0], []

    def fn(carry: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        calls.append(1)
        return carry + x * factor[0], x

    before = scans()
    for number in (2.0, 3.0):
        factor[0] = number
        carry, _ = scan(
            fn, torch.zeros(2, device=device), torch.ones(4, 2, device=device), None, False, True
        )
        assert carry.tolist() == [4 * number] * 2
    assert scans() - before == 2

    def draws(carry: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        calls.append(1)
        return carry, torch.rand_like(x)

    counts = []
    for _ in range(2):
        calls.clear()
        scan(
            draws, torch.zeros(2, device=device), torch.ones(4, 2, device=device), None, False, True
        )
        counts.append(len(calls))
    assert counts[0] > counts[1] == 4

    outside = torch.zeros(2, device=device)

    def writes(carry: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        outside.add_(1)
        return carry + x, x + outside

    with pytest.raises(OutsideWriteError, match="writes to a tensor that is not its argument"):
        scan(
            writes,
            torch.zeros(2, device=device),
            torch.ones(4, 2, device=device),
            None,
            False,
            True,
        )
    _, y = scan(
        writes, torch.zeros(2, device=device), torch.ones(4, 2, device=device), is_fn_pure=True
    )
    assert y[:, 0].tolist() == [2, 3, 4, 5]
