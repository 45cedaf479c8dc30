"""Dropout draws eager's masks, and repeats in C++ without a call of Python's."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from ltc_core import metrics
from ltc_core.record import fast_path
from ltc_core.tensor.lazy_tensor import HANDLERS

aten = torch.ops.aten
Tensor = torch.Tensor


@pytest.fixture(autouse=True)
def in_cpp() -> None:
    assert fast_path.extension.load() is not None and fast_path.install()


def drawn(device: str, p: float, size: tuple[int, ...], dtype: torch.dtype) -> list[Tensor]:
    """Outputs and gradients of some calls, and numbers that are drawn after them."""
    torch.manual_seed(3)
    x = torch.linspace(-1, 1, 24).view(size).to(device, dtype).requires_grad_()
    found = []
    for _ in range(4):
        y = F.dropout(x, p)
        (grad,) = torch.autograd.grad((y * 2).sum(), x)
        found += [y.detach(), grad, torch.rand(3, device=device)]
    return [t.cpu() for t in found]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("p", [0.0, 0.1, 0.5, 1.0])
@pytest.mark.parametrize("size", [(24,), (2, 3, 4)])
def test_masks_are_eagers(size: tuple[int, ...], p: float, dtype: torch.dtype) -> None:
    for eager, ours in zip(drawn("cpu", p, size, dtype), drawn("ltc", p, size, dtype), strict=True):
        torch.testing.assert_close(ours, eager)


@pytest.mark.parametrize(
    ("change", "strides"),
    [
        (lambda t: t.t(), (1, 6)),
        (lambda t: t[:, :3], (3, 1)),
        (
            lambda t: t.view(1, 2, 2, 6).contiguous(memory_format=torch.channels_last),
            (24, 1, 12, 2),
        ),
    ],
    ids=["turned", "with gaps", "channels last"],
)
def test_the_mask_has_the_order_of_the_operand(change: Any, strides: tuple[int, ...]) -> None:
    for _ in range(3):
        found = []
        for device in ("cpu", "ltc"):
            torch.manual_seed(5)
            x = change(torch.linspace(1, 2, 24, device=device).view(4, 6))
            made, mask = aten.native_dropout.default(x, 0.5, True)
            assert aten.empty_like.default(x, dtype=torch.float64).dtype is torch.float64
            found.append((made.cpu(), mask.cpu()))
            of_cpp = [t if device == "cpu" else t._h.meta for t in (made, mask)]
            assert all((t.stride() if device == "cpu" else t.stride) == strides for t in of_cpp)
        for eager, ours in zip(*found, strict=True):
            assert torch.equal(eager, ours)


def test_a_step_that_repeats_calls_no_python(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.2), nn.Linear(8, 2), nn.Dropout(0.2)).to(
        "ltc"
    )
    x = torch.ones(3, 4).to("ltc")

    def step() -> None:
        model(x).sum().backward()
        torch.sum(model[0].weight.grad).item()  # type: ignore[arg-type]

    for _ in range(5):
        step()
    called = list[Any]()
    for op in (aten.native_dropout.default, aten.empty_like.default, aten.bernoulli_.float):
        monkeypatch.setitem(HANDLERS, op, lambda args, kwargs, op=op: called.append(op))
    step()
    assert not called


def test_in_evaluation_and_inference_mode() -> None:
    x = torch.ones(2, 3, device="ltc")
    assert torch.equal(F.dropout(x, 0.5, training=False).cpu(), torch.ones(2, 3))
    made, mask = aten.native_dropout.default(x, 0.5, False)
    assert torch.equal(made.cpu(), x.cpu()) and mask.cpu().all()
    found = []
    for device in ("cpu", "ltc"):
        torch.manual_seed(1)
        with torch.inference_mode():
            found.append(F.dropout(torch.ones(40, device=device), 0.5))
            assert found[-1].is_inference()
    assert torch.equal(found[1].cpu(), found[0])


@pytest.mark.parametrize("p", [-0.5, 1.5])
def test_errors_are_eagers(p: float) -> None:
    with pytest.raises(Exception) as eager:
        torch.dropout(torch.ones(2), p, True)
    with pytest.raises(Exception) as ours:
        torch.dropout(torch.ones(2, device="ltc"), p, True)
    assert str(eager.value).splitlines()[0] in str(ours.value)


def test_whole_numbers_are_refused_as_in_eager() -> None:
    for device in ("cpu", "ltc"):
        with pytest.raises(RuntimeError):
            torch.dropout(torch.ones(2, dtype=torch.int64, device=device), 0.5, True)


def test_memory_like_another_is_new_each_time() -> None:
    x = torch.ones(3, device="ltc")
    made = [torch.empty_like(x).fill_(k) for k in range(4)]
    assert [t.sum().item() for t in made] == [0, 3, 6, 9]
    metrics.clear_all()
    both = torch.empty_like(x), torch.empty_like(x)
    both[0].zero_()
    assert both[1].fill_(2).sum().item() == 6 and both[0].sum().item() == 0


def test_what_is_no_lazy_tensor_sees_the_whole_op() -> None:
    """A tensor that wraps one of the device, as a DTensor does, has an op of its own for dropout."""
    seen: list[str] = []

    class Wrapping(torch.Tensor):
        @staticmethod
        def __new__(cls, held: Tensor) -> Any:
            return torch.Tensor._make_wrapper_subclass(
                cls, held.shape, dtype=held.dtype, device=held.device
            )

        def __init__(self, held: Tensor) -> None:
            self.held = held

        @classmethod
        def __torch_dispatch__(cls, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            seen.append(str(op))
            given = [a.held if isinstance(a, Wrapping) else a for a in args]
            return op(*given, **(kwargs or {}))

    x = Wrapping(torch.ones(2, 3, device="ltc"))
    with torch.no_grad():
        F.dropout(x, 0.5)
        torch.empty_like(x)
        _ = x / torch.tensor(2.0)
        F.linear(x, torch.ones(4, 3, device="ltc"))
    assert seen[:3] == ["aten.native_dropout.default", "aten.empty_like.default", "aten.div.Tensor"]
    assert "aten.mm.default" in seen and "aten.linear.default" not in seen
