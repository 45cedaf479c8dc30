"""A linear layer is one op where nothing needs its parts, with eager's numbers and errors."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.func import jvp, vmap
from torch.nn.functional import linear
from torch.utils._python_dispatch import TorchDispatchMode

from ltc_core import metrics
from ltc_core.record import fast_path

aten = torch.ops.aten
Tensor = torch.Tensor
DEVICES = ("cpu", "ltc")


@pytest.fixture(autouse=True)
def in_cpp() -> None:
    assert fast_path.extension.load() is not None and fast_path.install()


def drawn(device: str, *size: int, dtype: torch.dtype = torch.float32) -> Tensor:
    count = math.prod(size)
    return torch.linspace(-1, 1, count).sin().view(size).to(device, dtype)


def is_whole(f: Callable[[], Tensor]) -> tuple[Tensor, bool]:
    """What a function returns, and whether a linear layer of it was recorded as one op."""
    metrics.clear_all()
    found = f().cpu()
    return found, bool(metrics.counter_value("ltc::linear"))


def layer(device: str, bias: bool = True, **other: Any) -> list[Tensor]:
    operands = [drawn(device, 5, 4, **other), drawn(device, 5, **other)]
    return operands if bias else operands[:1]


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode, torch.enable_grad])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("size", [(3, 4), (2, 3, 4), (2, 1, 3, 4), (0, 4)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
def test_it_is_one_op_with_eagers_numbers(
    dtype: torch.dtype, size: tuple[int, ...], bias: bool, mode: Callable[[], Any]
) -> None:
    """Nothing requires a gradient."""
    for _ in range(3):  # as Python records it, then C++
        found = []
        for device in DEVICES:
            with mode():
                x, operands = drawn(device, *size, dtype=dtype), layer(device, bias, dtype=dtype)
                found.append(linear(x, *operands))
        assert found[1].stride() == found[0].stride()
        assert torch.equal(found[1].cpu(), found[0])
    with mode():
        assert is_whole(lambda: linear(x, *operands))[1]


APART: dict[str, Callable[[str], Tensor]] = {
    "one row": lambda d: linear(drawn(d, 4), *layer(d)),
    "rows with gaps": lambda d: linear(drawn(d, 3, 2, 4).transpose(0, 1), *layer(d)),
    "a weight of one dim": lambda d: linear(drawn(d, 3, 4), drawn(d, 4)),
    "a gradient": lambda d: linear(drawn(d, 3, 4).requires_grad_(), *layer(d)),
    "a gradient of the bias": lambda d: linear(
        drawn(d, 3, 4), drawn(d, 5, 4), drawn(d, 5).requires_grad_()
    ),
    "a tangent": lambda d: jvp(
        lambda x: linear(x, *layer(d)), (drawn(d, 3, 4),), (drawn(d, 3, 4),)
    )[1],
    "a batch": lambda d: vmap(lambda x: linear(x, *layer(d)))(drawn(d, 6, 3, 4)),
}


@pytest.mark.filterwarnings("ignore:.*torch.jit.script")  # PyTorch's own, for forward-mode autograd
@pytest.mark.parametrize("name", APART)
def test_what_needs_the_parts_has_them(name: str) -> None:
    found, is_one = is_whole(lambda: APART[name]("ltc").detach())
    assert not is_one
    torch.testing.assert_close(found, APART[name]("cpu").detach())


def test_rows_with_gaps_have_the_parts_in_inference_mode() -> None:
    with torch.inference_mode():
        for _ in range(3):
            found, is_one = is_whole(lambda: APART["rows with gaps"]("ltc"))
            assert not is_one
            torch.testing.assert_close(found, APART["rows with gaps"]("cpu"))


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_a_step_has_eagers_gradients_after_a_step_without(mode: Callable[[], Any]) -> None:
    found = []
    for device in DEVICES:
        x, (weight, bias) = drawn(device, 3, 4), layer(device)
        weight.requires_grad_()
        for _ in range(3):
            with mode():
                first = linear(x, weight, bias).cpu()
            linear(x, weight, bias).square().sum().backward()
        assert weight.grad is not None
        found.append((first, weight.grad.cpu()))
    for eager, ours in zip(*found, strict=True):
        assert torch.equal(ours, eager)


def test_a_mode_sees_the_parts_as_in_eager() -> None:
    class Seen(TorchDispatchMode):
        def __init__(self) -> None:
            super().__init__()
            self.ops: list[str] = []

        def __torch_dispatch__(
            self, op: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            self.ops.append(str(op))
            return op(*args, **(kwargs or {}))

    seen = []
    for device in DEVICES:
        x, operands = drawn(device, 3, 4), layer(device)
        with Seen() as mode:
            linear(x, *operands)
        seen.append(mode.ops)
    assert seen[0] == seen[1] and "aten.addmm.default" in seen[0]


FAULTS: dict[str, Callable[[str], Tensor]] = {
    "sizes": lambda d: linear(drawn(d, 2, 3), drawn(d, 4, 5)),
    "size of the bias": lambda d: linear(drawn(d, 2, 3), drawn(d, 4, 3), drawn(d, 7)),
    "dims of the bias": lambda d: linear(drawn(d, 2, 2, 3), drawn(d, 4, 3), drawn(d, 1, 1, 4)),
    "dtypes": lambda d: linear(drawn(d, 2, 3), drawn(d, 4, 3, dtype=torch.float64)),
    "dtype of the bias": lambda d: linear(
        drawn(d, 2, 3), drawn(d, 4, 3), drawn(d, 4, dtype=torch.float64)
    ),
}


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("name", FAULTS)
def test_errors_are_eagers(name: str, mode: Callable[[], Any]) -> None:
    with mode():
        with pytest.raises(RuntimeError) as eager:
            FAULTS[name]("cpu")
        with pytest.raises(RuntimeError) as ours:
            FAULTS[name]("ltc").cpu()
    assert str(eager.value).splitlines()[0] in str(ours.value)


def test_rows_of_any_number_are_one_program() -> None:
    """As in inference with prompts of several lengths."""
    operands = layer("ltc")
    eager = layer("cpu")
    with torch.no_grad():
        for n in range(3, 40):
            if n == 30:
                metrics.clear_all()
            found = linear(drawn("ltc", 2, n, 4), *operands).cpu()
            assert torch.equal(found, linear(drawn("cpu", 2, n, 4), *eager))
    assert not metrics.counter_value("UncachedCompile")


def test_the_parts_are_autocasts() -> None:
    with torch.no_grad(), torch.autocast("ltc", torch.bfloat16):
        found, is_one = is_whole(lambda: linear(drawn("ltc", 3, 4), *layer("ltc")))
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(found, linear(drawn("cpu", 3, 4), *layer("cpu")))
    assert is_one and found.dtype is torch.bfloat16
