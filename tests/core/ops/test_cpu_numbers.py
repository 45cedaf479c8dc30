"""A CPU tensor without dims beside a tensor of the device is a number: eager's results, and nothing is uploaded."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from ltc_core import metrics
from ltc_core.record import fast_path

Tensor = torch.Tensor
FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


@pytest.fixture(autouse=True, params=["C++", "Python"])
def recorder(request: pytest.FixtureRequest) -> object:
    assert fast_path.extension.load() is not None and fast_path.install()
    was_on = fast_path.enable(request.param == "C++")
    yield
    fast_path.enable(was_on)


def drawn(dtype: torch.dtype) -> Tensor:
    return torch.linspace(-2, 3, 12).view(3, 4).to(dtype)


NUMBERS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "x / s": lambda x, s: x / s,
    "x * s": lambda x, s: x * s,
    "x + s": lambda x, s: x + s,
    "x - s": lambda x, s: x - s,
    "x + 2 s": lambda x, s: torch.add(x, s, alpha=2),
    "x += s": lambda x, s: x.clone().add_(s),
    "x /= s": lambda x, s: x.clone().div_(s),
}
OTHERS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "s * x": lambda x, s: s * x,
    "s - x": lambda x, s: s - x,
    "s / x": lambda x, s: s / x,
    "no dims": lambda x, s: x.sum() * s,
    "integers": lambda x, s: x.long() * s,
    "an integer": lambda x, s: x * s.long(),
}


@pytest.mark.parametrize("of", FLOATS, ids=str)
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("name", [*NUMBERS, *OTHERS])
def test_results_are_eagers(name: str, dtype: torch.dtype, of: torch.dtype) -> None:
    f = (NUMBERS | OTHERS)[name]
    for number in (2.8284271247461903, -0.1, 3.0):
        x, s = drawn(dtype), torch.tensor(number, dtype=of)
        eager, ours = f(x, s), f(x.to("ltc"), s)
        assert ours.dtype is eager.dtype
        assert torch.equal(ours.cpu(), eager)


@pytest.mark.parametrize("name", [*NUMBERS, "s * x"])
def test_nothing_is_uploaded_and_one_program_serves_all_numbers(name: str) -> None:
    f = (NUMBERS | OTHERS)[name]
    x = drawn(torch.float32).to("ltc")
    f(x, torch.tensor(0.5)).cpu()
    metrics.clear_all()
    for k in range(4):
        found = f(x, torch.tensor(k + 1.5)).cpu()
        assert torch.equal(found, f(x.cpu(), torch.tensor(k + 1.5)))
    assert not metrics.counter_value("CreateDataHandles")
    assert not metrics.counter_value("UncachedCompile")


def test_gradients() -> None:
    found = []
    for device in ("cpu", "ltc"):
        x = drawn(torch.float32).to(device).requires_grad_()
        weight = torch.tensor(2.0, requires_grad=True)  # a parameter that stayed on the CPU
        for k in range(3):
            s = torch.tensor(k + 2.0)
            (x / s * weight + s).sin().sum().backward()
        assert x.grad is not None and weight.grad is not None
        found.append((x.grad.cpu(), weight.grad.cpu()))
    for eager, ours in zip(*found, strict=True):
        torch.testing.assert_close(ours, eager)


def test_the_number_is_that_of_the_call() -> None:
    s = torch.tensor(2.0)
    y = drawn(torch.float32).to("ltc") * s
    s.fill_(7.0)
    assert torch.equal(y.cpu(), drawn(torch.float32) * 2)
