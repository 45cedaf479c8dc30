"""Ops in inference mode, recorded as elsewhere: values, views and flags are eager's, and Python is not asked."""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F

from ltc_core import mark_step
from ltc_core.record import fast_path
from ltc_core.tensor.lazy_tensor import LazyTensor
from tests.core.beside_eager import beside_eager

pytestmark = pytest.mark.skipif(fast_path.extension.load() is None, reason="no C++ compiler")

Call = Callable[[torch.Tensor], torch.Tensor]

CALLS: dict[str, Call] = {
    "flatten": lambda x: x.flatten(1),
    "reshape": lambda x: x.reshape(-1, 4).t(),
    "reshape_copies": lambda x: x.transpose(0, 2).reshape(-1),
    "matmul": lambda x: torch.matmul(x, x.transpose(-1, -2)),
    "einsum": lambda x: torch.einsum("bij,bkj->bik", x, x),
    "attention": lambda x: F.scaled_dot_product_attention(x[None], x[None], x[None]),
    "rms_norm": lambda x: F.rms_norm(x, (4,)),
    "cross_entropy": lambda x: F.cross_entropy(
        x.flatten(0, 1), torch.zeros(6, dtype=torch.int64, device=x.device)
    ),
    "chunk": lambda x: torch.cat(x.chunk(2, -1)[::-1], -1),
    "slices": lambda x: x[:, -1] + x[:, 0],
    "expand": lambda x: x[:, :1].expand_as(x) * 2,
    "conv": lambda x: F.conv1d(x, torch.ones(2, 3, 1, device=x.device)),
    "written": lambda x: x.clone().view(-1)[2:5].zero_().add(1),
}


@pytest.mark.parametrize("name", CALLS)
def test_values_and_flags_are_eagers(name: str) -> None:
    def program(device: torch.device) -> tuple[list[torch.Tensor], list[bool]]:
        torch.manual_seed(0)
        given = torch.randn(2, 3, 4).to(device)
        found, flags = [], []
        for _ in range(4):
            with torch.inference_mode():
                for x in (given, given + 1):
                    y = CALLS[name](x)
                    found.append(y)
                    flags += [y.is_inference(), y._is_view() if not y.is_inference() else False]
            mark_step()
        return found, flags

    beside_eager(program, 1e-6, 1e-6)


def test_a_model_is_recorded_without_python() -> None:
    torch.manual_seed(0)
    model = torch.nn.Sequential(
        torch.nn.Conv1d(4, 8, 1), torch.nn.Flatten(1), torch.nn.Linear(40, 8)
    ).eval()
    x = torch.randn(3, 4, 5)
    expected = model(x)
    model = model.to("ltc")
    x = x.to("ltc")
    for step in range(6):
        if step == 4:
            before = fast_path.num_calls()
        with torch.inference_mode():
            y = model(x)
        mark_step()
    calls, python = (now - then for now, then in zip(fast_path.num_calls(), before, strict=True))
    assert calls >= 6 and python == 0
    torch.testing.assert_close(y.cpu(), expected)


def test_a_view_of_a_normal_tensor_is_one() -> None:
    """It may be written, and used by autograd, outside of inference mode."""
    weight = torch.ones(4, 4, device="ltc")
    for _ in range(3):
        with torch.inference_mode():
            part = weight[1:].flatten()
        assert not part.is_inference()
        part.add_(1)
        mark_step()
    assert weight.cpu()[1:].eq(4).all() and weight.cpu()[0].eq(1).all()


class Wrapped(torch.Tensor):
    """A tensor of another class, which takes its calls itself."""

    held: torch.Tensor

    @staticmethod
    def __new__(cls, held: torch.Tensor) -> "Wrapped":
        made = torch.Tensor._make_wrapper_subclass(cls, held.shape, dtype=held.dtype, device="cpu")
        made.held = held
        return made

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        return cls(func(*(a.held if isinstance(a, cls) else a for a in args), **(kwargs or {})))


def test_other_classes_take_their_calls_themselves() -> None:
    with torch.inference_mode():
        for _ in range(3):
            assert type(torch.ones(2, 3, device="ltc").flatten()) is LazyTensor
        found = Wrapped(torch.arange(6.0).view(2, 3)).flatten()
    assert type(found) is Wrapped and found.held.shape == (6,)
